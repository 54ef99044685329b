"""Looks at this host. What waits for something else (a driver, the hub, another process) has a limit."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import metadata, requires
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import anyio
import anyio.to_thread

from shoal.cli.devices import has_gpu_driver
from shoal.cli.doctor.diagnosis import Judged, failed, ok, skipped
from shoal.cli.doctor.facts import (
    DaemonFile,
    Facts,
    Folder,
    HostAddresses,
    HubLook,
    KeyFile,
    LanSeen,
    RunsHere,
    StageRoom,
    WantedCores,
    WantedDevices,
    WantedPort,
)
from shoal.cli.doctor.host_checks import ip_of
from shoal.cli.host_network import HostNetwork
from shoal.cli.runs_here import dead_dirs, living_runs
from shoal.config import Config
from shoal.config.per_server import of_server
from shoal.control.initial_peers import parse
from shoal.control.lan import FoundSwarm, find_on_lan, hears_itself
from shoal.control.maddrs import check_port_free
from shoal.errors import ConfigError, DeadlineExceeded, ShoalError
from shoal.file_thread import WANTED_FILES, nearest
from shoal.identity import KEY_BYTES, swarm_key_fingerprint
from shoal.model.cpp_compiler import require_compiler
from shoal.runtime.file_memory import file_room
from shoal.runtime.hardware import installed_version, usable_processors
from shoal.runtime.memory import free_memory_bytes
from shoal.runtime.run_dir import require_socket_room
from shoal.server.stage_question import asked_stage_needs
from shoal.server.visible_gpus import answer_of
from shoal.transport.reach import dial_failure
from shoal.transport.tcp import own_hosts

_SOCKET_NAME: Final = "p2pclient-12345678901.sock"
"""The longest one: hivemind's, with 11 characters at random."""
_DAEMON_TRIED_S: Final = 3.0
_NOT_STARTED: Final = (126, 127)
"""Exit codes of what begins a program, and cannot."""
_HUB_TIMEOUT_S: Final = 2.0
_LAN_S: Final = 2.0
"""An announcement is repeated within a second."""
_HUB: Final = "https://huggingface.co"
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_COME_WITH_SHOAL: Final = ("pydoc-topics", "digits", "tones")
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*\(?([^();]*)\)?")
NAME_S: Final = 4.0


def see_host(facts: Facts, config: Config, origins: Mapping[str, str]) -> None:
    """Note what is seen at once."""
    num_servers = said_servers(config, origins)
    facts.programs = needed_programs()
    facts.ports = wanted_ports(config, num_servers or 1)
    facts.sockets = socket_room()
    facts.log_dir = folder_of("log_dir", config.log_dir)
    facts.checkpoints = checkpoint_folder(config)
    facts.max_files = max_files()
    facts.cores = wanted_cores(config, num_servers)
    facts.runs = runs_here()


def said_servers(config: Config, origins: Mapping[str, str]) -> int | None:
    """Return how many servers the user wants here; None: that follows from the run."""
    is_said = {"servers.num_servers", "servers.replicas"} & origins.keys()
    return config.num_servers if is_said else None


def configuration(config: Config, origins: Mapping[str, str]) -> Judged:
    """Return what there is to say of a configuration that can be read."""
    if said_servers(config, origins) and (problem := config.servers_problem()):
        return failed(problem, "give one value for all servers of this host, or one for each")
    return ok(f"experiment_prefix = {config.experiment_prefix}, {len(origins)} keys are set")


def misread(error: ConfigError) -> Judged:
    """Return what there is to say of one that cannot."""
    return failed(str(error), "correct that; `shoal config keys` says what each key means")


def by_error(error: ConfigError) -> Judged:
    """Return the failure of something that would stop with this error, which says what to do after its first colon."""
    problem, _, remedy = str(error).partition(": ")
    return failed(problem, remedy or problem)


