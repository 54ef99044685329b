"""What podman or docker is told to run follows from the file and from what the host has."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest
from tests.fake_podman import SWITCHES, VALUES
from tests.unit.cli.remote.test_plan import FACTS

from shoal.cli.remote.container import ContainerImage
from shoal.cli.remote.hosts_file import HostEntry, HostsFile, read_hosts
from shoal.cli.remote.plan import Wanted, problems_of
from shoal.cli.remote.probe import Containers, HostFacts, probe_script
from shoal.errors import ConfigError

IMAGE = ContainerImage("ghcr.io/you/shoal:1.2")
PODMAN = Containers("/usr/bin/podman", has_image=True, user="1000:1000")
DOCKER = Containers("/usr/bin/docker", has_image=True, user="1000:1000")


def _facts(containers: Containers, gpus: int = 0) -> HostFacts:
    return msgspec.structs.replace(FACTS, containers=containers, gpus=gpus)


def _argv(facts: HostFacts, **entry: object) -> list[str]:
    """Return what starts the servers of such a host."""
    file = HostsFile.model_validate({"swarm": {"client": "desk"}, "hosts": {"desk": {"servers": 0}, "box": entry}})
    servers = Wanted(file, "herd", "text: 1", IMAGE).servers("box", facts)
    assert servers is not None
    return list(servers.argv)


def test_podman_runs_servers_with_the_host_s_network_as_the_user_and_starts_them_again() -> None:
    words = " ".join(_argv(_facts(PODMAN), servers=2))
    assert words == (
        "/usr/bin/podman run --detach --name shoal-herd-servers --restart on-failure:10 --stop-signal SIGINT "
        "--stop-timeout 60 --no-healthcheck --log-driver json-file --log-opt max-size=16m "
        "--workdir /home/ada/.local/share/shoal/units/herd-servers --network host --user 1000:1000 --userns keep-id "
        "--cap-drop all --security-opt no-new-privileges --security-opt label=disable --env HOME=/home/ada "
        "--env USER=shoal --volume /home/ada/.local/share/shoal:/home/ada/.local/share/shoal "
        "--volume /home/ada/.config/shoal:/home/ada/.config/shoal --volume /home/ada/.cache:/home/ada/.cache "
        "--entrypoint shoal ghcr.io/you/shoal:1.2 join --experiment-prefix herd --num-servers 2 --host-name box"
    )


@pytest.mark.parametrize(
    ("containers", "parts"),
    [
        # podman refuses `keep-id` to root, who has the same number inside anyway.
        (Containers("/usr/bin/podman", user="0:0"), "--user 0:0 --cap-drop"),
        (DOCKER, "--user 1000:1000 --cap-drop"),
        (Containers("/usr/bin/docker", user="1000:1000", is_rootless=True), "--user 0:0 --cap-drop"),
    ],
)
def test_what_a_container_writes_belongs_to_the_user(containers: Containers, parts: str) -> None:
    assert parts in " ".join(_argv(_facts(containers)))


@pytest.mark.parametrize(
    ("containers", "entry", "lent"),
    [
        (PODMAN, {}, "--device nvidia.com/gpu=all"),
        (DOCKER, {}, "--gpus all"),
        (DOCKER, {"device": "cpu"}, ""),
    ],
)
def test_a_host_with_gpus_lends_them_to_its_servers_and_not_to_its_client(
    containers: Containers, entry: dict[str, object], lent: str
) -> None:
    facts = _facts(containers, gpus=2)
    assert lent in " ".join(_argv(facts, **entry))
    assert bool(lent) == any(word in ("--gpus", "nvidia.com/gpu=all") for word in _argv(facts, **entry))
    client = " ".join(IMAGE.argv(HostEntry(), facts, "herd-client", ("start-trainer-client",)))
    assert "gpu" not in client
    assert "--restart" not in client, "a client that fails is for a person to look at"
    assert "gpu" not in IMAGE.once(HostEntry(), facts, "join")


@pytest.mark.parametrize("containers", [PODMAN, DOCKER])
def test_every_flag_is_one_that_the_engine_s_pages_have(containers: Containers) -> None:
    known = {f"--{name}" for name in (*SWITCHES["run"], *VALUES["run"])}
    if not containers.is_podman:
        known.add("--gpus")
    argv = _argv(_facts(containers, gpus=1))
    flags = {word for word in argv[: argv.index(IMAGE.image)] if word.startswith("--")}
    assert flags - known == set()


@pytest.mark.parametrize(
    ("containers", "gpus", "entry", "part"),
    [
        (Containers(user="1000:1000"), 0, {}, "there is no podman and no docker: `sudo apt install podman` there"),
        (
            msgspec.structs.replace(PODMAN, says="Error: no subuid"),
            0,
            {},
            "podman does not work there: Error: no subuid",
        ),
        (msgspec.structs.replace(DOCKER, says="permission denied"), 0, {}, "sudo usermod -aG docker $USER"),
        (PODMAN, 1, {}, "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"),
        (PODMAN, 0, {"device": "cuda:0"}, "nvidia-smi finds no GPU"),
    ],
)
def test_what_is_missing_is_said_with_its_remedy(
    containers: Containers, gpus: int, entry: dict[str, object], part: str
) -> None:
    [problem] = problems_of(HostEntry.model_validate(entry), _facts(containers, gpus), IMAGE)
    assert part in problem


def test_a_host_needs_neither_python_nor_room_for_an_installation_where_it_has_podman() -> None:
    bare = msgspec.structs.replace(_facts(PODMAN), python="", has_venv=False, free_kb=0)
    assert [*problems_of(HostEntry(), bare, IMAGE)] == []
    lends = msgspec.structs.replace(PODMAN, lends_gpus=True)
    assert [*problems_of(HostEntry(), _facts(lends, gpus=1), IMAGE)] == []
    assert [*problems_of(HostEntry(device="cpu"), _facts(PODMAN, gpus=1), IMAGE)] == []


def test_scripts_are_such_that_a_shell_takes_them() -> None:
    facts = _facts(PODMAN)
    scripts = (
        IMAGE.script(HostEntry(), facts),
        IMAGE.once(HostEntry(), facts, "join --invitation=-"),
        IMAGE.beside("herd-client", "status"),
        probe_script("python3", "odd'image"),
    )
    for script in scripts:
        subprocess.run(["sh", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ("image: -x", "image: must be the name of an image"),
        ("image: a b", "image: must be the name of an image"),
        ("image: x\ninstall: wheel", "install: an image has what it was built with"),
        ("image: x\nextras: hf", "extras: an image has what it was built with"),
        ("image: x\npip_flags: --pre", "pip_flags: an image has what it was built with"),
    ],
)
def test_what_an_image_cannot_honour_is_refused(tmp_path: Path, more: str, part: str) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text(f"swarm: {{client: box}}\nhosts: {{box: {{}}}}\n{more}\n")
    with pytest.raises(ConfigError, match=part):
        read_hosts(path)


def test_a_host_s_own_python_beside_an_image_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text("swarm: {client: box}\nhosts: {box: {python: python3.12, system_site_packages: true}}\nimage: x\n")
    with pytest.raises(ConfigError) as raised:
        read_hosts(path)
    for key in ("hosts.box.python", "hosts.box.system_site_packages"):
        assert f"{key}: an image has what it was built with" in str(raised.value)
