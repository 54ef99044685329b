"""Keys, lasting identities, and the addresses that users give in many forms."""

from __future__ import annotations

import platform
from contextlib import closing
from pathlib import Path

import pytest
from tests.unit.runtime.lockless import without_locks

from shoal.cli.joining import (
    LastingIdentities,
    addresses,
    continuation,
    invitation,
    load_joining_config,
    load_or_create_swarm_key,
    require_membership,
)
from shoal.config import load_config
from shoal.errors import ConfigError
from shoal.ids import PeerId

ROOT = Path(__file__).parents[3]
ONE, TWO = "/ip4/10.0.0.1/tcp/50000/p2p/A", "/ip4/10.0.0.2/tcp/50000/p2p/B"


def test_identities_last_and_two_launchers_share_none(tmp_path: Path) -> None:
    first = LastingIdentities("servers", tmp_path)
    second = LastingIdentities("servers", tmp_path)
    known = first.identity("server", 0).peer_id
    assert known not in (first.identity("server", 1).peer_id, second.identity("server", 0).peer_id)
    first.close()
    again = LastingIdentities("servers", tmp_path)
    assert again.identity("server", 0).peer_id == known
    again.close()
    second.close()


def test_hosts_with_one_home_or_copies_of_it_share_no_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[PeerId] = []
    for host in ("box1", "box2", "box1"):
        monkeypatch.setattr(platform, "node", lambda host=host: host)
        with closing(LastingIdentities("servers", tmp_path)) as identities:
            found.append(identities.identity("server", 0).peer_id)
    assert found[0] == found[2] != found[1]


def test_identities_last_on_a_disk_that_knows_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_locks(tmp_path, monkeypatch)
    test_identities_last_and_two_launchers_share_none(tmp_path)


def test_identities_that_cannot_be_kept_are_an_error_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot keep identities"):
        LastingIdentities("client", tmp_path / "file")


@pytest.mark.parametrize(
    ("flags", "variable", "expected"),
    [
        ((), ONE, (ONE,)),
        ((), f"{ONE}, {TWO}", (ONE, TWO)),
        ((), f'["{ONE}", "{TWO}"]', (ONE, TWO)),
        ((f"--network-initial-peers={ONE} {TWO}",), "", (ONE, TWO)),
        (("--initial-peers", ONE, "--initial-peers", TWO), "", (ONE, TWO)),
        (("--initial-peers", ONE), TWO, (ONE,)),
        ((), "", ()),
    ],
)
def test_peers_come_from_flags_or_else_from_the_environment(
    flags: tuple[str, ...], variable: str, expected: tuple[str, ...]
) -> None:
    config, _ = load_joining_config(None, flags, {"INITIAL_PEERS": variable}, ())
    assert config.network.initial_peers == expected


def test_a_batch_of_one_sample_is_judged_by_the_run_alone() -> None:
    config, origins = load_joining_config(None, ("--diloco-batch-size-per-step", "1", "--device", "cpu"), {}, ())
    assert config.diloco.batch_size_per_step == 1
    assert set(origins) == {"diloco.batch_size_per_step", "device"}


def test_a_host_that_names_no_run_joins_the_one_that_a_client_starts_without_a_file() -> None:
    usual = load_config(ROOT / "configs/sandbox.yaml", (), {})
    assert load_joining_config(None, (), {}, ())[0].experiment_prefix == usual.experiment_prefix
    assert load_joining_config(None, ("--experiment-prefix=mine",), {}, ())[0].experiment_prefix == "mine"


def test_peers_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "peers.txt"
    path.write_text(f"{ONE}\n{TWO}\n")
    for flags, variable in ((("--initial-peers", f"@{path}"), ""), ((), f"@{path}")):
        config, _ = load_joining_config(None, flags, {"INITIAL_PEERS": variable}, ())
        assert config.network.initial_peers == (ONE, TWO)


def test_a_host_of_servers_says_how_its_run_is_continued() -> None:
    config = load_config(None, {"experiment_prefix": "fish", "network": {"swarm_key_file": "/k"}}, {})
    local = "/ip4/127.0.0.1/tcp/1/p2p/A"
    told = "\n".join(continuation(config, [local, ONE, TWO]))
    assert f"start_trainer_client.py --experiment-prefix fish --swarm-key-file /k --initial-peers={ONE},{TWO}" in told
    assert f"--initial-peers={local}" in "\n".join(continuation(config, [local]))


def test_the_swarm_key_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "there" / "swarm.key"
    key, is_new = load_or_create_swarm_key(path)
    assert is_new
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_or_create_swarm_key(path) == (key, False)


def test_without_key_or_peers_the_lines_to_paste_are_said(tmp_path: Path) -> None:
    path = tmp_path / "swarm.key"
    with_peers = load_config(None, {"network": {"initial_peers": [ONE], "swarm_key_file": str(path)}}, {})
    with pytest.raises(ConfigError, match=r"no swarm key(.|\n)*export INITIAL_PEERS=(.|\n)*scp"):
        require_membership(with_peers)
    key, _ = load_or_create_swarm_key(path)
    assert require_membership(with_peers) == key
    with pytest.raises(ConfigError, match="no initial peers"):
        require_membership(load_config(None, {"network": {"swarm_key_file": str(path)}}, {}))


def test_the_invitation_repeats_what_other_hosts_cannot_guess() -> None:
    usual = load_config(ROOT / "configs/sandbox.yaml", {"model_pipeline": {"stages": 1}}, {})
    plain = "\n".join(invitation(usual, [ONE, TWO], Path("/logs/r"), new_key=False))
    assert "any address in /logs/r/initial_peers.txt does as well" in plain
    assert f"export INITIAL_PEERS={ONE},{TWO}\n" in plain
    assert "\npython start_servers.py --num-servers 1\n" in plain
    assert "made a new swarm key" not in plain
    own = {"experiment_prefix": "mine", "network": {"swarm_key_file": "/a b/key"}, "model_pipeline": {"stages": 2}}
    special = "\n".join(invitation(load_config(None, own, {}), [ONE], Path("/logs/r"), new_key=True))
    expected = "python start_servers.py --num-servers 2 --experiment-prefix mine --swarm-key-file '/a b/key'"
    assert f"\n{expected}\n" in special
    assert "made a new swarm key" in special
    assert "waiting for servers of all 2 stages" in special
    later = "\n".join(invitation(load_config(None, own, {}), [TWO], Path("/logs/r"), new_key=True, is_first=False))
    assert f"export INITIAL_PEERS={TWO}\n{expected}\n" in later
    assert "made a new swarm key" not in later
    assert "waiting" not in later


def test_the_invitation_to_a_run_of_ones_own_family_names_it_as_other_hosts_have_to() -> None:
    config = load_config(None, {"model": {"family": "mine.net:Net"}}, {})
    lines = list(invitation(config, [ONE], Path("/logs/r"), new_key=False))
    [command] = [line for line in lines if line.startswith("python")]
    assert command.endswith(" --model.family mine.net:Net")
    assert (
        "the code of mine.net:Net has to be there too, and `shoal join` takes --model.family mine.net:Net"
        in "\n".join(lines)
    )


def test_of_many_addresses_the_first_ones_are_named_and_the_others_counted() -> None:
    assert addresses(["a", "b", "c"]) == "a, b, c"
    assert addresses(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more addresses"
