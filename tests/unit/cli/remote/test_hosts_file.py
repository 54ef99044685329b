"""The file of all hosts: what is wrong in it is said at once, with the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli import main
from shoal.cli.remote import hosts_file
from shoal.cli.remote.hosts_file import read_hosts, read_swarm
from shoal.errors import ConfigError


def _file(directory: Path, text: str) -> Path:
    path = directory / "hosts.yaml"
    path.write_text(text)
    return path


def test_a_host_with_nothing_below_it_has_one_server_and_is_reached_by_its_name(tmp_path: Path) -> None:
    found = read_hosts(_file(tmp_path, "swarm: {client: desk}\nhosts:\n  desk: {servers: 0}\n  box:\n"))
    assert (found.hosts["box"].servers, found.hosts["box"].ssh, found.num_servers) == (1, None, 1)


def test_flags_are_taken_as_a_shell_takes_them_and_paths_are_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("{}")
    text = (
        "swarm: {client: box, config: own.yaml, flags: --diloco.outer-steps 3}\nhosts: {box: {flags: '--nice \"3 4\"'}}"
    )
    found = read_hosts(_file(tmp_path, text))
    assert found.swarm.flags == ("--diloco.outer-steps", "3")
    assert found.hosts["box"].flags == ("--nice", "3 4")
    assert found.swarm.config == tmp_path / "own.yaml"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "swarm: {client: box, colour: red}\nhosts: {box: {servers: -1, sshh: a}, two: {servers: few}}",
            (
                "swarm.colour: there is no such key; there are client, config, flags",
                "hosts.box.servers: must be at least 0",
                "hosts.two.servers: must be a whole number",
                "hosts.box.sshh: there is no such key; did you mean ssh?",
            ),
        ),
        ("hosts: {box: {}}", ("swarm: is missing",)),
        ("swarm: {client: box}\nhosts: {box: {ssh: -oProxyCommand=x}}", ("one word that does not begin with a dash",)),
        ("swarm: {client: desk}\nhosts: {box: {}}", ("swarm.client: desk is none of the hosts: box",)),
        ("swarm: {client: box}\nhosts: {box: {servers: 0}}", ("none has a server",)),
        ("swarm: {client: a}\nhosts: {a: {ssh: x}, b: {ssh: x}}", ("hosts.b.ssh: x is that of a already",)),
        ("swarm: {client: 'a b'}\nhosts: {'a b': {}}", ("hosts.a b: a name has up to 32 letters",)),
        (
            "swarm: {client: box}\nhosts: {box: {}}\ninstall: git+https://ada:t0ken@host/s",
            ("install: what stands before",),
        ),
        ("swarm: {client: box}\nhosts: {box: {}}\ninstall: https://t0ken@host/s.whl", ("git+ssh://git@",)),
        ("swarm: {client: box}\nhosts: {box: {}}\npip_flags: -i https://a:b@host", ("pip_flags: what stands before",)),
        ("swarm: {client: box, config: own.yaml, flags: --diloco.outer-stepz 3}\nhosts: {box: {}}", ("outer-stepz",)),
    ],
)
def test_all_that_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    (tmp_path / "own.yaml").write_text("{}")
    with pytest.raises(ConfigError) as raised:
        read_swarm(_file(tmp_path, text))
    assert [part for part in parts if part not in str(raised.value)] == [], str(raised.value)


def test_a_secret_of_an_address_is_not_told_and_one_that_is_none_is_taken(tmp_path: Path) -> None:
    head = "swarm: {client: box}\nhosts: {box: {}}\n"
    with pytest.raises(ConfigError) as raised:
        read_hosts(_file(tmp_path, f"{head}install: git+https://ada:t0ken@host/s"))
    assert "t0ken" not in str(raised.value)
    for address in ("git+ssh://git@host/s", "git+https://host/s@main", "shoal @ https://host/s.whl"):
        assert read_hosts(_file(tmp_path, f"{head}install: '{address}'")).install == address


def test_the_configuration_of_a_command_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.yaml").write_text("experiment_prefix: herd")
    loaded: list[Path] = []
    load = hosts_file.load_with_origins

    def counted(path: Path, *arguments: object) -> object:
        loaded.append(path)
        return load(path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(hosts_file, "load_with_origins", counted)
    path = _file(
        tmp_path, "swarm: {client: box, config: own.yaml}\nhosts: {box: {ssh: 'nobody'}}\nssh_command: 'false'"
    )
    assert main(["hosts", "restart", f"--file={path}"]) == 1
    assert loaded == [tmp_path / "own.yaml"]
