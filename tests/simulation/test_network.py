"""The simulated network keeps the promises of `transport.base`, whatever goes wrong."""

from __future__ import annotations

import pytest
from tests.simulation.disk import Disk
from tests.simulation.kernel import MAX_EVENTS, Kernel
from tests.simulation.network import DEADLINE_S, Manners, Network
from tests.simulation.safety import Broken


class Host:
    """Writes down what happens."""

    def __init__(self, network: Network, name: str) -> None:
        self.seen: list[tuple[str, object]] = []
        self.at_s: list[float] = []
        self.network = network
        network.start(name, self)

    def deliver(self, sender: str, message: object) -> None:
        self.seen.append((sender, message))
        self.at_s.append(self.network.now_s)

    def lost(self, peer: str) -> None:
        self.seen.append((peer, "lost"))
        self.at_s.append(self.network.now_s)


def pair(seed: int, manners: Manners | None = None) -> tuple[Network, Host, Host]:
    network = Network(seed, lambda message: isinstance(message, tuple), manners or Manners())
    return network, Host(network, "a"), Host(network, "b")


def test_each_class_keeps_its_order_and_only_control_overtakes() -> None:
    overtaken = 0
    for seed in range(50):
        network, _, there = pair(seed)
        for number in range(20):
            network.send("a", "b", (number,) if number % 2 else number)
        network.run(10.0)
        messages = [message for _, message in there.seen]
        control = [message for message in messages if isinstance(message, int)]
        bulk = [message for message in messages if isinstance(message, tuple)]
        assert control == list(range(0, 20, 2))
        assert bulk == [(number,) for number in range(1, 20, 2)]
        for at, message in enumerate(messages):
            if isinstance(message, tuple):
                assert set(range(0, message[0], 2)) <= set(messages[:at]), "a tensor has overtaken control"
        overtaken += messages != sorted(messages, key=lambda m: m[0] if isinstance(m, tuple) else m)
    assert overtaken


def test_each_end_hears_once_of_a_connection_s_end_and_before_anything_of_the_next_one() -> None:
    for seed in range(200):
        network, here, there = pair(seed)
        network.send("a", "b", 1)
        network.run(1.0)
        network.cut("a", "b", 0.0)
        for at_s in (1.01, 1.1, 2.0, 5.0):
            network.at(at_s, network.send, "a", "b", 2)
        network.run(10.0)
        lost = [at for at, (_, what) in enumerate(there.seen) if what == "lost"]
        new = [at for at, (_, what) in enumerate(there.seen) if what == 2]
        assert len(lost) == 1
        assert lost[0] < new[0]
        assert [what for _, what in here.seen].count("lost") == 1


def test_what_is_sent_before_the_end_was_heard_of_is_dropped() -> None:
    network, here, there = pair(1)
    network.send("a", "b", 1)
    network.run(1.0)
    network.cut("a", "b", 0.0)
    network.send("a", "b", "dropped")
    network.run(10.0)
    assert ("b", "lost") in here.seen
    assert ("a", "dropped") not in there.seen


@pytest.mark.parametrize("duration_s", [0.5, 1.9])
def test_a_silence_shorter_than_the_deadline_only_delays(duration_s: float) -> None:
    network, here, there = pair(3)
    network.send("a", "b", 1)
    network.run(1.0)
    network.mute("a", "b", duration_s)
    for number in range(2, 6):
        network.send("a", "b", number)
    network.send("b", "a", "back")
    network.run(10.0)
    assert [message for _, message in there.seen] == [1, 2, 3, 4, 5]
    assert all(at_s >= 1.0 + duration_s for at_s in there.at_s[1:])
    assert here.at_s[0] < 1.0 + duration_s, "the other direction is not silent"


def test_a_longer_one_ends_the_connection_for_both() -> None:
    network, here, there = pair(3)
    network.send("a", "b", 1)
    network.run(1.0)
    network.mute("a", "b", DEADLINE_S + 3.0)
    network.run(1.0 + DEADLINE_S - 0.01)
    assert ("a", "lost") not in there.seen
    network.run(1.0 + DEADLINE_S + 0.1)
    assert ("a", "lost") in there.seen
    assert ("b", "lost") in here.seen


def test_who_meets_again_sooner_than_planned_is_reachable_from_then_on() -> None:
    network, _, there = pair(3)
    network.cut("a", "b", 100.0)
    network.run(10.0)
    network.meet(0.0)
    network.send("a", "b", "hello")
    network.run(20.0)
    assert ("a", "hello") in there.seen
    assert network.reachable("a", "b", 10.0, 20.0)
    assert not network.reachable("a", "b", 9.0, 20.0)


def test_a_frozen_process_takes_what_came_meanwhile_when_it_wakes_up() -> None:
    network, _, there = pair(5)
    network.send("a", "b", 1)
    network.run(1.0)
    network.pause("b", 1.5)
    network.send("a", "b", 2)
    network.run(2.4)
    assert [message for _, message in there.seen] == [1]
    network.run(3.0)
    assert [message for _, message in there.seen] == [1, 2]


def test_nothing_of_a_process_runs_after_its_crash() -> None:
    network, _, there = pair(7)
    network.on_host("b", 2.0, there.deliver, "b", "too late")
    network.send("a", "b", 1)
    network.crash("b")
    again = Host(network, "b")
    network.run(5.0)
    assert there.seen == []
    assert again.seen == []


def test_a_seed_is_the_same_run_each_time() -> None:
    def trace(seed: int) -> list[object]:
        network, _, _ = pair(seed, Manners(loss_rate=0.1, repeat_rate=0.1, slow_rate=0.1, slow_s=0.3, in_order=False))
        network.trace = []
        for number in range(100):
            network.at(number * 0.1, network.send, "ab"[number % 2], "ba"[number % 2], number)
        network.run(30.0)
        return list(network.trace)

    assert trace(11) == trace(11)
    assert trace(11) != trace(12)


def test_a_storm_of_messages_ends() -> None:
    kernel = Kernel(0)

    def again() -> None:
        kernel.after(1e-9, again)

    again()
    with pytest.raises(Broken, match="storm"):
        kernel.run(1e9)
    assert kernel.num_events == MAX_EVENTS + 1


def test_a_disk_loses_what_was_not_synced_with_the_power_and_nothing_with_the_process() -> None:
    disk = Disk()
    disk.write("journal", 1)
    disk.sync()
    disk.write("client.state", 2)
    assert disk.read("client.state") == 2
    disk.lose_power()
    assert disk.read("client.state") is None
    assert disk.read("journal") == 1


@pytest.mark.parametrize("silently", [False, True])
def test_what_a_process_has_sent_before_it_is_killed_mostly_arrives_and_before_the_end_of_the_connection(
    silently: bool,
) -> None:
    seen: list[list[tuple[str, object]]] = []
    for seed in range(50):
        network, _, there = pair(seed)
        network.send("a", "b", 0)
        network.run(1.0)
        network.send("a", "b", "last word")
        network.crash("a", silently=silently)
        network.run(9.0)
        seen.append(there.seen[1:])
    assert [("a", "last word"), ("a", "lost")] in seen
    assert all(words in ([("a", "last word"), ("a", "lost")], [("a", "lost")]) for words in seen)
    assert seen.count([("a", "lost")]) < 40
