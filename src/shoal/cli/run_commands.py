"""The commands on runs, from any shell: how one is, that it stops, stands still or goes on, which ones live here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from shoal.cli.arguments import WATCH, AsJson, ConfigFlags, ConfigPath, KnownPeers, Switch, load_joining
from shoal.cli.doctor.after_join import explaining
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.config import Config
    from shoal.wire.messages.control import Order

RunName = Annotated[
    str,
    # A flag may come first: `name_and_flags` tells it from a name.
    Parameter(allow_leading_hyphen=True, help="The run, or how its name begins; without it, the only one there is."),
]
WrittenRun = Annotated[
    str, Parameter(help="Its folder or name, or how that begins; without it, the newest in --log-dir.")
]
Follow = Annotated[bool, Switch, Parameter(name=("--follow", "-f"), help="Go on for as long as the run lives.")]
AsJsonLines = Annotated[bool, Switch, Parameter(name="--json", help="Print a JSON object a line.")]
LogDir = Annotated[Path, Parameter(help="Where runs leave their folders.")]
_LOGS = Path("logs")
InitialPeers = Annotated[
    list[str] | None,
    Parameter(help="Addresses of the swarm as for start-servers: for a run whose client is on another host."),
]


def status(
    run: Annotated[
        str, Parameter(allow_leading_hyphen=True, help="A run of this host, or how its name begins; else the newest.")
    ] = "",
    *flags: ConfigFlags,
    initial_peers: KnownPeers = None,
    config_path: ConfigPath = None,
    as_json: Annotated[
        bool, Switch, Parameter(name="--json", help="Print one JSON object, see docs/status.schema.json.")
    ] = False,
    watch: Annotated[
        bool, Switch, Parameter(name=("--watch", "-w"), help="Until it ends, or Ctrl-C; with --json an object a line.")
    ] = False,
    interval: Annotated[float, Parameter(help="Seconds from one look to the next, with --watch.")] = 1.0,
) -> int:
    """Say how a run is, from any host with the swarm's key: state, round, loss, speed, stages with their servers.

    On the host of its client no key is needed, only the same user; a run of `shoal run-local` is seen there alone.
    """
    run, own_flags = name_and_flags(run, flags)
    config, origins = load_joining(config_path, own_flags, initial_peers)
    from shoal.cli.status import print_status, watch_status

    def serve() -> int:
        if watch:
            return watch_status(config, origins, run, interval_s=interval, as_json=as_json)
        return print_status(config, origins, run, as_json=as_json)

    return explaining(serve, lambda: (config, origins))


def doctor(
    check: Annotated[
        str,
        Parameter(
            allow_leading_hyphen=True,
            help="Tell of one alone: lan, ports, clock, ..., or of a group: key, host, swarm; else of all.",
        ),
    ] = "",
    *flags: ConfigFlags,
    initial_peers: KnownPeers = None,
    config_path: ConfigPath = None,
    as_json: Annotated[
        bool, Switch, Parameter(name="--json", help="Print one JSON object, see docs/doctor.schema.json.")
    ] = False,
) -> int:
    """Look for what keeps this host from a swarm: key, programs, machine, network, and the way to the client.

    Give it the flags of the command that you mean to start. Each check says what it has seen and what to do; none takes
    part in the swarm, and all together end within 8 s. Exit code 1: a check has failed.
    """
    check, own_flags = name_and_flags(check, flags)
    from shoal.cli.doctor.printing import print_diagnosis

    return print_diagnosis(lambda: load_joining(config_path, own_flags, initial_peers), check, as_json=as_json)


def events(
    run: WrittenRun = "",
    *,
    follow: Follow = False,
    everything: Annotated[
        bool, Switch, Parameter(name="--all", help="Also what says nothing to who only watches.")
    ] = False,
    as_json: AsJsonLines = False,
    initial_peers: InitialPeers = None,
    log_dir: LogDir = _LOGS,
) -> int:
    """Say what has happened to a run, as its client has noted it: when, what, and what to do.

    `shoal explain NAME` says more of an event. With --initial-peers the client of that swarm tells the last of it.
    """
    if initial_peers:
        if run or everything or log_dir != _LOGS:
            raise ConfigError(
                "with --initial-peers the client of that swarm tells its own run's events: leave the rest out"
            )
        from shoal.cli.told_events import print_told_events

        return explaining(
            lambda: print_told_events(*load_joining(None, (), initial_peers), follow=follow, as_json=as_json),
            lambda: load_joining(None, (), initial_peers),
        )
    from shoal.cli.event_lines import print_events

    return print_events(run, log_dir, follow=follow, everything=everything, as_json=as_json)


def logs(
    run: WrittenRun = "",
    *,
    role: Annotated[str, Parameter(help="Only of server, client, trainer_1, ...")] = "",
    level: Annotated[str, Parameter(help="The least severe: debug, info, warning or error.")] = "info",
    follow: Follow = False,
    as_json: AsJsonLines = False,
    log_dir: LogDir = _LOGS,
) -> int:
    """Say what the roles of a run have logged on this host, in order of time."""
    from shoal.cli.event_lines import print_logs

    return print_logs(run, log_dir, role=role, level=level, follow=follow, as_json=as_json)


def explain(name: Annotated[str, Parameter(help="Of an event; without it all are listed.")] = "") -> int:
    """Say what an event means: what has happened, why, and what to do."""
    from shoal.cli.event_lines import explain as serve

    return serve(name)


def info(*, as_json: AsJson = False) -> int:
    """Say what is installed and what this host is: for a report of a problem, without a secret."""
    from shoal.cli.info import print_information

    return print_information(as_json=as_json)


def trace(
    run: WrittenRun = "",
    *,
    output: Annotated[Path | None, Parameter(help="The file; the default is trace.json in the run's folder.")] = None,
    log_dir: LogDir = _LOGS,
) -> int:
    """Write the course of a run for Perfetto: rounds and their phases, what has happened, and numbers over time."""
    from shoal.cli.numbers import write_trace

    return write_trace(run, log_dir, output)


runs_app = App(name="runs", group=WATCH)


@runs_app.default
def written_runs(*, log_dir: LogDir = _LOGS, as_json: AsJson = False) -> int:
    """List the runs that have a folder on this host: how each has ended or that it lives, its rounds, its folder.

    `shoal ps` asks those that live how they are. One that was broken off, or interrupted, goes on with --resume.
    """
    from shoal.cli.listing_runs import list_written

    return list_written(log_dir, as_json=as_json)


@runs_app.command(name="export")
def export_numbers(
    run: WrittenRun = "",
    *,
    to: Annotated[Literal["csv", "tensorboard", "wandb"], Parameter(help="csv, tensorboard or wandb.")],
    output: Annotated[
        Path | None, Parameter(help="An empty folder, or one to make; the default is in the run's.")
    ] = None,
    log_dir: LogDir = _LOGS,
) -> int:
    """Write the numbers of a run, as its monitor has kept them, for other programs; docs/metrics.md says what they are.

    With `wandb` it is one offline run, also where the monitor was started again: `wandb sync` uploads it.
    """
    from shoal.cli.numbers import export_numbers as serve

    return serve(run, log_dir, to, output)


def report(run: WrittenRun = "", *, log_dir: LogDir = _LOGS) -> int:
    """Write what the dashboard has shown of a run into one file, report.html in its folder, for any browser.

    It is written at the end of each run as well.
    """
    from shoal.cli.numbers import write_report

    return write_report(run, log_dir)


def stop(run: RunName = "", *flags: ConfigFlags, initial_peers: InitialPeers = None) -> int:
    """End a run as Ctrl-C on its client's host does: its model is saved, its summary written, and all hosts leave.

    On that host no key is needed, only the same user; from any other host the swarm's key.
    """
    return _steer("stop", run, flags, initial_peers)


def pause(run: RunName = "", *flags: ConfigFlags, initial_peers: InitialPeers = None) -> int:
    """Let a run stand still: steps that have begun are finished, no other one begins, and nobody leaves.

    Who may do that is as with `shoal stop`; `shoal resume-run` lets the run go on.
    """
    return _steer("pause", run, flags, initial_peers)


def resume_run(run: RunName = "", *flags: ConfigFlags, initial_peers: InitialPeers = None) -> int:
    """Let a paused run go on where it stands. Who may do that is as with `shoal stop`."""
    return _steer("resume", run, flags, initial_peers)


def checkpoint(run: RunName = "", *flags: ConfigFlags, initial_peers: InitialPeers = None) -> int:
    """Have a checkpoint written of the record on which the round under way ends, beside those that are due.

    Who may do that is as with `shoal stop`; `shoal checkpoints` lists what is written.
    """
    return _steer("checkpoint", run, flags, initial_peers)


def ps(*flags: ConfigFlags, initial_peers: InitialPeers = None, as_json: AsJson = False) -> int:
    """List your runs that live on this host, and what dead ones have left there.

    With --initial-peers it is the run of that swarm, as `shoal status` says it.
    """
    if initial_peers or flags:
        return status(*flags, initial_peers=initial_peers, as_json=as_json)
    from shoal.cli.listing_living import list_runs

    return list_runs(as_json=as_json)


def clean(*, yes: Annotated[bool, Switch, Parameter(help="Remove it without a question.")] = False) -> int:
    """List what dead runs have left on this host, and remove it when you say so; what lives is never touched."""
    from shoal.cli.listing_living import clean as serve

    return serve(yes=yes)


def name_and_flags(run: str, flags: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Tell the name of a run from a flag that stands where a name might."""
    return ("", (run, *flags)) if run.startswith("-") else (run, flags)


def _steer(what: Order, run: str, flags: Sequence[str], initial_peers: Sequence[str] | None) -> int:
    """Tell a run what to do; the configuration is only read where its client is on another host."""
    run, flags = name_and_flags(run, flags)
    from shoal.cli.steering import steer

    def load() -> tuple[Config, Mapping[str, str]]:
        return load_joining(None, flags, initial_peers)

    return explaining(lambda: steer(what, run, load, elsewhere=bool(initial_peers or flags)), load)
