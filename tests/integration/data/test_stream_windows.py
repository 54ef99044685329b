"""Streams through the data server: windows that a process of its own makes while they are trained on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic import ValidationError
from tests.unit.data.corpora import write_json_lines, write_parquet
from tests.unit.data.host import Host, host, settle

from shoal.config import Config
from shoal.config.dump import config_to_json
from shoal.data.catalog import open_source, opening_of
from shoal.data.feed import LeasedBatch
from shoal.data.preparation import Content
from shoal.data.shuffle import PassOrder, permutation
from shoal.data.source import DataSet
from shoal.errors import ConfigError, RemoteError, SampleError, ShoalError
from shoal.events.base import Event
from shoal.events.data import DataProcessStopped, SamplesSkipped, StreamCompared, StreamRepeats, StreamWindow
from shoal.replay.samples import Samples
from shoal.runtime import child
from shoal.swarm.window_marks import num_windows, up_to
from shoal.transport.base import Received
from shoal.wire.messages.base import SampleRange, StepRange
from shoal.wire.messages.feed import PlanRound, RecordSamples, WindowsRead

SETS = "tests.unit.data.stream_sets"
WINDOW = 16


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config(name: str, data: dict[str, Any] | None = None) -> Config:
    values = {"dataset_name": f"{SETS}:{name}", "task_type": "cv", "num_channels": 1, "img_size": 4, "streaming": True}
    values |= {"shuffle_window": WINDOW, "holdout_fraction": 0.125, **(data or {})}
    is_text = values["task_type"] == "llm"
    model = {"vocab_size": 256} if is_text else {"family": "mlp", "num_classes": 4}
    return Config.model_validate({"data": values, "model": model, "diloco": {"batch_size_per_step": 4}})


@contextmanager
def opened(config: Config, said: list[Event] | None = None) -> Iterator[DataSet]:
    dataset = open_source(config, (said if said is not None else []).append)
    assert dataset.windows is not None
    try:
        yield dataset
    finally:
        dataset.windows.close()


def folder_of(dataset: DataSet) -> Path:
    assert dataset.windows is not None
    return dataset.windows.folder


def window_files(dataset: DataSet) -> set[str]:
    return {path.name for path in folder_of(dataset).glob("0*.samples")}


async def trained(at: Host, rounds: range, num_slots: int = 2, steps: int = 2) -> list[int]:
    """The pictures that are trained on, each round of as many batches of 4 as fill a window."""
    feeds = [at.trainer(slot) for slot in range(num_slots)]
    seen: list[int] = []
    for round_number in rounds:
        at.tell(PlanRound(round_number, num_slots, StepRange(0, steps)))
        recorded: list[SampleRange] = []
        for step in range(steps):
            for feed in feeds:
                with anyio.fail_after(60):
                    batch = await feed.lease(round_number, step)
                assert batch is not None
                seen += pictures(batch)
                recorded += batch.samples
                feed.give_back(batch)
        at.tell(RecordSamples(round_number, tuple(recorded)))
    return seen


def pictures(batch: LeasedBatch) -> list[int]:
    numbers = batch.fields.inputs[:, 0, 0, 0].astype(int).tolist()
    assert [number % 4 for number in numbers] == batch.fields.labels.tolist()
    return numbers


def expected(seed: int, windows: int) -> list[int]:
    numbers = [2 + at % 98 for at in range(WINDOW * windows)]
    return [numbers[WINDOW * at + index] for at in range(windows) for index in permutation(seed, at, WINDOW).tolist()]


@pytest.mark.parametrize("name", ["Pictures", "generated", "of_torch", "of_datasets"])
async def test_a_stream_of_each_kind_is_trained_on_in_an_order_of_the_seed_alone(name: str) -> None:
    said: list[Event] = []
    with opened(config(name), said) as dataset:
        async with host(batch=4, seed=5, dataset=dataset) as at:
            assert (await at.trainer(0).hello()).num_train == WINDOW
            assert await trained(at, range(1, 9)) == expected(5, 8)
            assert pictures(await at.trainer(-1).read_holdout(0, 2)) == [0, 1]
            # One window ahead, and none that is recorded, once nobody reads of it any more.
            await settle(lambda: window_files(dataset) <= {"00000008.samples", "00000009.samples"})
    assert [event.window for event in said if isinstance(event, StreamWindow)][:8] == list(range(8))
    assert [event.rows for event in said if isinstance(event, StreamRepeats)] == [100]


async def test_batches_are_the_same_with_no_one_and_three_workers_and_any_number_of_trainers() -> None:
    stream = config("Pictures", {"arguments": {"bad": [7, 40]}, "max_bad_fraction": 0.1})
    runs: list[list[int]] = []
    for num_workers, num_slots in ((0, 1), (0, 2), (1, 4), (3, 2)):
        with opened(stream) as dataset:
            opening = opening_of(stream, dataset.windows)
            async with host(batch=4, seed=5, dataset=dataset, num_workers=num_workers, opening=opening) as at:
                runs.append(await trained(at, range(1, 5), num_slots, 4 // num_slots))
    assert runs[0] == runs[1] == runs[2] == runs[3]
    assert sorted(runs[0]) == [number for number in range(2, 68) if number not in (7, 40)]


async def test_a_window_stays_as_long_as_somebody_reads_of_it_what_is_not_needed_any_more() -> None:
    with opened(config("Pictures")) as dataset:
        async with host(batch=4, seed=5, dataset=dataset) as at:
            await at.trainer(0).hello()
            outdated = Content((SampleRange(0, 2, 4),))
            at.service.preparer._preparing.add(outdated)
            await trained(at, range(1, 3))
            await settle(lambda: len(at.service.table.recorded) == 2)
            assert {"00000000.samples", "00000001.samples"} <= window_files(dataset)
            at.service.preparer._preparing.discard(outdated)
            await trained(at, range(3, 4))
            recorded = {f"{number:08}.samples" for number in range(3)}
            await settle(lambda: not recorded & window_files(dataset))


async def test_over_killed_data_servers_and_a_resumed_run_each_sample_is_trained_once() -> None:
    stream = config("Pictures")
    seen: list[int] = []
    recorded: tuple[SampleRange, ...] = ()
    for life in range(3):
        said: list[Event] = []
        with opened(stream, said) as dataset:
            async with host(batch=4, seed=5, dataset=dataset) as at:
                # As the client of a resumed run does.
                at.tell(RecordSamples(2 * life, recorded))
                seen += await trained(at, range(2 * life + 1, 2 * life + 3))
                await settle(lambda total=2 * life + 2: len(at.service.table.recorded) == total)
                recorded = at.service.table.recorded
        # What was recorded before is not made again.
        made = [event.window for event in said if isinstance(event, StreamWindow)]
        assert min(made) == 2 * life
    assert seen == expected(5, 6)


async def marks_told(at: Host, windows: int) -> bytes:
    """What the client is told, when it is of so many windows."""
    async for event in at.client.events():
        message = event.message if isinstance(event, Received) else None
        if isinstance(message, WindowsRead) and num_windows(message.marks) >= windows:
            return message.marks
    raise AssertionError("no more is told")


def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: Path) -> Config:
    """The stream of a host that has never read it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    return config("", {"dataset_name": str(rows), "task_type": "llm", "seq_len": 16})