def key_file_at(path: Path) -> KeyFile:
    """Look at the swarm's key; of its content only a fingerprint leaves this function."""
    path = path.expanduser()
    try:
        found = path.stat().st_mode
    except FileNotFoundError:
        return KeyFile(path, None, None)
    except OSError as error:
        return KeyFile(path, None, None, error.strerror or str(error))
    if not stat.S_ISREG(found):
        return KeyFile(path, None, None, "it is no file")
    mode = stat.S_IMODE(found)
    try:
        with path.open("rb") as file:
            content = file.read(KEY_BYTES + 1)
    except OSError as error:
        return KeyFile(path, mode, None, error.strerror or str(error))
    mark = swarm_key_fingerprint(content) if len(content) == KEY_BYTES else ""
    return KeyFile(path, mode, len(content), fingerprint=mark)


def needed_programs() -> Mapping[str, tuple[str, str]]:
    """Return what shoal needs of each program, and the version that is installed, or nothing."""
    found = {"python": (metadata("shoal")["Requires-Python"], platform.python_version())}
    for line in requires("shoal") or ():
        requirement, _, marker = line.partition(";")
        match = _REQUIREMENT.match(requirement)
        if match is None or "extra" in marker:
            continue
        found[match[1]] = (match[2].replace(" ", ""), installed_version(match[1]) or "")
    return found


def wanted_ports(config: Config, num_servers: int) -> tuple[WantedPort, ...] | Judged:
    """Look at each port that is fixed: for the DHT of servers and scout, for tensors, for the monitor."""
    try:
        wanted = dict(_fixed_ports(config, num_servers))
    except ConfigError as error:
        return by_error(error)
    if not wanted:
        return skipped("no port is fixed, so any free ones are taken")
    return tuple(WantedPort(key, maddr, _port_problem(maddr)) for maddr, key in wanted.items())


def _fixed_ports(config: Config, num_servers: int) -> Iterator[tuple[str, str]]:
    network = HostNetwork(config.network)
    for place in range(num_servers + 1):
        for maddr in network.dht(place).host_maddrs:
            if "/tcp/" in maddr and not maddr.endswith("/tcp/0"):
                yield maddr, "network.host_maddrs"
    for place in range(num_servers if config.network.data_port else 0):
        host, port = network.listen_tcp(place)
        yield f"/ip{ip_address(host).version}/{host}/tcp/{port}", "network.data_port"
    if config.network.monitor_port:
        yield f"/ip4/0.0.0.0/tcp/{config.network.monitor_port}", "network.monitor_port"


def _port_problem(maddr: str) -> str:
    try:
        check_port_free(maddr)
    except ConfigError as error:
        return str(error).partition(";")[0]
    return ""


def socket_room() -> Judged:
    """Look whether a run's directory can be made, and paths there are short enough for sockets."""
    try:
        return ok(str(require_socket_room(_SOCKET_NAME)))
    except ConfigError as error:
        return by_error(error)


def folder_of(key: str, path: Path) -> Folder:
    """Look at a folder, or the one in which it will be made."""
    path = path.expanduser().absolute()
    try:
        there = nearest(path)
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        return Folder(key, path, error.strerror or str(error), 0)
    return Folder(key, path, "", shutil.disk_usage(there).free)


def checkpoint_folder(config: Config) -> Folder | Judged:
    """Look at where checkpoints go, if that is not where logs go."""
    if config.checkpoint_dir is None:
        return skipped("they go into log_dir")
    if "://" in config.checkpoint_location:
        return skipped(f"{config.checkpoint_location} is no folder of this host")
    return folder_of("checkpoint_dir", Path(config.checkpoint_location))


