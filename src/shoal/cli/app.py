"""The commands of `shoal`. Each turns its arguments into a `Config` and hands it to a service, imported when called.

Those that train, measure or compute a run again are here, the others in `run_commands`, `model_commands` and `key`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from shoal import __version__
from shoal.cli.arguments import (
    CHECK,
    MODEL,
    SANDBOX,
    SET_UP,
    STEER,
    TRAIN,
    WATCH,
    AsJson,
    Baseline,
    ConfigFlags,
    ConfigPath,
    KnownPeers,
    PrintConfig,
    Resume,
    Switch,
    Tiny,
    found,
    load,
    load_client,
    load_joining,
    load_resuming,
    load_whole,
)
from shoal.cli.doctor.after_join import explaining
from shoal.cli.exits import guarded
from shoal.cli.help_page import PlainPage
from shoal.cli.key import key_app
from shoal.cli.model_commands import (
    DatasetName,
    FamilyName,
    chat,
    checkpoints,
    classify,
    evaluate,
    export_model,
    generate,
    images,
    import_model,
)
from shoal.cli.remote.commands import hosts_app, machine_script, up
from shoal.cli.run_commands import (
    checkpoint,
    clean,
    doctor,
    events,
    explain,
    info,
    logs,
    pause,
    ps,
    report,
    resume_run,
    runs_app,
    status,
    stop,
    trace,
)
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.cli.resuming import Resumption
    from shoal.config.schema import Config


def _shown_default(value: object) -> object:
    """What stands in the help of a flag; that a switch is off, and that there is no name, goes without saying."""
    return None if value is False or value == "" else value


app = App(
    name="shoal",
    help=(
        "Train one model on a swarm of machines that nobody manages.\n\n`shoal run-local` trains a small one on this "
        "machine, now; `shoal COMMAND --help` says more of a command."
    ),
    default_parameter=Parameter(show_default=_shown_default),
    version=__version__,
    help_format="plaintext",
    help_formatter=PlainPage(),
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    help_on_error=False,
    suppress_keyboard_interrupt=False,
)
config_app = App(name="config", help="Show what a run would be told.", group=SET_UP)
model_app = App(name="model", help="Look at the model that a run would train.", group=MODEL)
for command in (config_app, model_app, key_app, runs_app, hosts_app):
    app.command(command)
for place, command in enumerate((status, doctor, events, logs, explain, report, trace, ps, info)):
    app.command(command, group=WATCH, sort_key=place)
for place, command in enumerate((pause, resume_run, checkpoint, stop, clean)):
    app.command(command, group=STEER, sort_key=place)
for place, command in enumerate((evaluate, generate, chat, classify, images, checkpoints)):
    app.command(command, group=MODEL, sort_key=place)
for flag in ("--help", "--version"):
    app[flag].group = (SET_UP,)
app.command(up, group=TRAIN, sort_key=7)
app.command(machine_script, group=SET_UP)
app.command(export_model, name="export", group=MODEL)
app.command(import_model, name="import", group=MODEL)


def run(argv: Sequence[str]) -> int:
    """Run the command in `argv`; see `shoal.cli.main`."""
    tokens = spelt_out(list(argv))

    def call() -> int | None:
        result = app(tokens)
        return result if isinstance(result, int) else None

    return guarded(call)


def spelt_out(tokens: list[str]) -> list[str]:
    """`--resume` without a value stands for `--resume=latest`; that of `shoal up` has none."""
    if tokens[:1] == ["up"]:
        return tokens
    following = [*tokens[1:], "--"]
    return [
        "--resume=latest" if token == "--resume" and after.startswith("-") else token
        for token, after in zip(tokens, following, strict=True)
    ]


@app.command(group=TRAIN, sort_key=0)
def run_local(
    *flags: ConfigFlags,
    config_path: ConfigPath = None,
    num_servers: Annotated[str | None, Parameter(help="Servers over all stages (servers.num_servers).")] = None,
    baseline: Baseline = False,
    tiny: Tiny = False,
    resume: Resume = None,
    print_config: PrintConfig = False,
) -> int:
    """Train on a swarm of processes on this machine.

    Without --config-path it trains configs/sandbox.yaml; with --tiny any file in small. With --resume it goes on with
    a run of this machine that was lost, as it was configured; what flags say of this host counts.
    """
    if num_servers is not None:
        flags = (*flags, "--num-servers", num_servers)
    if resume is not None:
        _refuse_baseline(baseline)
        return _resume(resume, config_path, flags, is_local=True, is_tiny=tiny, print_config=print_config)
    if print_config:
        return _print_config(load_whole(config_path, flags, tiny=tiny))
    from shoal.cli.early import early_start

    with early_start() as early:
        config = load_whole(config_path, flags, tiny=tiny)
        from shoal.cli.local import run_local as serve

        return serve(config, early, baseline=baseline)


def _refuse_baseline(baseline: bool) -> None:
    if baseline:
        raise ConfigError("--baseline: no run that goes on has a plain loop, which is in no checkpoint; leave it out")


def _resume(
    wanted: str,
    config_path: Path | None,
    flags: Sequence[str],
    *,
    is_local: bool,
    is_tiny: bool,
    print_config: bool,
    invites: bool = False,
) -> int:
    """Go on with a run from a checkpoint: with servers of this host alone, or with those of others."""
    if is_tiny:
        raise ConfigError("--tiny and --resume: a run that goes on keeps its sizes; leave one out")

    def look() -> Resumption:
        # Not before: what reads checkpoints imports torch, which the fork server does at the same time.
        from shoal.cli.resuming import find_resumption

        load_host = partial(load_resuming, config_path, flags)
        resumption = find_resumption(wanted, load_host, partial(print, flush=True), is_local=is_local)
        config = resumption.config
        if problem := config.whole_swarm_problem() if is_local else _peers_problem(config):
            raise ConfigError(problem)
        return resumption

    if print_config:
        return _print_config(look().config)
    from shoal.cli.early import early_start
    from shoal.cli.runs_here import end_leftovers

    end_leftovers()
    with early_start() as early:
        resumption = look()
        if is_local:
            from shoal.cli.local import run_local as serve_local

            return serve_local(resumption.config, early, resumption=resumption)
        from shoal.cli.client_host import start_trainer_client as serve_client

        return serve_client(resumption.config, None, early, resumption, invites=invites)


def _peers_problem(config: Config) -> str | None:
    if not config.network.initial_peers:
        return None
    return "--resume and --initial-peers: what peers hold is newer than a checkpoint; leave one out"


@app.command(group=TRAIN, sort_key=1)
def start_trainer_client(
    *flags: ConfigFlags,
    config_path: ConfigPath = None,
    baseline: Baseline = False,
    tiny: Tiny = False,
    resume: Resume = None,
    invite: Annotated[bool, Switch, Parameter(help="Print what `shoal join` on other hosts asks for.")] = False,
    print_config: PrintConfig = False,
) -> int:
    """Train with servers of other hosts: runs monitor, client, data server and trainers, and prints how to join.

    Without --config-path it trains configs/sandbox.yaml; with --tiny any file in small. --num-servers says how many
    servers to wait for. With --initial-peers it continues the run that they know, whose client's host is gone; with
    --resume one of which nobody is left but a checkpoint.
    """
    if resume is not None:
        _refuse_baseline(baseline)
        return _resume(
            resume, config_path, flags, is_local=False, is_tiny=tiny, print_config=print_config, invites=invite
        )
    if print_config:
        return _print_config(load_client(config_path, flags, tiny=tiny)[0])
    from shoal.cli.early import early_start

    def call() -> int:
        with early_start() as early:
            config, origins = load_client(config_path, flags, tiny=tiny)
            if origins is not None:
                _refuse_baseline(baseline)
            from shoal.cli.client_host import start_trainer_client as serve

            return serve(config, origins, early, baseline=baseline, invites=invite)

    return explaining(call, lambda: load_joining(config_path, flags, None))


@app.command(group=TRAIN, sort_key=2)
def start_servers(
    *flags: ConfigFlags,
    config_path: ConfigPath = None,
    num_servers: Annotated[str | None, Parameter(help="Servers on this host (servers.num_servers).")] = None,
    initial_peers: Annotated[
        list[str] | None,
        Parameter(help="Addresses of the swarm: with commas or spaces, a JSON list, or @file; else INITIAL_PEERS."),
    ] = None,
    print_config: PrintConfig = False,
) -> int:
    """Serve stages of the run that the initial peers know; model, data and optimizers are taken from it."""
    if num_servers is not None:
        flags = (*flags, "--num-servers", num_servers)
    return _serve(flags, config_path, initial_peers, print_config=print_config, as_mirror=False)


@app.command(group=TRAIN, sort_key=3)
def invite(
    *flags: ConfigFlags,
    for_: Annotated[str, Parameter(name="--for", help="How long it may be taken, such as 30m or 24h; else 1h.")] = "",
    code: Annotated[bool, Switch, Parameter(help="Print a short code in its place, and wait for who says it.")] = False,
    initial_peers: KnownPeers = None,
) -> int:
    """Print one text by which another host joins this one's swarm: `shoal join` takes it.

    It holds the swarm's key: send it over a way that nobody else can read.
    """
    config, origins = load_joining(None, flags, initial_peers)
    from shoal.cli.inviting import print_invitation
    from shoal.clock import SystemClock

    return print_invitation(config, origins, for_, SystemClock(), by_code=code)


@app.command(group=TRAIN, sort_key=4)
def join(
    *flags: ConfigFlags,
    num_servers: Annotated[str | None, Parameter(help="Servers on this host (servers.num_servers).")] = None,
    invitation: Annotated[
        Path | None,
        Parameter(
            help="The file that holds it, - for standard input; without it, you are asked.", allow_leading_hyphen=True
        ),
    ] = None,
    code: Annotated[bool, Switch, Parameter(help="Ask for the code of `shoal invite --code`.")] = False,
    at: Annotated[str | None, Parameter(help="Where the code was made, HOST:PORT; else on this network.")] = None,
    anew: Annotated[bool, Switch, Parameter(help="Ask, although this host has joined a swarm before.")] = False,
    remember_only: Annotated[bool, Switch, Parameter(help="Keep key and addresses, and start nothing.")] = False,
) -> int:
    """Join a swarm by an invitation, and serve stages of its run; the next time nothing is asked.

    `shoal invite` prints it on a host of the swarm. The swarm's key is kept in --swarm-key-file. An invitation is no
    argument: every user of a host can read its command lines.
    """
    from shoal.cli.inviting import Asked, joining_flags, refuse_code_on_command_line, refuse_on_command_line
    from shoal.clock import SystemClock

    refuse_on_command_line(*flags, str(invitation), at or "", num_servers or "")
    if code:
        refuse_code_on_command_line(flags)
    config, origins = load_joining(None, flags, None)
    asked = Asked(invitation, by_code=code, at=at, again=anew, on_lan=config.network.lan)
    swarm, peers = joining_flags(config, origins, asked, SystemClock())
    if remember_only:
        return 0
    return start_servers(*swarm, *flags, num_servers=num_servers, initial_peers=peers)


@app.command(group=TRAIN, sort_key=5)
def mirror(
    *flags: ConfigFlags,
    config_path: ConfigPath = None,
    initial_peers: Annotated[
        list[str] | None,
        Parameter(help="Addresses of the swarm as for start-servers; else INITIAL_PEERS."),
    ] = None,
    print_config: PrintConfig = False,
) -> int:
    """Hold the newest state of every stage of the run that the initial peers know, for servers that come.

    It takes the memory of all outer states (parameters, momentum, buffers) and no part in training. A run can have any
    number of mirrors on other hosts than the client's, which runs one by itself.
    """
    return _serve(flags, config_path, initial_peers, print_config=print_config, as_mirror=True)


def _serve(
    flags: Sequence[str],
    config_path: Path | None,
    initial_peers: Sequence[str] | None,
    *,
    print_config: bool,
    as_mirror: bool,
) -> int:
    """Take part in the run that the initial peers know."""
    from shoal.cli.early import early_start
    from shoal.cli.joining import found_on_lan, require_membership

    config, origins = load_joining(config_path, flags, initial_peers)
    if print_config:
        return _print_config(config)
    config = found_on_lan(config, origins)
    require_membership(config)

    def call() -> int:
        with early_start() as early:
            from shoal.cli.server_host import start_mirror, start_servers

            serve = start_mirror if as_mirror else start_servers
            return serve(config, origins, early)

    return explaining(call, lambda: (config, origins))


@app.command(group=TRAIN, sort_key=6)
def trainer(
    *flags: ConfigFlags,
    config_path: ConfigPath = None,
    run_locally: Annotated[bool, Switch, Parameter(help="Needed: train in this one process, without a swarm.")] = False,
    trainer_id: Annotated[int, Parameter(help="-1 is the baseline.")] = -1,
) -> int:
    """Train the plain loop, the reference for what a swarm must reach."""
    if not run_locally:
        raise ConfigError(
            "the trainers of a swarm are started by their client; use `shoal run-local`, or --run-locally for the "
            "plain loop"
        )
    if trainer_id != -1:
        raise ConfigError(f"--trainer-id {trainer_id}: with --run-locally there is only the baseline, --trainer-id -1")
    config = load(config_path, flags)
    from shoal.cli.baseline import run_baseline_locally

    return run_baseline_locally(config)


@app.command(group=CHECK)
def benchmark(
    name: Annotated[str, Parameter(help="What to measure; without it the names are listed.")] = "",
    *,
    as_json: AsJson = False,
    repeat: Annotated[
        int | None, Parameter(help="Measured repetitions of each side; else 5, or 3 where one takes long.")
    ] = None,
    link: Annotated[str | None, Parameter(help="Emulate a link between the peers, e.g. 20mbit,150ms.")] = None,
    only: Annotated[str | None, Parameter(help="Measure only cases with this in their names.")] = None,
    ignore_busy: Annotated[
        bool, Switch, Parameter(help="Measure although other processes take the cores; the table says so.")
    ] = False,
) -> int:
    """Measure shoal on this machine beside what others use for the same job.

    Ours and the reference take turns; a ratio above 1 means that ours is better. Exit code 3: the machine is too busy.
    """
    if not name:
        from shoal_lab.bench.registry import BENCHMARKS

        _emit("".join(f"{name:<12}{entry.summary}\n" for name, entry in BENCHMARKS.items()))
        return 0
    from shoal_lab.bench.case import BenchmarkOptions
    from shoal_lab.bench.command import run_benchmark

    options = BenchmarkOptions(repeat=repeat, link=link, only=only, ignore_busy=ignore_busy)
    return run_benchmark(name, options, as_json=as_json)


@app.command(group=CHECK)
def replay(
    directory: Annotated[Path, Parameter(help="Of the run: logs/<run_id>.")],
    *,
    processes: Annotated[
        int | None, Parameter(help="At most so many compute, each some of the replicas; else one for each core.")
    ] = None,
    swarm_key_file: Annotated[
        Path | None,
        Parameter(help="Of the swarm that the run has to be of; else it may be of any."),
    ] = None,
    family: FamilyName = None,
    dataset_name: DatasetName = None,
    as_json: AsJson = False,
) -> int:
    """Compute a run again from the files that it has left, and compare the hashes of every round, bit for bit.

    Exit code 0: everything agrees; 1: it does not, and the first round, stage and replica that differ are named.
    """
    from shoal.cli.replay import replay_run

    return replay_run(
        directory,
        processes=processes,
        swarm_key_file=swarm_key_file,
        family=family,
        dataset_name=dataset_name,
        as_json=as_json,
    )


_CHAOS_FLAGS = "seed", "for", "every", "kinds", "emulated-device", "goodput", "config-path", "json"


@app.command(group=CHECK)
def chaos(
    *flags: ConfigFlags,
    seed: Annotated[int, Parameter(help="Of the plan: the same seed does the same faults at the same times.")] = 0,
    for_: Annotated[str, Parameter(name="--for", help="How long there are faults, such as 90s or 10m.")] = "2m",
    every: Annotated[str, Parameter(help="One fault for each such time.")] = "15s",
    kinds: Annotated[
        str, Parameter(help="Kinds of faults with commas; all: each that a run survives on one machine.")
    ] = "all",
    emulated_device: Annotated[
        str, Parameter(help="Least time of each stage call, such as 30ms: slow devices that need no processor.")
    ] = "0ms",
    goodput: Annotated[
        bool, Switch, Parameter(help="First train as long without faults, and say what shares are trained and kept.")
    ] = False,
    config_path: ConfigPath = None,
    report: Annotated[Path | None, Parameter(name="--json", help="Write plan, faults and findings there.")] = None,
) -> int:
    """Train on a swarm of this machine, kill and freeze its processes at random, and judge what is left.

    The last line is the verdict; exit code 0 only if every invariant holds. Without --config-path it trains
    configs/sandbox.yaml on two stages with two replicas and a spare.
    """
    from shoal.cli.arguments import parse_duration_s
    from shoal_lab.chaos.command import ChaosOptions, run_chaos
    from shoal_lab.chaos.session import TRAINING_FLAGS
    from shoal_lab.faults.deaths import KINDS

    config_path = found(config_path or SANDBOX)
    run_flags = (*TRAINING_FLAGS, *flags)
    config = load_whole(config_path, run_flags, own_flags=_CHAOS_FLAGS)
    options = ChaosOptions(
        seed=seed,
        for_s=parse_duration_s(for_, "--for"),
        every_s=parse_duration_s(every, "--every"),
        kinds=tuple(KINDS) if kinds == "all" else tuple(kinds.split(",")),
        emulated_call_s=parse_duration_s(emulated_device, "--emulated-device"),
        goodput=goodput,
        report=report,
    )
    return run_chaos(config, (f"--config-path={config_path.absolute()}", *run_flags), options)


@model_app.command
def profile(*flags: ConfigFlags, config_path: ConfigPath = None, as_json: AsJson = False) -> int:
    """Measure what each unit of the model costs on this machine, and show where a run cuts it into stages.

    Without --config-path it is the model of configs/sandbox.yaml. Nothing is kept: a run measures by itself. Exit code
    1 if a unit or the loss cannot be computed alone.
    """
    config = load(config_path or SANDBOX, flags)
    from shoal.cli.model import print_profile

    return print_profile(config, as_json=as_json)


@model_app.command
def check(
    name: Annotated[str, Parameter(help="A folder with config.json, a name on the hub, or a kind such as qwen3.")],
    *flags: ConfigFlags,
) -> None:
    """Find out by a small twin whether a model of transformers is the same when it is cut; exit code 2 if it is not."""
    config = load(None, ("--model.family=hf", *flags))
    from shoal.cli.model import print_check

    print_check(name, config)


@config_app.command
def show(*flags: ConfigFlags, config_path: ConfigPath = None) -> int:
    """Print the configuration that results from file, environment and flags."""
    return _print_config(load(config_path, flags))


@config_app.command(name="keys")
def list_keys() -> None:
    """List every key with its default and its meaning."""
    from shoal.config.dump import key_lines

    _emit("\n".join(key_lines()) + "\n")


@config_app.command
def convert(path: Annotated[Path, Parameter(help="A configuration file of aether.")]) -> None:
    """Translate a file of aether (DistQat) and print it, with comments: what it has no key for is named there.

    Exit code 2 where something cannot be carried over, with all of that.
    """
    from shoal.config.distqat import converted_yaml

    _emit(converted_yaml(path))


@config_app.command
def reference() -> None:
    """Print a file with every key, its default and its meaning (configs/reference.yaml)."""
    from shoal.config.dump import reference_yaml

    _emit(reference_yaml())


def _print_config(config: Config) -> int:
    from shoal.config.dump import dump_config

    _emit(dump_config(config))
    return 0


def _emit(text: str) -> None:
    """Print a long text."""
    print(text, end="", flush=True)