TEXTS = [f"row {number:011d}" for number in range(400)]


def texts(batch: LeasedBatch) -> list[str]:
    return [bytes(row).decode().strip() for row in batch.fields.inputs]


async def trained_texts(at: Host, rounds: range) -> tuple[list[str], list[SampleRange]]:
    """What one trainer trains in rounds of a window each, all of which are recorded."""
    feed, seen, recorded = at.trainer(0), list[str](), list[SampleRange]()
    for round_number in rounds:
        at.tell(PlanRound(round_number, 1, StepRange(0, 4)))
        for step in range(4):
            with anyio.fail_after(60):
                batch = await feed.lease(round_number, step)
            assert batch is not None
            seen += texts(batch)
            recorded += batch.samples
            feed.give_back(batch)
        at.tell(RecordSamples(round_number, tuple(recorded)))
    return seen, recorded


async def begun_here(tmp_path: Path) -> tuple[list[str], list[SampleRange], bytes]:
    """Train on three windows; return what was, and the marks that the client was told before."""
    write_json_lines(tmp_path / "here/a.jsonl", TEXTS[:300])
    write_json_lines(tmp_path / "here/b.jsonl", TEXTS[300:])
    here = config("", {"dataset_name": str(tmp_path / "here"), "task_type": "llm", "seq_len": 16})
    with opened(here) as dataset:
        async with host(batch=4, seed=5, dataset=dataset) as at:
            seen, recorded = await trained_texts(at, range(1, 4))
            return seen, recorded, up_to(await marks_told(at, 3), 3)