def max_files() -> int:
    """Return how many files a role may have open: a launcher raises the limit as far as it may."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return WANTED_FILES if hard == resource.RLIM_INFINITY else hard


def wanted_cores(config: Config, num_servers: int | None) -> WantedCores | Judged:
    """Count the threads of servers that compute on the CPU."""
    if num_servers is None:
        return skipped("how many servers start here is not said: --num-servers")
    if config.servers_problem():
        return skipped("the threads of each server are not known")
    indices = [index for index in range(num_servers) if _is_on_cpu(of_server(config.devices, index))]
    if not indices:
        return skipped("the servers of this host compute on GPUs")
    cores = len(usable_processors())
    return WantedCores(tuple(of_server(config.servers.threads, index) for index in indices), cores)


def _is_on_cpu(device: str) -> bool:
    return device == "cpu" or (device == "auto" and not has_gpu_driver())


def runs_here() -> RunsHere | Judged:
    """Look for launchers of this user, and for what is left of dead ones."""
    try:
        return RunsHere(tuple(living_runs()), tuple(dead_dirs()))
    except ConfigError as error:
        return by_error(error)
    except OSError as error:
        return skipped(f"the directories of runs cannot be looked at: {error.strerror or error}")


def compiler_for(config: Config | None) -> Judged:
    """Look for what torch compiles with.

    Args:
        config: as the run has it; None: not known.
    """
    if config is None:
        return skipped("whether stages are compiled is not known without the run's configuration")
    if not config.model_pipeline.compile:
        return skipped("model_pipeline.compile is off")
    try:
        require_compiler()
    except ConfigError as error:
        return by_error(error)
    return ok("a C++ compiler and Python's headers are there")


async def addresses_of(config: Config) -> HostAddresses:
    """Look at how other hosts would reach this one."""
    network = config.network
    announced = [place.host for place in map(parse, network.announce_maddrs) if place is not None]
    peers = [place.host for place in map(parse, network.initial_peers) if place is not None]
    told = dict.fromkeys(filter(None, (network.public_ip, *announced)))
    unresolved = [host for host in told if ip_of(host) is None and not await is_known(host)]
    return HostAddresses(
        public_ip=network.public_ip,
        announce_maddrs=network.announce_maddrs,
        host_maddrs=network.host_maddrs,
        own=own_hosts(),
        unresolved=tuple(unresolved),
        peers=tuple(peers),
    )


async def lan_of(config: Config, key: bytes | None) -> LanSeen | Judged:
    """Look for the run on the local networks, and whether one could be found there."""
    if not config.network.lan:
        return skipped("network.lan is off")
    if key is None:
        return skipped("a run is looked for by the swarm's key, and there is none")
    found: list[FoundSwarm | None] = []
    heard: list[bool] = []

    async def look() -> None:
        found.append(await find_on_lan(key, None, _LAN_S))

    async def listen() -> None:
        heard.append(await hears_itself(_LAN_S))

    problem = ""
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look)
            tasks.start_soon(listen)
    except* OSError as errors:
        problem = str(errors.exceptions[0])
    return LanSeen(any(heard), next(iter(found), None), not config.network.initial_peers, problem)


async def daemon_file() -> DaemonFile:
    """Look for libp2p's daemon, and start it for its help text."""
    spec = importlib.util.find_spec("hivemind")
    if spec is None or not spec.submodule_search_locations:
        return DaemonFile(None, "hivemind is not installed")
    path = Path(spec.submodule_search_locations[0]) / "hivemind_cli" / "p2pd"
    if not path.exists():
        return DaemonFile(path, f"there is no {path}")
    return DaemonFile(path, await anyio.to_thread.run_sync(_start_problem, path))


def _start_problem(path: Path) -> str:
    try:
        done = subprocess.run([path, "-help"], capture_output=True, stdin=subprocess.DEVNULL, timeout=_DAEMON_TRIED_S)
    except subprocess.TimeoutExpired:
        return ""  # it runs
    except OSError as error:
        return error.strerror or str(error)
    # Of a help text some versions of Go return 2; a signal, or a loader that fails, is no answer.
    if done.returncode < 0 or done.returncode in _NOT_STARTED:
        return f"it ended with code {done.returncode}"
    return ""


