"""A run that two sides of a split have trained is replayed: the chain that stands, and what each side did on it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.replay.replay import replay
from shoal.replay.verdict import Verdict
from shoal.wire.messages.step import Open
from shoal_lab.emulation.device_pace import DevicePace

from .conftest import MakeCluster, make_text, reproduces, whole_folder
from .test_split import CONFIG, HERE, THERE, Parted

DATASET = make_text(1000)


async def train_apart(
    make_cluster: MakeCluster, *, here_is_ahead: bool, step: int, restarts: int | None = None
) -> Path:
    """Part the swarm at a step, let both sides train and meet again; return the folder of the client that led first.

    The side that is not ahead is the one that is left; the client that leads at the end is `THERE`. The server
    `restarts` is killed and started again when its side has a record of its own.
    """
    slow = THERE if here_is_ahead else HERE
    times_s = {server: 0.03 if server in slow else 0.01 for server in (*HERE, *THERE)}
    paces = {server: DevicePace(forward_s=s, input_gradient_s=s) for server, s in times_s.items()}
    async with make_cluster(CONFIG, dataset=DATASET, replicas=[0, 0, 1, 1], paces=paces) as cluster:
        parted = Parted(cluster, paces, kills_client=False)
        cluster.when(Open, action=parted.part, number=step)

        async def restart(server: int) -> None:
            while not parted.second or cluster.servers[server].replica.member.base_round == 0:
                await cluster.device.run(int)
            cluster.kill_server(server)
            await cluster.restart_server(server)

        cluster._tasks.start_soon(parted.meet, here_is_ahead)
        if restarts is not None:
            cluster._tasks.start_soon(restart, restarts)
        with pytest.raises(ExceptionGroup):
            await cluster.host.run_client()
        while not parted.ended:
            await cluster.device.run(int)
        return cluster.host.log_dir


def checked(folder: Path) -> Verdict:
    return replay(folder, config=CONFIG, dataset=DATASET)


Change = Callable[[dict[str, Any], bool], dict[str, Any] | None]
"""Given a line, and whether it comes after that with which its replica has left its chain: the line instead."""


def changed(folder: Path, place: Path, peer: str, change: Change) -> Verdict:
    """Replay a copy of the folder in which one line of a replica's log is another one."""
    copy = shutil.copytree(folder, place)
    path = copy / f"replicas/{peer}.1.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    back = next(index for index, line in enumerate(lines) if line.get("anew"))
    for index, line in enumerate(lines):
        if (instead := change(line, index > back)) is not None:
            lines[index] = instead
            break
    else:
        raise AssertionError("no line was changed")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return checked(copy)


def other_norm(line: dict[str, Any]) -> dict[str, Any] | None:
    return {**line, "squared_norm": line["squared_norm"] * 2} if line["event"] == "applied" else None


@pytest.mark.slow
async def test_what_the_side_that_was_left_trains_on_the_chain_that_stands_is_compared_and_nothing_else_of_it(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    folder = whole_folder(await train_apart(make_cluster, here_is_ahead=True, step=5))
    assert list(folder.glob("left/1/rounds/*.json"))
    verdict = reproduces(folder, CONFIG, DATASET)
    peer = f"server{THERE[0]}"

    def after(line: dict[str, Any], is_back: bool) -> dict[str, Any] | None:
        return other_norm(line) if is_back else None

    found = changed(folder, tmp_path / "after", peer, after)
    [difference] = found.differences
    assert (difference.replica, difference.stage) == (peer, 0)
    assert "squared gradient norm" in difference.what
    assert found.rounds_agreed == difference.round - 1

    chain = {json.loads(path.read_text()).get("hash") for path in folder.glob("rounds/*.json")}
    is_apart = False

    def apart(line: dict[str, Any], is_back: bool) -> dict[str, Any] | None:
        nonlocal is_apart
        is_apart = is_apart or (line["event"] == "loaded" and line["round"] > 0 and line["record"] not in chain)
        return other_norm(line) if is_apart and not is_back else None

    found = changed(folder, tmp_path / "apart", peer, apart)
    assert found.agrees, found.differences
    assert found.steps == verdict.steps

    def keeps_optimizer(line: dict[str, Any], _is_back: bool) -> dict[str, Any] | None:
        return {**line, "anew": False} if line.get("anew") else None

    found = changed(folder, tmp_path / "kept", peer, keeps_optimizer)
    assert "of another chain with an optimizer that has trained there" in found.differences[0].what
    check_put_away(shutil.copytree(folder, tmp_path / "put away"))


def check_put_away(folder: Path) -> None:
    """Records of the chain that stands are found in `left`; where no other ones are there, it says so."""
    common = folder / "rounds/round_0001.json"
    assert (folder / "left/1" / common.relative_to(folder)).read_bytes() == common.read_bytes()
    for path in (common, folder / "steps/round_0001.jsonl"):
        path.unlink()
    reproduces(folder, CONFIG, DATASET)
    for path in folder.glob("rounds/round_*.json"):
        if path.stem != "round_0000":
            path.unlink()
    with pytest.raises(ConfigError, match="only records of a chain that was left"):
        checked(folder)


async def test_a_split_in_the_first_round_is_replayed_and_the_folder_of_the_side_that_was_left_says_what_it_is(
    make_cluster: MakeCluster,
) -> None:
    left = await train_apart(make_cluster, here_is_ahead=False, step=1, restarts=HERE[1])
    folder = whole_folder(left)
    assert folder != left
    assert (folder / f"replicas/server{HERE[1]}.2.jsonl").exists()
    assert (left / "rounds/round_0001.json").read_bytes() != (folder / "rounds/round_0001.json").read_bytes()
    reproduces(folder, CONFIG, DATASET)
    verdict = checked(left)
    assert verdict.rounds_agreed == verdict.rounds
    [difference] = verdict.differences
    assert "of the side that was left" in difference.what
