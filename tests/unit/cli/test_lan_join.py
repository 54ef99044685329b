"""A host that joins without an address looks for the swarm on its network, if it may and can."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.joining import found_on_lan, load_joining_config
from shoal.control import lan
from shoal.control.lan import FoundSwarm
from shoal.identity import create_swarm_key

PEERS = ("/ip4/203.0.113.7/tcp/50000/p2p/12D3KooWFrCUuswLZqfWycRGiHa1uWQcgJac2rbagi2VKoe6XbJ4",)


class Network:
    """The local network, with a swarm on it or none."""

    def __init__(self, swarm: FoundSwarm | OSError | None) -> None:
        self.swarm = swarm
        self.asked: list[str | None] = []

    async def find(self, swarm_key: bytes, experiment_prefix: str | None, within_s: float) -> FoundSwarm | None:
        self.asked.append(experiment_prefix)
        if isinstance(self.swarm, OSError):
            raise self.swarm
        return self.swarm


def _join(network: Network, folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[str, tuple[str, ...]]:
    monkeypatch.setattr(lan, "find_on_lan", network.find)
    path = folder / "swarm.key"
    config, origins = load_joining_config(None, [f"--swarm-key-file={path}", *flags], {}, ())
    found = found_on_lan(config, origins)
    return found.experiment_prefix, found.network.initial_peers


@pytest.mark.parametrize(
    ("flags", "asked", "found"),
    [
        ((), [None], ("herd", PEERS)),
        (("--experiment-prefix=herd",), ["herd"], ("herd", PEERS)),
        (("--network.lan=false",), [], ("sandbox", ())),
        ((f"--initial-peers={PEERS[0]}",), [], ("sandbox", PEERS)),
    ],
)
def test_it_looks_if_it_knows_no_address(
    flags: tuple[str, ...],
    asked: list[str | None],
    found: tuple[str, tuple[str, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create_swarm_key(tmp_path / "swarm.key")
    network = Network(FoundSwarm("herd", PEERS, 1.0))
    assert (_join(network, tmp_path, monkeypatch, *flags), network.asked) == (found, asked)


@pytest.mark.parametrize("swarm", [None, OSError("no network")])
def test_where_there_is_none_nothing_is_changed(
    swarm: OSError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_swarm_key(tmp_path / "swarm.key")
    network = Network(swarm)
    assert (_join(network, tmp_path, monkeypatch), network.asked) == (("sandbox", ()), [None])


def test_who_has_no_key_does_not_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(FoundSwarm("herd", PEERS, 1.0))
    assert (_join(network, tmp_path, monkeypatch), network.asked) == (("sandbox", ()), [])
