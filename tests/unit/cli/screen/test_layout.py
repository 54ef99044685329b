"""A run on a screen: the same picture for the same numbers, whatever the size, and never larger than the screen."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.text import Text

from shoal.cli.screen.layout import render
from shoal.control.swarm_status import ClientStatus, EventStatus, MirrorStatus, ServerStatus, StageStatus, SwarmStatus

GOLDEN = Path(__file__).parents[1] / "golden"
SIZES = [(80, 24), (200, 50), (40, 15)]


def server(index: int, host: str, **fields: object) -> ServerStatus:
    values = {"state": "serving", "held_round": 6, "age_s": 1.0, "samples_per_s": 30.0 + index, **fields}
    return msgspec.convert(
        {"peer": f"p{index}{host}", "name": f"server {index}@{host}", "host": "h", **values}, ServerStatus
    )


def event(number: int) -> EventStatus:
    is_lost = number % 4 == 0
    says = f"server {number}@box2 is silent for 3 s: the 2 steps that it had begun are tried again over others"
    return EventStatus(
        number=number,
        unix_s=1_795_643_281.0 + 20 * number,
        level="WARNING" if is_lost else "INFO",
        event="server.lost" if is_lost else "round.recorded",
        says=says if is_lost else f"round {number} is over after 19.5 s: loss 2.500",
        routine=not is_lost,
    )


TROUBLED = (
    server(0, "gamma", age_s=14.0, samples_per_s=None),
    server(1, "x", state="joining", age_s=None, samples_per_s=None),
    server(2, "y", state="undialled", problem="refused"),
)
CLIENT = ClientStatus(peer="c", name="client@desk", addresses=("10.0.0.1:50001",), answers=True)
TRAINING = SwarmStatus(
    experiment_prefix="sandbox",
    run="sandbox-20261125-214801-a1b2",
    state="training round 7 of 9",
    round=7,
    rounds=9,
    steps=1234,
    samples=5000,
    loss=2.5,
    eval_loss=2.25,
    samples_per_s=60.0,
    last_step_s=0.4,
    paused=False,
    client=CLIENT,
    trainers=(0, 1),
    stages=tuple(
        StageStatus(
            stage=stage,
            replicas=TROUBLED
            if stage == 1
            else tuple(server(index, host) for host in ("alpha", "beta") for index in range(7)),
        )
        for stage in range(3)
    ),
    waiting_servers=(server(9, "z", state="waiting for a stage"),),
    mirrors=(MirrorStatus(peer="m", name="mirror@desk", host="h", held_round=6),),
    left_s=240.0,
    losses=tuple(5 / (1 + step / 10) for step in range(50)),
    eval_losses=(5.0, 4.0, 3.0, 2.5, 2.25),
    events=tuple(map(event, range(12))),
)
STOPPED = msgspec.structs.replace(
    TRAINING,
    state="stopped in round 7: no server for stages 0, 2",
    samples_per_s=0.0,
    last_step_s=31.0,
    left_s=None,
    stages=(
        StageStatus(stage=0, replicas=()),
        StageStatus(stage=1, replicas=TROUBLED[:1]),
        StageStatus(stage=2, replicas=()),
    ),
)
LOST = msgspec.structs.replace(
    TRAINING,
    state="the client does not answer; 4 servers hold round 6",
    client=msgspec.structs.replace(CLIENT, answers=False, problem="10.0.0.1:50001: refused"),
    age_s=12.0,
)


def plain(lines: list[Text]) -> str:
    return "".join(f"{line.plain}\n" for line in lines)


def is_dim(line: Text) -> bool:
    return any("dim" in str(span.style) and span.start == 0 and span.end >= len(line) for span in line.spans)


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize(("name", "status"), [("training", TRAINING), ("stopped", STOPPED), ("lost", LOST)])
def test_a_screen_shows_what_is_in_its_golden_file(name: str, status: SwarmStatus, width: int, height: int) -> None:
    path = GOLDEN / f"{name}_{width}x{height}.txt"
    lines = render(status, width, height)
    assert len(lines) <= height
    assert max(line.cell_len for line in lines) <= width
    assert plain(lines) == path.read_text(), f"look at it, and if it is right write it into {path}:\n{plain(lines)}"


def test_numbers_that_are_old_are_dim_and_carry_their_age_and_fresh_ones_are_not() -> None:
    old = {line.plain.split()[0]: line for line in render(LOST, 80, 24)[1:] if line.plain.startswith(("loss", "step"))}
    assert render(LOST, 80, 24)[0].plain.endswith(" 12 s old")
    assert all(map(is_dim, old.values()))
    fresh = [line for line in render(TRAINING, 80, 24) if line.plain.startswith(("round", "loss", "step"))]
    assert len(fresh) == 3
    assert not any(map(is_dim, fresh))
    assert "old" not in render(TRAINING, 80, 24)[0].plain
    almost = msgspec.structs.replace(TRAINING, age_s=2.9, last_step_s=0.0)
    assert "old" not in plain(render(almost, 80, 24))


def test_numbers_of_a_step_are_dim_when_no_step_comes_though_the_client_answers() -> None:
    lines = {line.plain.split(" ")[0]: line for line in render(STOPPED, 80, 24) if line.plain}
    assert "step 1,234 (31 s ago)" in lines["step"].plain
    assert (is_dim(lines["loss"]), is_dim(lines["round"])) == (True, False)


@pytest.mark.parametrize(("width", "height"), [*SIZES, (60, 18), (30, 12)])
def test_every_peer_is_on_the_screen_or_counted(width: int, height: int) -> None:
    text = plain(render(TRAINING, width, height))
    assert "undialled" in text or "3 of them" in text, "who is in trouble comes first"
    shown = sum(text.count(f"@{host}") for host in ("alpha", "beta"))
    more = sum(int(words.split()[0]) for words in text.split("and ")[1:] if " more" in words[:8])
    whole = sum(int(line.split()[2]) for line in text.splitlines() if line.split()[3:4] == ["peers"])
    assert shown + more + whole == 28


def test_who_is_in_trouble_is_shown_before_who_is_well() -> None:
    crowd = (*(server(index, "box") for index in range(30)), server(30, "bad", state="undialled", problem="refused"))
    text = plain(render(msgspec.structs.replace(TRAINING, stages=(StageStatus(stage=0, replicas=crowd),)), 40, 15))
    assert "server 30@bad  undialled" in text


def test_what_somebody_should_see_is_not_driven_out_by_what_is_routine() -> None:
    events = (event(0), *(event(number) for number in range(1, 40) if number % 4))
    text = plain(render(msgspec.structs.replace(TRAINING, events=events), 80, 24))
    assert "server 0@box2 is silent" in text
    assert "round 39 is over" in text
    assert "round 1 is over" not in text


def test_a_terminal_without_unicode_gets_none() -> None:
    named = msgspec.structs.replace(LOST, run="größe-1", state="läuft")
    assert plain(render(named, 40, 15, is_ascii=True)).isascii()


def test_control_characters_of_others_do_not_reach_the_terminal() -> None:
    evil = "a\x1b[2Jb\r\nc\x9b"
    status = msgspec.structs.replace(
        TRAINING,
        run=evil,
        state=evil,
        client=msgspec.structs.replace(CLIENT, name=evil, problem=evil),
        stages=(StageStatus(stage=0, replicas=(server(0, evil),)),),
        events=(msgspec.structs.replace(event(0), says=evil),),
    )
    assert not set(plain(render(status, 80, 24))) & {"\x1b", "\r", "\x9b"}


TEXT = st.sampled_from(
    ("", "training", "server 1@box", "日本語のサーバー", "e\u0301\u200d👩‍🚀", "\x1b[1m\n\t\x9b", "x" * 300)
) | st.text(max_size=20)
FLOAT = st.sampled_from((0.0, 0.5, 3.0, 1e9, 1e300, -1e300, float("inf"), float("nan"))) | st.floats()
COUNT = st.sampled_from((0, 1, 9, 10**9, (1 << 63) - 1))


@st.composite
def statuses(draw: st.DrawFn) -> SwarmStatus:
    text, number, count, is_known = draw(TEXT), draw(FLOAT), draw(COUNT), draw(st.booleans())
    age_s = draw(st.sampled_from((None, 0.0, 3.0, 1e9)))
    named = ServerStatus(peer="p", name=draw(TEXT), host="h", state=text, held_round=0, problem=text, age_s=age_s)
    serving = msgspec.structs.replace(named, state="serving", problem="", samples_per_s=number)
    stages = tuple(
        StageStatus(stage=stage, replicas=(named, *(serving,) * draw(st.integers(0, 40)))[draw(st.integers(0, 1)) :])
        for stage in range(draw(st.integers(0, 40)))
    )
    return SwarmStatus(
        experiment_prefix=text,
        run=draw(TEXT),
        state=draw(TEXT),
        round=count if is_known else None,
        rounds=draw(COUNT),
        steps=count,
        loss=number,
        eval_loss=draw(FLOAT) if is_known else None,
        samples_per_s=number,
        last_step_s=age_s,
        client=ClientStatus(peer="c", name=text, addresses=(), answers=is_known, problem=text) if is_known else None,
        trainers=(0, 1),
        stages=stages,
        waiting_servers=(named,) * draw(st.integers(0, 2)),
        mirrors=(MirrorStatus(peer="m", name=text, host="h", held_round=count),) * draw(st.integers(0, 2)),
        age_s=draw(st.sampled_from((0.0, 3.0, 1e9))),
        left_s=draw(st.sampled_from((None, 0.0, 1e12))),
        losses=(number,) * draw(st.integers(0, 64)),
        eval_losses=(0.0, number),
        events=(EventStatus(number=1, unix_s=number, level=text, event="x", says=text),) * draw(st.integers(0, 9)),
    )


@settings(max_examples=40, deadline=None)
@given(statuses(), st.integers(0, 130), st.integers(0, 60), st.booleans())
def test_no_screen_is_wider_or_higher_than_asked_for(
    status: SwarmStatus, width: int, height: int, is_ascii: bool
) -> None:
    lines = render(status, width, height, is_ascii=is_ascii)
    assert len(lines) <= height
    for line in lines:
        assert "\n" not in line.plain
        assert line.cell_len <= width