async def test_a_host_that_takes_over_reads_the_stream_anew_and_goes_on_at_the_next_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, recorded, marks = await begun_here(tmp_path)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    said: list[Event] = []
    with opened(elsewhere(monkeypatch, tmp_path, tmp_path / "there"), said) as dataset:
        async with host(batch=4, seed=5, dataset=dataset) as at:
            at.tell(RecordSamples(3, tuple(recorded), "", marks))
            seen += (await trained_texts(at, range(4, 6)))[0]
            assert up_to(await marks_told(at, 5), 3) == marks
    assert sorted(seen) == TEXTS[2 : 2 + 5 * WINDOW], "each row once"
    assert [event for event in said if isinstance(event, StreamCompared)] == [
        StreamCompared(str(tmp_path / "there"), 3)
    ]


def _edit(folder: Path) -> None:
    write_json_lines(folder / "a.jsonl", [*TEXTS[:20], "row 000000wrong", *TEXTS[21:300]])


def _rename(folder: Path) -> None:
    (folder / "b.jsonl").rename(folder / "0.jsonl")


@pytest.mark.parametrize(
    ("change", "what"),
    [(_edit, "window 1, of rows from 0 on"), (_rename, "the one before them, of what is held out")],
    ids=["a row was edited", "another order of files"],
)
async def test_a_host_that_takes_over_with_other_data_is_refused_before_it_has_handed_out_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], what: str
) -> None:
    _, recorded, marks = await begun_here(tmp_path)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    change(tmp_path / "there")
    leased: list[object] = []

    async def take_over(dataset: DataSet) -> None:
        async with host(batch=4, seed=5, dataset=dataset) as at:
            at.tell(RecordSamples(3, tuple(recorded), "", marks))
            at.tell(PlanRound(4, 1, StepRange(0, 4)))
            leased.append(await at.trainer(0).lease(4, 0))

    there = elsewhere(monkeypatch, tmp_path, tmp_path / "there")
    with opened(there) as dataset, pytest.raises(ExceptionGroup) as caught:
        await take_over(dataset)
    says = rf"data\.dataset_name = {tmp_path / 'there'} gives other samples than the run has trained on: .* is {what}"
    assert caught.group_contains(ConfigError, match=says)
    assert leased == []


async def test_a_replay_elsewhere_compares_what_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = (await begun_here(tmp_path))[2]
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    _edit(tmp_path / "there")
    samples = Samples(elsewhere(monkeypatch, tmp_path, tmp_path / "there"), marks=marks)
    try:
        with pytest.raises(ConfigError, match=r"than the run has trained on: .* is window 1, of rows from 0 on"):
            samples.microbatches((SampleRange(1, 0, 4),), [4])
    finally:
        samples.close()


async def test_who_waits_for_rows_that_have_not_come_gets_its_batch_when_they_come_and_others_go_on(
    tmp_path: Path,
) -> None:
    (tmp_path / "0").touch()
    with opened(config("Slow", {"arguments": {"folder": str(tmp_path), "step": 30}})) as dataset:
        async with host(batch=4, seed=5, dataset=dataset) as at:
            at.tell(PlanRound(1, 1, StepRange(0, 12)))
            feed = at.trainer(0)
            got: list[int] = []
            has_first = anyio.Event()

            async def train() -> None:
                for step in range(12):
                    batch = await feed.lease(1, step)
                    assert batch is not None
                    got.extend(pictures(batch))
                    feed.give_back(batch)
                    if len(got) == WINDOW:
                        has_first.set()

            async with anyio.create_task_group() as group:
                group.start_soon(train)
                await has_first.wait()
                # Of the second window rows 18 to 33 are needed, and 30 has not come.
                assert pictures(await at.trainer(-1).read_holdout(0, 2)) == [0, 1]
                assert len(got) == WINDOW
                for number in (30, 60, 90):
                    (tmp_path / str(number)).touch()
            assert got == expected(5, 3)


