"""Prints docs/reference/files.md: `python tools/files.py > docs/reference/files.md`.

Names come from the code that writes the files; a test compares them with what a run has left.
"""

from __future__ import annotations

from fnmatch import fnmatch

from shoal.cli.run_folder import CONFIG_FILE, LOCAL_KEY, LOCAL_MARK
from shoal.client.diary import FILE_NAME as CLIENT_STATE
from shoal.control.peers_file import PEERS_FILE as INITIAL_PEERS
from shoal.events.base import EVENTS_FILE
from shoal.monitor.http.access import KEY_FILE, TOKEN_FILE, URL_FILE
from shoal.report.curves import FILE_NAME as CURVES
from shoal.report.page import FILE_NAME as REPORT
from shoal.telemetry.rows import METRICS_FILE, PEERS_FILE

HEAD = """# Files of a run

What a run leaves in `logs/RUN/` on its client's host, made by `tools/files.py`. `logs/PREFIX` is a link to the newest
run of that name. A host of servers has the logs of its own roles.

```bash
ls logs/sandbox/
```

| file | what it holds |
|---|---|"""
TAIL = """
Files that grow are bounded: logs and `events.jsonl` at 8 MiB, numbers at 64 MiB, and two full ones of each are kept.
`shoal clean` lists what dead runs have left, and removes it with `--yes`.

Beside the runs: `logs/checkpoints`, or the place that `checkpoint_dir` names, has their checkpoints. What belongs to
the user and not to a run is in `~/.config/shoal` (key, identities, swarms that were joined) and `~/.cache/shoal`
(tokens, measurements).
"""
FILES = {
    "summary.json": "Losses, samples per second, duplicates, missing samples, hashes, processes, memory, counters of "
    "refusals, and each loss of a process: who, when, how long, at what cost. `exit` is done, interrupted or failed; "
    "then `failure` has the kind of error, the sentence, and the commands that come next.",
    CURVES: "How the run has learned, as far as it has got: training and held-out loss over the samples, with rounds "
    "and incidents.",
    REPORT: "What the dashboard has shown, in one page that opens from the disk.",
    EVENTS_FILE: "What has happened, as the client sees it: time, event, its values and a sentence, a JSON object a "
    "line.",
    METRICS_FILE: "The numbers of the run, a row a second ([Numbers](../metrics.md)).",
    PEERS_FILE: "The numbers of each process, a row every ten seconds.",
    "model/": "The trained model: the parameters after the last round, by name, and the record that has signed them. "
    "`tokenizer/` in it where the run has one.",
    CONFIG_FILE: "The configuration as it was resolved.",
    "rounds/": "One signed record for each outer round.",
    "steps/": "The log of every committed step.",
    "replicas/": "What each replica did, for `shoal replay`.",
    "*.log": "JSON lines of each process, as `server_1.log`; `launcher.log` is of what started them.",
    "*.out": "What a process has said outside its log; it is removed at the end if that is nothing.",
    "*.[12]": "A full file of those that grow, beside the one that is written.",
    CLIENT_STATE: "What the client needs if it is started again.",
    INITIAL_PEERS: "Addresses at which the swarm can be joined: its first peer's, then those of others.",
    URL_FILE: "The dashboard's address, for the next browser; for its owner alone.",
    KEY_FILE: "The dashboard's key, of which its cookies are made; for its owner alone.",
    TOKEN_FILE: "What Prometheus sends to read the numbers; for its owner alone.",
    LOCAL_MARK: "An empty file, which says that no other host can join this run.",
    LOCAL_KEY: "The key of such a run, for its owner alone.",
    "wandb/*": "The run for Weights & Biases, where it is kept offline.",
    "exported-*/": "What `shoal runs export` has written.",
    "trace.json": "What `shoal trace` has written, for Perfetto.",
}


def page() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *(f"| `{name}` | {what} |" for name, what in FILES.items())]) + "\n" + TAIL


def is_described(name: str) -> bool:
    """Return whether the page says what a file or folder (with a slash at its end) is."""
    return any(fnmatch(name, pattern) for pattern in FILES)


if __name__ == "__main__":
    print(page(), end="")
