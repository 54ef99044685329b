"""Ports and addresses of a host's roles."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shoal.cli import host_network
from shoal.cli.host_network import USUAL_MONITOR_PORT, HostNetwork, free_port, local_maddrs
from shoal.config import load_config
from shoal.config.host import NetworkConfig
from shoal.errors import ConfigError
from shoal.runtime.run_dir import RunDir


def _network(**settings: object) -> HostNetwork:
    return HostNetwork(NetworkConfig.model_validate(settings))


def _unclaimed(_port: int) -> bool:
    return True


def test_without_settings_every_interface_and_any_free_port_is_used() -> None:
    network = _network()
    assert network.listen_tcp(3) == ("0.0.0.0", 0)
    assert network.dht(3).host_maddrs == ("/ip4/0.0.0.0/tcp/0",)
    assert network.announce(0) == ()


def test_fixed_ports_are_counted_up_for_the_roles_of_a_host() -> None:
    network = _network(
        data_port=700, host_maddrs=["/ip4/0.0.0.0/tcp/800"], announce_maddrs=["/dns4/me.example/tcp/900"]
    )
    assert [network.listen_tcp(place)[1] for place in (0, 2)] == [700, 702]
    assert network.dht(2).host_maddrs == ("/ip4/0.0.0.0/tcp/802",)
    assert network.dht(2).announce_maddrs == ("/dns4/me.example/tcp/902",)


@pytest.mark.parametrize(
    ("public_ip", "announced"),
    [
        ("203.0.113.7", "/ip4/203.0.113.7/tcp/50123"),
        ("2001:db8::1", "/ip6/2001:db8::1/tcp/50123"),
        ("me.example", "/dns4/me.example/tcp/50123"),
    ],
)
def test_a_public_address_is_announced_with_the_monitors_port(public_ip: str, announced: str) -> None:
    network = _network(public_ip=public_ip, monitor_port=50123)
    assert network.monitor(_unclaimed).announce_maddrs == (announced,)
    by_6 = ("/ip6/::/tcp/50123",) * (":" in public_ip)
    assert network.monitor(_unclaimed).host_maddrs == ("/ip4/0.0.0.0/tcp/50123", *by_6)
    assert network.listen_tcp(0)[0] == ("::" if by_6 else "0.0.0.0")
    assert network.announce(0) == (public_ip,)
    # Of a port that the system chooses nothing can be said.
    assert network.dht(1).announce_maddrs == ()


def test_a_host_without_ipv4_means_ipv6_by_all_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_network, "own_hosts", lambda: ("fd00::2",))
    network = _network(data_port=700)
    assert network.listen_tcp(2) == ("::", 702)
    assert network.dht(3).host_maddrs == ("/ip6/::/tcp/0",)
    [where] = network.monitor(_unclaimed).host_maddrs
    port = int(where.removeprefix("/ip6/::/tcp/"))
    assert local_maddrs(network.monitor(_unclaimed), "peer")[0].startswith("/ip6/::1/tcp/")
    assert port
    assert _network(host_maddrs=["/ip4/10.0.0.5/tcp/7"]).dht(0).host_maddrs == ("/ip4/10.0.0.5/tcp/7",)
    # Nor does it help where the system has none of it.
    monkeypatch.setattr("socket.has_dualstack_ipv6", lambda: False)
    assert network.dht(3).host_maddrs == ("/ip4/0.0.0.0/tcp/0",)


def test_addresses_of_ipv6_are_listened_on_by_all_that_is_dialled() -> None:
    both = _network(host_maddrs=["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"])
    assert both.listen_tcp(0) == ("::", 0)
    assert both.dht(1).host_maddrs == ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
    assert _network(host_maddrs=["/ip6/::1/tcp/0"]).listen_tcp(0) == ("::1", 0)


def test_roles_of_the_monitors_host_go_the_short_way() -> None:
    monitor = _network(public_ip="203.0.113.7", monitor_port=50123).monitor(_unclaimed)
    assert local_maddrs(monitor, "peer") == ("/ip4/127.0.0.1/tcp/50123/p2p/peer",)
    assert local_maddrs(_network(host_maddrs=["/ip4/10.0.0.5/tcp/7"]).monitor(_unclaimed), "peer") == ()


def test_loopback_alone_listens_on_loopback_alone() -> None:
    assert _network(host_maddrs=["/ip4/127.0.0.1/tcp/0"]).listen_tcp(0) == ("127.0.0.1", 0)


def test_a_taken_port_is_replaced_by_a_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) not in (0, port)
    assert free_port(port) == port
    assert _network().monitor(_unclaimed).host_maddrs[0].rpartition("/")[2] != "0"
    assert USUAL_MONITOR_PORT == 50000


def test_two_runs_that_start_at_once_choose_different_ports(tmp_path: Path) -> None:
    with RunDir(tmp_path) as first, RunDir(tmp_path) as second:
        # Nobody listens yet.
        (one,), (other,) = (_network().monitor(run.claim_port).host_maddrs for run in (first, second))
        assert one != other
        assert not other.endswith("/0")


def test_ports_above_the_last_one_are_an_error_of_the_user() -> None:
    network = _network(data_port=65534, host_maddrs=["/ip4/0.0.0.0/tcp/65535"])
    assert network.listen_tcp(1)[1] == 65535
    with pytest.raises(ConfigError, match=r"network\.data_port = 65534: role 3 of this host would need port 65536"):
        network.listen_tcp(2)
    with pytest.raises(ConfigError, match="tcp/65535: role 2 of this host"):
        network.dht(1)
    for maddr in ("/ip4/0.0.0.0/tcp/70000", "/ip4/0.0.0.0/tcp/x", "/ip4/0.0.0.0/udp/65536/quic"):
        with pytest.raises(ConfigError, match="is not a port; use 0 to 65535"):
            load_config(None, {"network": {"host_maddrs": [maddr]}}, {})


def test_the_port_that_a_router_forwards_is_announced_in_place_of_the_own_one_and_counted_up() -> None:
    network = _network(public_ip="203.0.113.7", data_port=700, announce_data_port=9000)
    assert [network.listen_tcp(place)[1] for place in (0, 2)] == [700, 702]
    assert [network.announce(place) for place in (0, 2)] == [("203.0.113.7:9000",), ("203.0.113.7:9002",)]
    assert _network(public_ip="2001:db8::1", data_port=1, announce_data_port=9).announce(0) == ("[2001:db8::1]:9",)
    last = _network(public_ip="me.example", data_port=1, announce_data_port=65535)
    with pytest.raises(ConfigError, match=r"network\.announce_data_port = 65535: role 2 of this host would need"):
        last.announce(1)


def test_an_announced_port_needs_an_address_and_a_port_to_forward_to() -> None:
    flags = ("--network.announce-data-port=9000",)
    with pytest.raises(ConfigError, match=r"set network\.data_port and network\.public_ip as well"):
        load_config(None, flags, {})
    with pytest.raises(ConfigError, match=r"set network\.public_ip as well"):
        load_config(None, (*flags, "--network.data-port=700"), {})