async def test_a_process_that_dies_is_replaced_and_one_that_dies_again_and_again_ends_the_run(tmp_path: Path) -> None:
    once = tmp_path / "once"
    once.touch()
    with opened(config("Deadly", {"arguments": {"once": str(once)}})) as dataset:
        async with host(batch=4, seed=5, dataset=dataset) as at:
            assert await trained(at, range(1, 6)) == expected(5, 5)
    assert not once.exists()
    once.touch()
    with opened(config("Deadly", {"arguments": {"once": str(once), "stays": True}})) as dataset:
        assert dataset.windows is not None
        dataset.windows.wait({2})
        with pytest.raises(RemoteError, match=r"reads data\.dataset_name = .*:Deadly has died 3 times in a row"):
            dataset.windows.wait({4})


async def test_a_process_that_stands_still_is_killed_and_replaced_however_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "LOOK_S", 0.01)
    monkeypatch.setattr(child, "STILL_S", 0.02)
    left, said = tmp_path / "left", list[Event]()
    left.write_text("4")
    with opened(config("Stopping", {"arguments": {"left": str(left)}}), said) as dataset:
        async with host(batch=4, seed=5, dataset=dataset) as at:
            assert await trained(at, range(1, 6)) == expected(5, 5)
    assert left.read_text() == "0"
    assert len([event for event in said if isinstance(event, DataProcessStopped)]) == 4


async def test_a_stream_that_cannot_be_read_any_further_ends_the_data_server_with_what_was_raised() -> None:
    with opened(config("Ending")) as dataset:

        async def train() -> None:
            async with host(batch=4, dataset=dataset) as at:
                await trained(at, range(1, 5))

        with pytest.raises(ExceptionGroup) as caught:
            await train()
    says = r"row 40 of .*:Ending cannot be read, and so none behind it: ConnectionError: the line is gone"
    assert caught.group_contains(SampleError, match=says)


def test_rows_that_were_changed_are_refused_and_what_was_there_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"row {number:011d}" for number in range(300)]
    data = {"dataset_name": str(tmp_path / "rows"), "task_type": "llm", "seq_len": 16}
    write_json_lines(tmp_path / "rows" / "a.jsonl", texts)
    write_parquet(tmp_path / "rows" / "b.parquet", [f"row {number:011d}" for number in range(300, 400)])
    with opened(config("", data)) as dataset:
        assert dataset.windows is not None
        dataset.windows.wait({0, 3, 19})
        order = PassOrder.of(dataset, 1)
        rows = [
            bytes(row).decode().strip()
            for number in (0, 3, 19)
            for row in dataset.train.read(order.indices((SampleRange(number, 0, WINDOW),))).inputs
        ]
        assert sorted(rows) == [f"row {2 + WINDOW * at + n:011d}" for at in (0, 3, 19) for n in range(WINDOW)]
        kept = folder_of(dataset)
    write_json_lines(tmp_path / "rows" / "a.jsonl", [*texts[:10], "row 000000wrong", *texts[11:]])
    with opened(config("", data)) as dataset:
        assert folder_of(dataset) == kept
        assert dataset.windows is not None
        with pytest.raises(ConfigError, match=r"gives other samples than before: window 0 .* --resume"):
            dataset.windows.wait({0})
    write_json_lines(tmp_path / "rows" / "a.jsonl", texts)
    with opened(config("", data)) as dataset:
        assert dataset.windows is not None
        dataset.windows.wait({0})


@pytest.mark.parametrize("as_rows", [True, False])
def test_texts_of_a_stream_of_ones_own_are_made_into_tokens(as_rows: bool) -> None:
    data = {"task_type": "llm", "seq_len": 16, "arguments": {"as_rows": as_rows}}
    with opened(config("Texts", data)) as dataset:
        assert dataset.num_classes == 256
        assert [bytes(row).decode() for row in dataset.holdout.read([0, 1]).inputs] == [  # type: ignore[arg-type]
            "row 00000000000\n",
            "row 00000000001\n",
        ]


def test_two_who_read_the_same_stream_at_a_time_have_a_folder_each_and_the_next_one_the_first() -> None:
    with opened(config("Pictures")) as one, opened(config("Pictures")) as other:
        assert folder_of(one).name == "0"
        assert folder_of(other).name == "1"
        for dataset in (one, other):
            assert dataset.windows is not None
            dataset.windows.wait({1})
        manifests = [(folder_of(each) / "manifest.jsonl").read_bytes() for each in (one, other)]
        assert manifests[0] == manifests[1]
    with opened(config("Pictures")) as again:
        assert folder_of(again) == folder_of(one)