async def devices_of(config: Config, within_s: float) -> WantedDevices | Judged:
    """Ask torch for its GPUs if a server may want one."""
    has_driver = has_gpu_driver()
    named = any(device.startswith(("cuda", "mps")) for device in config.devices)
    may_want = named or ("auto" in config.devices and has_driver)
    if not may_want:
        return WantedDevices(config.devices, has_driver, None)
    begun_s = anyio.current_time()
    gpus = await anyio.to_thread.run_sync(answer_of, "shoal.server.visible_gpus", within_s)
    if anyio.current_time() - begun_s >= within_s:
        return skipped(f"torch did not say within {within_s:.0f} s which GPUs there are: this host is slow; try again")
    return WantedDevices(config.devices, has_driver, gpus)


async def stage_room(config: Config, num_servers: int | None, within_s: float) -> StageRoom | Judged:
    """Ask torch in another process what the stages of a run need of a server on the CPU.

    Args:
        config: of the run, on this host.
        num_servers: that start here; None: one is looked at.
    """
    if not _is_on_cpu(config.devices[0]):
        return skipped("the servers of this host compute on GPUs, which look by themselves")
    try:
        needs = await anyio.to_thread.run_sync(asked_stage_needs, config, within_s)
    except DeadlineExceeded:
        return skipped(f"torch did not say within {within_s:.0f} s what the stages of the run need")
    except ShoalError as error:
        reason = str(error).strip().rpartition("\n")[2]
        return skipped(f"what the stages of the run need cannot be computed here: {reason[:300]}")
    share_bytes = free_memory_bytes() // (num_servers or 1)
    cap_bytes = config.servers.max_memory_bytes
    there = nearest(config.log_dir.expanduser().absolute())
    return StageRoom(
        share_bytes=min(share_bytes, cap_bytes or share_bytes),
        num_servers=num_servers or 1,
        max_microbatch_samples=config.servers.max_microbatch_samples,
        needs=needs,
        disk_bytes=file_room(there, num_servers or 1, config.servers.max_disk_bytes)[0],
    )


async def hub_for(config: Config, origins: Mapping[str, str]) -> HubLook | Judged:
    """Look whether what the user names of the hub can be fetched."""
    wanted = tuple(_of_hub(config, origins))
    if not wanted:
        return skipped("nothing that is named here comes from the hub")
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return skipped("HF_HUB_OFFLINE is set: only what has been fetched before is used")
    url = urlsplit(os.environ.get("HF_ENDPOINT") or _HUB)
    proxy = getproxies().get(url.scheme)
    if proxy and not proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    host, port = url.hostname or "", url.port or (80 if url.scheme == "http" else 443)
    problem = ""
    if not await is_known(host):
        return HubLook(wanted, f"{host} port {port}", "its name is not known on this host")
    try:
        with anyio.fail_after(_HUB_TIMEOUT_S):
            stream = await anyio.connect_tcp(host, port)
            await stream.aclose()
    except (TimeoutError, OSError) as error:
        problem = str(dial_failure(error))
    return HubLook(wanted, f"{host} port {port}", problem)


def _of_hub(config: Config, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield the keys that name something of the hub, with their values."""
    data, model = config.data, config.model
    names = {"model.name_or_path": model.name_or_path, "data.tokenizer": data.tokenizer}
    if not data.is_own and data.dataset_name not in _COME_WITH_SHOAL:
        names["data.dataset_name"] = data.dataset_name
    for key, name in names.items():
        if key in origins and name and _HUB_NAME.fullmatch(name) and not Path(name).exists():
            yield f"{key} = {name}"


async def is_known(name: str) -> bool:
    """Return whether this host knows an address of a name; not if it says nothing within `NAME_S`.

    A lookup cannot be interrupted, and the end of an event loop waits for its own ones: this thread is left alone.
    """
    loop, answered, known = asyncio.get_running_loop(), anyio.Event(), False

    def look_up() -> None:
        nonlocal known
        with suppress(OSError, UnicodeError):
            known = bool(socket.getaddrinfo(name, None))
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(answered.set)

    threading.Thread(target=look_up, name="name lookup", daemon=True).start()
    with anyio.move_on_after(NAME_S):
        await answered.wait()
    return known
