"""Whether a way leads from this host into the swarm: what the checks make of what was seen there. Pure."""

from __future__ import annotations

from shoal.cli.doctor.checking import Check, about
from shoal.cli.doctor.diagnosis import Condition, Judged, failed, ok, skipped, warning
from shoal.cli.doctor.facts import ClientSeen, Facts, SwarmSeen
from shoal.control.records import TTL_S
from shoal.wire.handshake import PROTOCOL_VERSION, version_misfit

_CLOCK_SKEW_S = 3.0
"""By so much hivemind lets clocks differ before it refuses a peer's time."""


def peers_reached(facts: Facts) -> Judged:
    """Whether the swarm can be joined at the initial peers: one is enough."""
    looks = facts.peers
    if isinstance(looks, Judged):
        return looks
    obstacles = [obstacle for obstacle in looks.values() if obstacle is not None]
    count = f"{len(looks) - len(obstacles)} of {len(looks)} initial peers can be joined at"
    if not obstacles:
        return ok(count)
    if facts.are_remembered:
        # Peers of a list come and go, and a run that is over has none.
        return ok(count) if len(obstacles) < len(looks) else skipped(_over(len(looks)))
    evidence = "\n".join(obstacle.cause for obstacle in obstacles)
    remedy = "\n".join(dict.fromkeys(obstacle.remedy for obstacle in obstacles))
    if len(obstacles) < len(looks):
        return warning(f"{count}; not at\n{evidence}", remedy)
    return failed(evidence, remedy)


def _over(num_peers: int) -> str:
    which = "the peer" if num_peers == 1 else f"any of the {num_peers} peers"
    return f"nothing answers at {which} of this host's newest run, so it is over: name a swarm with --initial-peers"


def swarm_key(swarm: SwarmSeen) -> Judged:
    """Whether the swarm that answers has this host's key."""
    if swarm.view.run is not None or any(prefix is not None for prefix in swarm.prefixes):
        return ok(f"the swarm there has this key, {swarm.key_fingerprint}")
    if not swarm.prefixes:
        return skipped("no initial peer has said to which swarm it belongs")
    return failed(
        f"the swarm there has another swarm key than this host, whose fingerprint is {swarm.key_fingerprint}",
        "compare it with what `shoal key fingerprint` prints on the client's host, and copy that host's key file here "
        "(--swarm-key-file names it)",
    )


def swarm_prefix(swarm: SwarmSeen) -> Judged:
    """Whether the swarm that answers is of the experiment that this host means."""
    if swarm.view.run is not None or swarm.own_prefix in swarm.prefixes:
        return ok(f"experiment_prefix = {swarm.own_prefix}")
    theirs = sorted({prefix for prefix in swarm.prefixes if prefix is not None})
    if not theirs:
        return skipped("no peer with this host's key has said to which swarm it belongs")
    return failed(
        f"the swarm there has experiment_prefix = {' or '.join(theirs)}, not {swarm.own_prefix}",
        f"join it with --experiment-prefix {theirs[0]}",
    )


def swarm_run(swarm: SwarmSeen) -> Judged:
    """Whether a run goes on there."""
    run = swarm.view.run
    if run is not None:
        if run.ended:
            return failed(f"run {run.run_id} has ended", "start another one on the client's host")
        return ok(f"run {run.run_id}, {run.num_stages} stages")
    if swarm.other_versions or not _is_same(swarm):
        return skipped("the swarm there is another one, or its records cannot be read")
    return failed(
        f"the swarm is there, but announces no run called {swarm.own_prefix}: it has ended, or has not begun",
        "see on the client's host whether it runs, and what it has printed",
    )


def _is_same(swarm: SwarmSeen) -> bool:
    return all(check(swarm).condition is Condition.OK for check in (swarm_key, swarm_prefix))


def clock(swarm: SwarmSeen) -> Judged:
    """Whether this host's clock agrees with a peer's: of two that differ nobody can say which one is wrong."""
    if swarm.ahead_s is None:
        return skipped("no peer has said what time it is")
    evidence = (
        f"a peer's clock is {abs(swarm.ahead_s):.1f} s {'ahead of' if swarm.ahead_s > 0 else 'behind'} this host's"
    )
    remedy = "set the clock that is wrong: timedatectl set-ntp true"
    if abs(swarm.ahead_s) <= _CLOCK_SKEW_S:
        return ok(evidence)
    if abs(swarm.ahead_s) <= TTL_S:
        return warning(evidence, remedy)
    return failed(f"{evidence}: neither believes what the other announces", remedy)