def test_a_replay_has_the_samples_again_that_were_given_up() -> None:
    stream = config("Pictures")
    with opened(stream) as dataset:
        assert dataset.windows is not None
        dataset.windows.wait({0, 1, 2})
        dataset.windows.forget_below(3)
        assert window_files(dataset) == set()
    samples = Samples(stream)
    try:
        for number in (0, 1, 2, 0):
            [found] = samples.microbatches((SampleRange(number, 4, 8),), [4])
            assert len(found.inputs.data) == 4 * 16 * 4
    finally:
        samples.close()


def test_the_end_of_who_reads_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "0").touch()
    with opened(config("Slow", {"arguments": {"folder": str(tmp_path), "step": 50}})) as dataset:
        assert dataset.windows is not None
        dataset.windows.wait({0})
        dataset.windows.need({50})
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_rows_that_cannot_be_read_are_said() -> None:
    said: list[Event] = []
    with opened(config("Pictures", {"arguments": {"bad": [5]}, "max_bad_fraction": 0.1}), said) as dataset:
        assert dataset.windows is not None
        dataset.windows.wait({0})
    [skipped] = [event for event in said if isinstance(event, SamplesSkipped)]
    assert (skipped.skipped, skipped.reason) == (1, "OSError: broken file")
    assert skipped.which.endswith(":Pictures:5")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("Nothing", {}, "is a stream without a sample"),
        ("NoStream", {}, "gives a .*NoStream, which is no iterable"),
        (
            "picture",
            {"arguments": {"number": 3}},
            "can be read by index, and so is no stream: leave out data.streaming",
        ),
        ("Shuffled", {}, "Shuffled:0 gives another sample when it is read again.* shoal shuffles it"),
        ("Texts", {}, "gives text, and data.task_type is cv"),
        ("Pictures", {"img_size": 5}, "mlp takes inputs"),
        ("Pictures", {"dataset_name": "digits", "img_size": 8}, "digits is here as a whole: leave out data.streaming"),
        ("Once", {}, "Once:0 gives another sample when it is read again"),
    ],
)
def test_what_is_no_stream_is_refused_with_what_to_do(name: str, data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_source(config(name, data))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("OtherShapes", r"OtherShapes:40: its inputs are float32\[1, 5, 4\], and those of other samples"),
        ("OtherClasses", "OtherClasses:40 has the label 4, and labels are 0 to 3: mend the data"),
    ],
)
def test_a_sample_that_is_not_like_the_others_ends_the_run_by_name(name: str, message: str) -> None:
    with opened(config(name)) as dataset:
        assert dataset.windows is not None
        dataset.windows.wait({1})
        with pytest.raises(ShoalError, match=message):
            dataset.windows.wait({2})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"task_type": "llm", "max_documents": 3, "dataset_name": "./x"}, "data.streaming and data.max_documents"),
        ({"task_type": "llm", "token_dtype": "uint16", "dataset_name": "./x"}, "data.streaming and data.token_dtype"),
        ({"holdout_fold": 1}, "data.streaming and data.holdout_fold"),
        ({"shuffle_window": 3}, "data.shuffle_window = 3: a step has 4 samples, all of one window"),
    ],
)
def test_keys_that_mean_nothing_to_a_stream_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config("Pictures", data)


READER = """
import sys
from shoal.config.load import config_from_json
from shoal.data.catalog import open_source
dataset = open_source(config_from_json(sys.stdin.buffer.read()), lambda event: None)
dataset.windows.wait({0})
print("there", flush=True)
dataset.windows.wait({50})
"""


def test_a_data_server_that_is_killed_takes_who_reads_its_stream_with_it(tmp_path: Path) -> None:
    (tmp_path / "0").touch()
    stream = config("Slow", {"arguments": {"folder": str(tmp_path), "step": 50}})
    with subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as killed:
        assert killed.stdin is not None
        assert killed.stdout is not None
        killed.stdin.write(config_to_json(stream))
        killed.stdin.close()
        assert killed.stdout.readline() == b"there\n"
        killed.kill()
    # Its folder is free at once, and so is the right to write there, as soon as who had it is gone.
    (tmp_path / "50").touch()
    with opened(stream) as dataset:
        assert folder_of(dataset).name == "0"
        assert dataset.windows is not None
        dataset.windows.wait({0, 1, 4})
