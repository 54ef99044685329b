"""What is said of a role that has ended is true of every role."""

from __future__ import annotations

from shoal.events.processes import RoleLost


def test_of_a_server_that_is_lost_nobody_says_that_the_swarm_goes_on() -> None:
    assert RoleLost("server 0@box", "1", "no memory").say() == (
        "server 0@box has ended (no memory); it is not started again"
    )
    assert RoleLost("trainer 1", "1", "killed").say() == (
        "trainer 1 has ended (killed); its client replaces it, unless it was lost too often"
    )
    assert RoleLost("monitor 0", "1", "killed").say() == "monitor 0 has ended (killed); the swarm goes on without it"
