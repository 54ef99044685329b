#!/usr/bin/env python3
"""Measure text as tokens: a token file far larger than what its data server may take of memory.

    python benchmarks/tokens.py                                 2 GB of tokens
    python benchmarks/tokens.py --gigabytes 0.2 --json tokens.json

making     MB of text for each second on a core, by a tokenizer of 1,024, of sources in Python, each of them once;
           beside it the package tokenizers alone, called in the plainest way; sides take turns, the medians count
start      seconds in which a process opens tokens that are there, imports not counted
memory     PSS of a process with a data server, after each window was read with the same probability for a while
hand-over  windows a second that a consumer of that data server gets, beside torch's DataLoader with one worker over
           a mapping of the same file; sides take turns, the medians count

Exit code: 0 if the server took at most 200 MB, a start at most 1 s, and the hand-over is 10 times DataLoader's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from rich.console import Console

from shoal.config.dump import config_to_json
from shoal.config.load import config_from_json
from shoal.config.schema import Config
from shoal.data.catalog import open_source
from shoal.data.feed import Feed
from shoal.data.server import DataService
from shoal.data.text_corpus import made_tokens, tokenizer_of, with_tokenizer
from shoal.events.base import Event
from shoal.ids import PeerId, RunId, StepKey
from shoal.model.hf.tokenizer import read_tokenizer
from shoal.swarm.lease import MAX_PLANNED_BATCHES
from shoal.transport.dispatch import dispatch
from shoal.transport.unix import open_unix_endpoint
from shoal.wire.messages.base import Hop, StepRange
from shoal.wire.messages.feed import PlanRound

SEQ_LEN = 1024
BATCH = 64
VOCABULARY = 50_000
IN_FLIGHT = 4
TEXT_MB = 24
MOST_PSS_MB, MOST_START_S, LEAST_RATIO = 200.0, 1.0, 10.0
_PART_TOKENS = 1 << 24


def sources() -> list[str]:
    """Return texts that differ: the sources of this Python and of its packages."""
    places = sysconfig.get_paths()
    found: list[str] = []
    size = 0
    for path in sorted(path for name in ("stdlib", "purelib") for path in Path(places[name]).rglob("*.py")):
        with contextlib.suppress(UnicodeDecodeError, OSError):
            found.append(path.read_text("utf-8"))
            size += path.stat().st_size
            if size >= TEXT_MB * 1_000_000:
                return found
    return found


def text_config(folder: Path, texts: list[str]) -> Config:
    """A run on text with a tokenizer of its own."""
    corpus = folder / "text"
    corpus.mkdir()
    with (corpus / "a.jsonl").open("w") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
    data = {"dataset_name": str(corpus), "tokenizer": "train:1024", "cache_dir": str(folder / "kept")}
    return Config.model_validate({"data": data, "model": {"vocab_size": 1024}})


def making(folder: Path, repeat: int) -> dict[str, float]:
    """Make tokens in this process."""
    said: list[Event] = []
    texts = sources()
    config = with_tokenizer(text_config(folder, texts), said.append)
    tokenizer = read_tokenizer(tokenizer_of(config, said.append).files["tokenizer.json"], "it")
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(repeat):
        shutil.rmtree(folder / "kept", ignore_errors=True)
        begun_s = time.process_time()
        made_tokens(config, None, said.append)
        ours.append(time.process_time() - begun_s)
        begun_s = time.process_time()
        for start in range(0, len(texts), 256):
            for encoding in tokenizer.encode_batch_fast(texts[start : start + 256], add_special_tokens=False):
                np.array(encoding.ids, np.uint16)
        theirs.append(time.process_time() - begun_s)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    mine, reference = statistics.median(ours), statistics.median(theirs)
    return {
        "making_mb_per_s": megabytes / mine,
        "tokenizers_mb_per_s": megabytes / reference,
        "making_ratio": reference / mine,
    }


def token_config(folder: Path, gigabytes: float) -> Config:
    """A run on random tokens, which are written here."""
    corpus = folder / "tokens"
    corpus.mkdir()
    random = np.random.default_rng(0)
    left = int(gigabytes * 1e9) // 2
    with (corpus / "a.bin").open("wb") as file:
        while left:
            part = min(left, _PART_TOKENS)
            random.integers(0, VOCABULARY, part, dtype=np.uint16).tofile(file)
            left -= part
    data = {
        "dataset_name": str(corpus),
        "token_dtype": "uint16",
        "seq_len": SEQ_LEN,
        "cache_dir": str(folder / "kept"),
        "holdout_fraction": 0.001,
    }
    return Config.model_validate({"data": data, "model": {"vocab_size": VOCABULARY}})


def peer(name: str, folder: Path) -> Any:
    """Open an endpoint of the benchmark."""
    socket = folder / f"{name}.sock"
    return open_unix_endpoint(peer_id=PeerId(name), run_id=RunId("benchmark"), role=name, path=socket)


async def serve(folder: Path, config: Config) -> None:
    """Be a data server; says in which time it has opened the data set."""
    begun_s = time.perf_counter()
    dataset = open_source(config)
    opened_s = time.perf_counter() - begun_s
    async with peer("data_server", folder) as endpoint:
        service = DataService(
            endpoint=endpoint,
            dataset=dataset,
            samples_per_step=BATCH,
            seed=0,
            deterministic=True,
            num_workers=0,
            opening=None,
            client=PeerId("trainer"),
        )
        async with anyio.create_task_group() as group:
            group.start_soon(service.run)
            group.start_soon(dispatch, endpoint, (service,))
            os.write(1, json.dumps({"opened_s": opened_s}).encode() + b"\n")


class Consumer:
    """Leases windows from the data server."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._step = 0

    async def windows_per_s(self, seconds: float) -> float:
        """Use batches for a while."""
        begun_s, first = time.perf_counter(), self._step

        async def use() -> None:
            while time.perf_counter() - begun_s < seconds:
                step, self._step = self._step, self._step + 1
                batch = await self._feed.lease(1, step)
                assert batch is not None
                batch.fields.inputs.sum()
                self._feed.acknowledge(StepKey(0, 1, step, 0), batch, committed=True)

        async with anyio.create_task_group() as group:
            for _ in range(IN_FLIGHT):
                group.start_soon(use)
        return (self._step - first) * BATCH / (time.perf_counter() - begun_s)


