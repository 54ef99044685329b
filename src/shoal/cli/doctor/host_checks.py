"""Whether this host by itself can run what it is asked to: what the checks make of what was seen of it. Pure."""

from __future__ import annotations

import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address

from shoal.cli.doctor.checking import Check, about
from shoal.cli.doctor.diagnosis import Judged, failed, ok, skipped, warning
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
    SwarmSeen,
    WantedCores,
    WantedDevices,
)
from shoal.control.initial_peers import parse
from shoal.file_thread import WANTED_FILES
from shoal.identity import KEY_BYTES
from shoal.ids import PeerId
from shoal.swarm.view import Candidate
from shoal.wire.messages.base import Hop

MIB, GIB = 2**20, 2**30
_LITTLE_BYTES = GIB
_TOO_LITTLE_BYTES = 64 * MIB
_FEW_FILES = 4096
_TOO_FEW_FILES = 256
_SIGNS: Mapping[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_REQUIRED = re.compile(r"(>=|<=|==|!=|<|>)([\d.]+)")
_ANY_ADDRESS = ("0.0.0.0", "::")


# ---- the key -------------------------------------------------------------------------------------------------------


def key_file(key: KeyFile) -> Judged:
    """Whether there is one."""
    if key.mode is not None:
        return ok(str(key.path))
    if key.problem:
        return failed(
            f"{key.path} cannot be looked at: {key.problem}", "name the key's file with --swarm-key-file; see ls -ld"
        )
    return failed(
        f"there is no swarm key {key.path}",
        "`shoal join` here asks for a text that `shoal invite` prints on a host of the swarm, and keeps the key in it; "
        f"or copy the file: mkdir -p {_quoted(key.path.parent)} && scp <client host>:{key.path} {_quoted(key.path)}; "
        "the client makes that of a new swarm when it starts",
    )


def key_mode(key: KeyFile) -> Judged:
    """Whether it is secret."""
    if key.mode is None:
        return skipped("no key file was seen")
    if key.mode & 0o077:
        return failed(f"others may read {key.path}: its mode is {key.mode:o}", f"chmod 600 {_quoted(key.path)}")
    return ok(f"mode {key.mode:o}")


def key_form(key: KeyFile) -> Judged:
    """Whether it is a key."""
    if key.mode is None:
        return skipped("no key file was seen")
    if key.size_bytes is None:
        return failed(f"{key.path} cannot be read: {key.problem}", f"let this user read it: ls -l {_quoted(key.path)}")
    if key.size_bytes != KEY_BYTES:
        size = f"more than {KEY_BYTES}" if key.size_bytes > KEY_BYTES else str(key.size_bytes)
        return failed(
            f"{key.path} holds {size} bytes, and a key has {KEY_BYTES}",
            f"copy the file as it is, for it is no text: scp <client host>:{key.path} {_quoted(key.path)}",
        )
    return ok(f"{KEY_BYTES} bytes, fingerprint {key.fingerprint}")


# ---- programs ------------------------------------------------------------------------------------------------------


def programs(found: Mapping[str, tuple[str, str]]) -> Judged:
    """Whether the programs are as new as shoal needs them; those of other hosts are not known."""
    misfits = {name: values for name, values in found.items() if not fits(*values)}
    if misfits:
        named = (f"{name} {there or 'is missing'}, needed is {needed}" for name, (needed, there) in misfits.items())
        wanted = " ".join(shlex.quote(f"{name}{needed}") for name, (needed, _) in misfits.items() if name != "python")
        python = "" if "python" not in misfits else f"install Python {misfits['python'][0]}; "
        return failed("; ".join(named), f"{python}pip install {wanted}" if wanted else python.rstrip("; "))
    return ok(", ".join(f"{name} {there}" for name, (_, there) in found.items()))


def fits(needed: str, there: str) -> bool:
    """Whether a version is one of those that a requirement such as `>=1.1,<2` allows."""
    if not there:
        return False
    have = _release(there)
    parts = (_REQUIRED.fullmatch(part) for part in needed.split(","))
    return all(_SIGNS[part[1]](have, _release(part[2])) for part in parts if part is not None)


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version without zeros at their end: of 2.11.0+cu130 they are 2 and 11."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def daemon(found: DaemonFile) -> Judged:
    """Whether libp2p's daemon can be started."""
    if not found.problem:
        return ok(str(found.path))
    if found.path is not None and found.path.exists():
        return failed(f"{found.path}: {found.problem}", f"chmod +x {_quoted(found.path)}, or install hivemind again")
    return failed(
        f"libp2p's daemon is missing: {found.problem}", "install hivemind again: pip install --force-reinstall hivemind"
    )


# ---- the machine ---------------------------------------------------------------------------------------------------


def folder(found: Folder) -> Judged:
    """Whether it can be written to, and has room."""
    flag = "--" + found.key.replace("_", "-")
    if found.problem:
        return failed(
            f"{found.path} cannot be written to: {found.problem}",
            f"let this user write there, or choose another folder with {flag}",
        )
    evidence = f"{found.path}: {found.free_bytes / GIB:,.2f} GiB free"
    remedy = f"free space there, or choose another folder with {flag}"
    if found.free_bytes < _TOO_LITTLE_BYTES:
        return failed(evidence, remedy)
    return warning(evidence, remedy) if found.free_bytes < _LITTLE_BYTES else ok(evidence)


def room(found: StageRoom) -> Judged:
    """Whether a server can host a stage, if need be in the smallest microbatches."""
    server = Candidate(
        Hop(PeerId(""), ()),
        0.0,
        free_memory_bytes=found.share_bytes,
        max_microbatch_samples=found.max_microbatch_samples,
        free_disk_bytes=found.disk_bytes,
    )
    if not found.share_bytes:
        return skipped("how much memory is free is not known on this system")
    fitting = [stage for stage, need in enumerate(found.needs) if need.fits_cut(server)]
    least_bytes = min(need.of(server, need.min_samples, files=need.files_of(server))[0] for need in found.needs)
    share = f"each of {found.num_servers} servers may take {found.share_bytes / MIB:,.0f} MiB"
    if not fitting:
        return failed(
            f"{share}, and the smallest stage needs {least_bytes / MIB:,.0f} MiB",
            "start fewer servers with --num-servers, end other programs, or have the client cut the model into more "
            "stages (model_pipeline.stages)",
        )
    count = "all" if len(fitting) == len(found.needs) else f"{len(fitting)} of {len(found.needs)}"
    num_filed = sum(bool(found.needs[stage].files_of(server)) for stage in fitting)
    filed = f", {num_filed} with files in place of memory" if num_filed else ""
    return ok(f"{share}; {count} stages fit{filed}")


def devices(found: WantedDevices) -> Judged:
    """Whether the devices that are asked for are there."""
    names = () if found.gpus is None else found.gpus.names
    ordinals = [int(each.partition(":")[2] or 0) for each in found.wanted if each.startswith("cuda")]
    if found.gpus is None:
        return ok("the CPU, which is always there")
    if any(ordinal >= len(names) for ordinal in ordinals) or ("mps" in found.wanted and not found.gpus.mps):
        return failed(
            f"device = {','.join(found.wanted)}, and {found.gpus}",
            "use --device auto or --device cpu, or install a torch and a driver that go together "
            "(https://pytorch.org/get-started)",
        )
    if "auto" in found.wanted and found.has_driver and found.gpus.reason:
        return warning(
            f"servers would compute on the CPU, although this host has a driver for GPUs: {found.gpus}",
            "install a torch that goes with the driver (https://pytorch.org/get-started), or say --device cpu",
        )
    return ok(str(found.gpus))


def open_files(max_files: int) -> Judged:
    """Whether enough files and connections may be open: a role may have a thousand connections."""
    evidence = f"a process may have {max_files} files and connections open"
    if max_files >= _FEW_FILES:
        return ok(evidence)
    remedy = (
        f"allow more in the shell that starts shoal: ulimit -n {WANTED_FILES}; where that is refused, raise the hard "
        "limit (nofile in /etc/security/limits.conf, LimitNOFILE= of a unit of systemd)"
    )
    return failed(evidence, remedy) if max_files < _TOO_FEW_FILES else warning(evidence, remedy)


def cores(found: WantedCores) -> Judged:
    """Whether each thread that computes can have a core."""
    threads = sum(found.threads)
    evidence = f"{len(found.threads)} servers compute with {threads} threads on {found.cores} cores"
    if threads <= found.cores:
        return ok(evidence)
    return warning(
        evidence, "they slow each other down: start fewer servers with --num-servers, or lower --servers.threads"
    )


# ---- the host's network --------------------------------------------------------------------------------------------


def ports(facts: Facts) -> Judged:
    """Whether the ports that roles will listen on are free."""
    wanted = facts.ports
    if isinstance(wanted, Judged):
        return wanted
    taken = [port for port in wanted if port.problem]
    if not taken:
        return ok(", ".join(port.maddr for port in wanted))
    if _runs_already(facts):
        return skipped("this host takes part in the run already, so its ports are taken")
    keys = " and ".join(f"--{key.replace('_', '-')}" for key in dict.fromkeys(port.key for port in taken))
    numbers = dict.fromkeys(port.maddr.rpartition("/")[2] for port in taken)
    return failed(
        "\n".join(port.problem for port in taken),
        f"see who has it (ss -ltnp | grep -E ':({'|'.join(numbers)}) '; `shoal ps` lists your runs), end that, or give "
        f"another port with {keys}",
    )


def _runs_already(facts: Facts) -> bool:
    """Whether a launcher of this host is of the very run that the swarm announces."""
    run = facts.swarm.view.run if isinstance(facts.swarm, SwarmSeen) else None
    return isinstance(facts.runs, RunsHere) and any(run and run.run_id == note.run_id for note in facts.runs.living)


def addresses(found: HostAddresses) -> Judged:
    """Whether other hosts can dial what this one tells them."""
    told = [found.public_ip] if found.public_ip else []
    for maddr in found.announce_maddrs:
        if (place := parse(maddr)) is None:
            return failed(
                f"network.announce_maddrs: nobody can dial {maddr}",
                "write it as /ip4/203.0.113.7/tcp/50001, with the port that a router forwards",
            )
        told.append(place.host)
    own = {str(each) for each in found.own}
    for maddr in found.host_maddrs:
        place = ip_of(maddr.split("/")[2])
        if isinstance(place, IPv4Address) and not _is_any(place) and not place.is_loopback and str(place) not in own:
            return failed(
                f"network.host_maddrs: {maddr} is no address of this host, which has {', '.join(found.own)}",
                "listen on all of them: --network.host-maddrs /ip4/0.0.0.0/tcp/0",
            )
    if found.unresolved:
        return failed(
            f"the name {found.unresolved[0]}, which other hosts are told, is not known",
            "check how it is written, or give the address with --public-ip",
        )
    problems = list(_doubts(found, told, own))
    if problems:
        return warning(
            "\n".join(problems),
            "tell other hosts an address that they reach: --public-ip <address>, with --network.data-port and "
            "--network.host-maddrs of ports that are forwarded",
        )
    return ok(f"other hosts are told {', '.join(told or found.own)}")


def _doubts(found: HostAddresses, told: list[str], own: set[str]) -> Iterator[str]:
    """Yield why other hosts may not reach this one at what it tells them."""
    peers = [place for place in map(ip_of, found.peers) if place is not None]
    is_wide = any(place.is_global for place in peers)
    is_here = all(place.is_loopback for place in peers)
    for place in map(ip_of, told):
        if place is None or place.is_global:
            continue
        if place.is_loopback and not is_here:
            yield f"{place} means each host itself"
        elif isinstance(place, IPv4Address) and not place.is_loopback and str(place) not in own:
            yield f"{place} is a private address, and none of this host, which has {', '.join(found.own)}"
        elif is_wide:
            yield f"{place} is a private address, and the initial peers are elsewhere on the Internet"
    places = [place for place in map(ip_of, found.own) if place is not None]
    if not told and is_wide and not any(place.is_global for place in places):
        yield (
            f"this host has private addresses alone ({', '.join(found.own)}), and the initial peers are elsewhere on "
            "the Internet"
        )


def ip_of(text: str) -> IPv4Address | IPv6Address | None:
    """Return the address; None: it is a name."""
    try:
        return ip_address(text)
    except ValueError:
        return None


def _is_any(place: IPv4Address | IPv6Address) -> bool:
    return str(place) in _ANY_ADDRESS


def hub(found: HubLook) -> Judged:
    """Whether what this host has to fetch can be fetched."""
    wanted = ", ".join(found.wanted)
    if not found.problem:
        return ok(f"{found.place} answers, for {wanted}")
    return failed(
        f"{wanted} would come from the hub, and {found.place} cannot be reached: {found.problem}",
        "let this host reach it, by a proxy (HTTPS_PROXY) or a mirror (HF_ENDPOINT); with HF_HUB_OFFLINE=1 what was "
        "fetched before is used; or name a folder, or a data set that comes with shoal",
    )


def lan(found: LanSeen) -> Judged:
    """Whether a run can be found on the local network, or is."""
    if found.found is not None:
        return ok(f"run {found.found.experiment_prefix} is announced, at {', '.join(found.found.initial_peers)}")
    if found.hears_itself:
        return ok(
            "announcements come back to this host, and none is of a run of this swarm's key; where a router or a "
            "Wi-Fi access point keeps them from other hosts, `shoal invite` and `shoal join` need none"
        )
    evidence = f"announcements by mDNS do not come through here{found.problem and ': '}{found.problem}"
    if not found.needs_it:
        return ok(f"{evidence}; the initial peers are known without")
    return warning(
        evidence,
        "join by an invitation: `shoal invite` on the client's host, `shoal join` here; or let UDP port 5353 through",
    )


def runs(facts: Facts) -> Judged:
    """Whether something else of shoal runs here, or is left of what did."""
    found = facts.runs
    if isinstance(found, Judged):
        return found
    if found.dead:
        return warning("\n".join(f"left of a dead run: {each.path}" for each in found.dead), "`shoal clean` removes it")
    named = [f"run {note.run_id} ({note.hosts}, process {note.launcher_pid})" for note in found.living]
    if not named:
        return ok("no run of this user lives on this host")
    if _runs_already(facts):
        return ok(f"{', '.join(named)}: the run that the swarm announces is among them")
    return warning(
        f"there is {', '.join(named)} on this host, which takes cores, memory and ports",
        f"`shoal ps` says what it does, `shoal stop {found.living[0].run_id}` ends it",
    )


def _quoted(path: object) -> str:
    return shlex.quote(str(path))


HOST_CHECKS = (
    Check("key.file", "there is a swarm key", about(lambda facts: facts.key, key_file)),
    Check("key.mode", "nobody else can read it", about(lambda facts: facts.key, key_mode)),
    Check("key.form", "it is a key", about(lambda facts: facts.key, key_form)),
    Check("host.configuration", "the configuration can be read", lambda facts: facts.configuration),
    Check("host.programs", "programs are new enough", about(lambda facts: facts.programs, programs)),
    Check("host.p2pd", "libp2p's daemon can be started", about(lambda facts: facts.daemon, daemon)),
    Check("host.compiler", "a stage can be compiled", lambda facts: facts.compiler),
    Check("host.devices", "the devices are there", about(lambda facts: facts.devices, devices)),
    Check("host.memory", "a stage fits", about(lambda facts: facts.room, room)),
    Check("host.cores", "there is a core for each thread", about(lambda facts: facts.cores, cores)),
    Check("host.open_files", "enough files may be open", about(lambda facts: facts.max_files, open_files)),
    Check("host.sockets", "there is a place for sockets", lambda facts: facts.sockets),
    Check("host.log_dir", "logs can be written", about(lambda facts: facts.log_dir, folder)),
    Check("host.checkpoint_dir", "checkpoints can be written", about(lambda facts: facts.checkpoints, folder)),
    Check("host.ports", "ports are free", ports),
    Check("host.addresses", "others can dial this host", about(lambda facts: facts.addresses, addresses)),
    Check("host.hub", "the hub can be reached", about(lambda facts: facts.hub, hub)),
    Check("host.lan", "a run is found on the local network", about(lambda facts: facts.lan, lan)),
    Check("host.runs", "nothing else of shoal runs here", runs),
)
"""In the order in which they are read."""