def protocol(swarm: SwarmSeen) -> Judged:
    """Whether the peers speak this host's version of the protocol."""
    others = swarm.other_versions
    if not others:
        if swarm.view.run is None:
            return skipped("no record of the swarm can be read")
        return ok(f"version {PROTOCOL_VERSION}")
    named = [f"peer {peer} {version_misfit(version)}" for peer, version in list(others.items())[:3]]
    evidence = "\n".join(named)
    remedy = "install the same version of shoal on all hosts; this one's is what `shoal --version` prints"
    return failed(evidence, remedy) if swarm.view.run is None else warning(evidence, remedy)


def large_frames(swarm: SwarmSeen) -> Judged:
    """Whether full packets get through as well as small ones."""
    size = f"{swarm.large_bytes >> 10} KiB"
    if isinstance(swarm.takes_large, Judged):
        return swarm.takes_large
    if swarm.takes_large:
        return ok(f"{size} get through to an initial peer")
    return warning(
        f"short questions were answered, and one of {size} is not: full packets get lost on the way, the link is very "
        "slow, or the peer has just ended",
        "let this host send smaller packets (ip link set dev <interface> mtu 1280), or let the firewall between pass "
        'ICMP "fragmentation needed"',
    )


def client_reached(seen: ClientSeen) -> Judged:
    """Whether the client can be dialled from here, and proves to have the swarm's key."""
    if not seen.problem:
        return ok(f"{seen.name} answers at its data port")
    return failed(
        f"{seen.name}: {seen.problem}",
        "open the client's TCP port to this host: on the client's host set network.data_port, open and forward it, and "
        "give --public-ip",
    )


def client_configuration(seen: ClientSeen) -> Judged:
    """Whether what this host sets goes with what the run shares."""
    if seen.problem:
        return skipped("the client has not told the run's configuration")
    if seen.misfit:
        return failed(seen.misfit, "leave these keys out here: servers take them from the run")
    return ok("this host sets no key otherwise than the run")


def dialled_back(swarm: SwarmSeen) -> Judged:
    """Whether the client can dial the servers of this host, which it has tried by itself."""
    view, own = swarm.view, f"unix:{swarm.machine}:"
    servers = [server for server in (*view.replicas, *view.candidates) if server.hop.addresses]
    here = [server for server in servers if any(address.startswith(own) for address in server.hop.addresses)]
    if not view.clients or not here:
        what = "the swarm has no client now" if here else "no server of this host is in the swarm"
        return skipped(f"{what}: the client dials each server that comes, then ask again")
    reasons = dict(view.clients[0].undialled)
    silent = [(view.name_of(server.peer), reasons[server.peer]) for server in here if server.peer in reasons]
    if not silent:
        return ok(
            f"the client can dial the servers of this host, {', '.join(view.name_of(each.peer) for each in here)}"
        )
    return failed(
        "the client cannot dial " + "\n".join(f"{name}: {reason}" for name, reason in silent),
        "open the servers' TCP port here and have it forwarded: set --network.data-port, and --public-ip to an address "
        "that the client's host reaches",
    )


SWARM_CHECKS = (
    Check("swarm.peers", "the swarm can be joined at an initial peer", peers_reached),
    Check("swarm.joined", "this host takes part in the DHT", lambda facts: facts.joined),
    Check("swarm.key", "the swarm has this key", about(lambda facts: facts.swarm, swarm_key)),
    Check("swarm.prefix", "the swarm has this prefix", about(lambda facts: facts.swarm, swarm_prefix)),
    Check("swarm.run", "a run goes on", about(lambda facts: facts.swarm, swarm_run)),
    Check("swarm.clock", "clocks agree", about(lambda facts: facts.swarm, clock)),
    Check("swarm.protocol", "peers speak this protocol", about(lambda facts: facts.swarm, protocol)),
    Check("swarm.large_frames", "full packets get through", about(lambda facts: facts.swarm, large_frames)),
    Check("swarm.client", "the client can be dialled", about(lambda facts: facts.client, client_reached)),
    Check("swarm.shared", "nothing is set against the run", about(lambda facts: facts.client, client_configuration)),
    Check("swarm.dialled_back", "the client can dial this host", about(lambda facts: facts.swarm, dialled_back)),
)
"""In the order in which a host gets into a swarm."""