class Windows:
    """Windows of a mapped file, as training scripts have them."""

    def __init__(self, path: Path) -> None:
        self._tokens = np.memmap(path, np.uint16, mode="r")

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // SEQ_LEN

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        import torch  # the data server that is measured is this file as well

        window = torch.from_numpy(np.array(self._tokens[index * SEQ_LEN : (index + 1) * SEQ_LEN + 1]))
        return window[:-1], window[1:]


def loader(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yield batches of pass after pass."""
    from torch.utils.data import DataLoader

    batches: Any = DataLoader(Windows(path), BATCH, shuffle=True, num_workers=1, persistent_workers=True)
    while True:
        yield from batches


def loaded_per_s(batches: Iterator[tuple[Any, Any]], seconds: float) -> float:
    """Use batches for a while."""
    begun_s, windows = time.perf_counter(), 0
    while time.perf_counter() - begun_s < seconds:
        inputs, _ = next(batches)
        inputs.numpy().sum()
        windows += len(inputs)
    return windows / (time.perf_counter() - begun_s)


def pss_mb(pid: int) -> float:
    """Read what a process has of the memory."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6


async def compare(folder: Path, pid: int, path: Path, repeat: int, seconds: float) -> dict[str, float]:
    """Measure hand-over and memory."""
    batches = loader(path)
    next(batches)
    async with peer("trainer", folder) as endpoint:
        server = Hop(PeerId("data_server"), (f"unix:{folder / 'data_server.sock'}",))
        feed = Feed(endpoint=endpoint, data_server=server, trainer=0, generation=1)
        consumer = Consumer(feed)
        async with anyio.create_task_group() as group:
            group.start_soon(dispatch, endpoint, (feed,))
            endpoint.post(server.peer, PlanRound(1, 1, StepRange(0, MAX_PLANNED_BATCHES)))
            await consumer.windows_per_s(seconds)
            ours: list[float] = []
            theirs: list[float] = []
            for _ in range(repeat):
                ours.append(await consumer.windows_per_s(seconds))
                # The connection is kept alive meanwhile.
                theirs.append(await anyio.to_thread.run_sync(loaded_per_s, batches, seconds))
            group.cancel_scope.cancel()
    mine, reference = statistics.median(ours), statistics.median(theirs)
    return {"windows_per_s": mine, "dataloader_per_s": reference, "ratio": mine / reference, "pss_mb": pss_mb(pid)}


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Measure everything."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    result = making(folder, arguments.repeat)
    config = token_config(folder, arguments.gigabytes)
    open_source(config)
    command = [sys.executable, __file__, "--serve", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(config_to_json(config))
            process.stdin.close()
            result |= json.loads(process.stdout.readline())
            path = max((folder / "kept").glob("*.tokens"), key=lambda each: each.stat().st_size)
            with path.open("rb") as file:
                # Both sides read what the system has in memory, as in a second pass.
                while file.read(1 << 20):
                    pass
            # On the event loop that a trainer has.
            with_uvloop = {"use_uvloop": True}
            call = (compare, folder, process.pid, path, arguments.repeat, arguments.seconds)
            result |= anyio.run(*call, backend_options=with_uvloop)
        finally:
            process.kill()
    return result


def main() -> int:
    """Measure, print, and compare with what is promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        anyio.run(serve, arguments.serve, config_from_json(sys.stdin.read()), backend_options={"use_uvloop": True})
        return 0
    with tempfile.TemporaryDirectory(prefix="shoal-tokens-") as directory:
        result = measure(arguments, Path(directory))
    console = Console()
    for name, value in result.items():
        console.print(f"{name:<20}{value:12.2f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    is_small = result["pss_mb"] <= MOST_PSS_MB and result["opened_s"] <= MOST_START_S
    return 0 if is_small and result["ratio"] >= LEAST_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
