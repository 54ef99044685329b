"""What a host needs, and why it cannot take part, follows from the file and from what it has."""

from __future__ import annotations

import subprocess

import msgspec
import pytest

from shoal.cli.remote.hosts_file import HostEntry, HostsFile
from shoal.cli.remote.plan import Installation, Wanted, problems_of
from shoal.cli.remote.probe import HostFacts, probe_script

WHEEL = Installation("shoal-1.0-py3-none-any.whl", b"wheel", ())
FACTS = HostFacts(
    home="/home/ada",
    system="Linux x86_64",
    python="/usr/bin/python3",
    python_version="3.12",
    has_venv=True,
    uv="",
    is_writable=True,
    free_kb=100 * 1024 * 1024,
    installed=(),
    gpus=0,
    has_user_units=False,
    lingers=False,
    ahead_s=0.4,
)


def test_a_host_that_has_all_has_no_problem() -> None:
    assert [*problems_of(HostEntry(), FACTS, WHEEL)] == []


@pytest.mark.parametrize(
    ("entry", "facts", "part"),
    [
        ({}, {"python": ""}, "there is no python3: install Python 3.11 or newer"),
        ({}, {"python_version": "3.9"}, "is Python 3.9, and 3.11 or newer is needed"),
        ({}, {"python_version": ""}, "(it does not say)"),
        ({}, {"has_venv": False}, "sudo apt install python3-venv"),
        ({}, {"free_kb": 90 * 1024}, "0.1 GiB are free in /home/ada, and an installation takes 2"),
        ({}, {"free_kb": 4 * 1024 * 1024, "gpus": 1}, "takes 8: free space"),
        ({}, {"is_writable": False}, "cannot be written"),
        ({}, {"ahead_s": -42.0}, "its clock is 42 s behind this machine's"),
        ({"device": "cuda:0"}, {}, "nvidia-smi finds no GPU"),
    ],
)
def test_what_is_missing_is_said_with_its_remedy(entry: dict[str, str], facts: dict[str, object], part: str) -> None:
    [problem] = problems_of(HostEntry.model_validate(entry), msgspec.structs.replace(FACTS, **facts), WHEEL)
    assert part in problem


def test_uv_makes_up_for_a_missing_venv_and_an_installation_that_is_there_needs_neither_python_nor_room() -> None:
    assert [*problems_of(HostEntry(), msgspec.structs.replace(FACTS, has_venv=False, uv="/bin/uv"), WHEEL)] == []
    whole = msgspec.structs.replace(FACTS, python="", free_kb=0, installed=(WHEEL.name_for(HostEntry()),))
    assert [*problems_of(HostEntry(), whole, WHEEL)] == []


def test_another_installation_has_another_folder() -> None:
    entry = HostEntry()
    others = {
        WHEEL.name_for(entry),
        Installation(WHEEL.requirement, b"another", ()).name_for(entry),
        Installation(WHEEL.requirement, b"wheel", ("hf",)).name_for(entry),
        Installation(WHEEL.requirement, b"wheel", (), ("--pre",)).name_for(entry),
        WHEEL.name_for(HostEntry(python="python3.12")),
        WHEEL.name_for(HostEntry(system_site_packages=True)),
    }
    assert len(others) == 6


@pytest.mark.parametrize(
    ("installation", "uv", "wanted"),
    [
        (WHEEL, "", "pip install --quiet --disable-pip-version-check /home/ada/.local/share/shoal/wheels/"),
        (Installation("x.whl", b"", ("hf", "s3")), "", "/x.whl[hf,s3]'"),
        (Installation("git+https://h/s", None, ("hf",)), "", "'shoal[hf] @ git+https://h/s'"),
        (Installation("shoal==1.2", None, (), ("-i", "https://i x")), "", "check -i 'https://i x' shoal==1.2"),
        (Installation("shoal==1.2", None, ()), "/bin/uv", "/bin/uv pip install --quiet --python"),
    ],
)
def test_the_script_is_one_that_a_shell_takes(installation: Installation, uv: str, wanted: str) -> None:
    script = installation.script(HostEntry(), msgspec.structs.replace(FACTS, uv=uv))
    assert wanted in script
    assert script.splitlines()[-1].endswith("/whole")
    for text in (script, probe_script("python3"), probe_script("/odd path/python's")):
        subprocess.run(["sh", "-n"], input=text, text=True, check=True)


def test_the_client_s_host_has_a_client_and_each_host_its_servers_with_its_own_flags() -> None:
    file = HostsFile.model_validate(
        {
            "swarm": {"client": "desk", "flags": "--diloco.outer-steps 3"},
            "hosts": {
                "desk": {"servers": 0, "public_ip": "192.0.2.1"},
                "box": {"servers": 2, "device": "cuda", "max_memory": "8GiB", "flags": "--network.data-port 7"},
            },
        }
    )
    wanted = Wanted(file, "herd", "text: 1", WHEEL)
    client = wanted.client("desk", FACTS)
    assert client is not None
    assert (client.name, client.files, client.is_lasting) == ("herd-client", {"config.yaml": "text: 1"}, False)
    assert " ".join(client.argv[3:]) == (
        "start-trainer-client --config-path config.yaml --num-servers 2 --host-name desk --public-ip 192.0.2.1 "
        "--diloco.outer-steps 3"
    )
    assert wanted.servers("desk", FACTS) is None
    assert wanted.client("box", FACTS) is None
    servers = wanted.servers("box", FACTS)
    assert servers is not None
    assert servers.is_lasting
    assert " ".join(servers.argv[3:]) == (
        "join --experiment-prefix herd --num-servers 2 --host-name box --network.data-port 7 --device cuda "
        "--servers.max-memory-bytes 8GiB"
    )
