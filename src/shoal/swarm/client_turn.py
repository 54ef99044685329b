"""Which clients come before this one, and when it is its turn: a pure machine.

    announced -> dialled -> up ... lost -> dialled now and then --(PATIENCE_S, and announced by nobody)--> gone
                             ^                    |
                             '--------------------'   its launcher has started it again

    all before this one are gone --and--> the client that announced the run is one of them --------> its turn
                                    '---> hosts of servers announce it, and servers have no client --^

The client that trains comes first, then those that wait, in the order in which they have joined. That one is not
announced any more is no reason to take its place, for what others announce arrives in parts: the machine dials it, or
asks servers, which say over TLS whether they have a client.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.events.losses import ClientReplaced
from shoal.events.run import ClientWaits
from shoal.ids import PeerId
from shoal.swarm.view import Run, SwarmView
from shoal.wire.messages.base import Hop

PATIENCE_S = 1.0
"""A client that was killed alone is back sooner, unless its machine is busy; then it steps down."""
REDIAL_S = 0.2
ASK_AGAIN_S = 2.0
"""Of those who have answered, and it was not what is waited for."""
ANSWER_WITHIN_S = 10.0
"""A dial is given up after half of it."""


@dataclass(slots=True)
class _Ahead:
    """A client before this one; `since_s`: it cannot be reached since then, None: it can."""

    hop: Hop
    since_s: float | None
    dial_at_s: float
    is_announced: bool = True

    def is_gone(self, now_s: float) -> bool:
        return self.since_s is not None and not self.is_announced and self.since_s + PATIENCE_S <= now_s


@dataclass(frozen=True, slots=True)
class AskClient:
    """Dial this peer, and ask it which client its run has; a client also says when the run is over."""

    hop: Hop


@dataclass(frozen=True, slots=True)
class TakeTurn:
    """The run is this client's."""


TurnEffect = AskClient | ClientWaits | ClientReplaced | TakeTurn
TurnEffects = list[TurnEffect]


class ClientTurn:
    """The clients before this one, as far as it knows.

    Attributes:
        knows_run: whether somebody has announced the run; before, nothing is known.
        wake_at_s: when to `look` if no event comes before (monotonic), after each of which it is to be looked at.
    """

    def __init__(self, me: PeerId, run_id: str) -> None:
        self.knows_run = False
        self.wake_at_s = math.inf
        self._me, self._run_id = me, run_id
        self._ahead: dict[PeerId, _Ahead] = {}
        self._announcer: PeerId | None = None
        self._named: set[PeerId] = set()  # of those before this one, who the user has been told of
        # Of servers: which client each has said that it is connected with; who has not answered yet, and since when.
        self._told: dict[PeerId, PeerId | None] = {}
        self._asked: set[PeerId] = set()
        self._asked_at_s = -math.inf

    # -- events

    def up(self, peer: PeerId) -> None:
        """There is a connection."""
        if peer in self._ahead:
            self._ahead[peer].since_s = None

    def lost(self, peer: PeerId, now_s: float) -> None:
        """The connection has ended, or none could be made."""
        self._told.pop(peer, None)
        self._asked.discard(peer)
        if peer in self._ahead:
            each = self._ahead[peer]
            each.since_s = now_s if each.since_s is None else each.since_s
            each.dial_at_s = now_s + REDIAL_S

    def told(self, peer: PeerId, client: PeerId | None) -> None:
        """A peer has said which client it is connected with."""
        self._told[peer] = client
        self._asked.discard(peer)

    def look(self, view: SwarmView, now_s: float) -> TurnEffects:
        """Return what is to be done now. What a lost client has announced before its loss is not in the view."""
        run = view.run if view.run is not None and view.run.run_id == self._run_id else None
        self.knows_run |= run is not None
        self.wake_at_s = math.inf
        if not self.knows_run:
            return []
        self._hear(view, run, now_s)
        if self._is_first(now_s) and self._has_no_client(run, now_s):
            return [*self._replaced(view, now_s), TakeTurn()]
        asked = self._dial(now_s)
        if run is not None and run.kept:
            asked += self._ask_servers(view, now_s)
        news = [peer for peer, each in self._ahead.items() if each.since_s is None and peer not in self._named]
        self._named.update(news)
        waits = (ClientWaits(peer, view.name_of(peer), self._run_id) for peer in news)
        return [*(AskClient(hop) for hop in asked), *waits]

    # -- what is known

    def _hear(self, view: SwarmView, run: Run | None, now_s: float) -> None:
        """These are all that are announced now; one that was lost is among them if it has announced itself since."""
        by_peer = {client.peer: client for client in view.clients}
        mine = by_peer.get(self._me)
        for each in self._ahead.values():
            each.is_announced = False
        for peer, client in by_peer.items():
            if peer == self._me or (mine is not None and client.place > mine.place):
                self._ahead.pop(peer, None)
                continue
            known = self._ahead.setdefault(peer, _Ahead(client.hop, now_s, now_s))
            known.hop, known.is_announced = client.hop, True
        if run is not None and not run.kept and run.client != self._me:
            self._announcer = run.client

    def _is_first(self, now_s: float) -> bool:
        """Whether every client before this one that is known is gone."""
        return all(each.is_gone(now_s) for each in self._ahead.values())

    def _has_no_client(self, run: Run | None, now_s: float) -> bool:
        """Whether the run has no client, as far as anybody can know."""
        if run is not None and run.client == self._me:
            return True  # with its own word in the registry, an earlier start of this client has had its turn
        if run is not None and run.kept and self._told:
            # One that has lost its own link to the client answers as well, and may be the first to do so.
            if self._asked and now_s < self._asked_at_s + ANSWER_WITHIN_S:
                return False
            return all(client in (None, self._me) for client in self._told.values())
        announcer = None if self._announcer is None else self._ahead.get(self._announcer)
        return announcer is not None and announcer.is_gone(now_s)

    # -- what is done

    def _replaced(self, view: SwarmView, now_s: float) -> list[ClientReplaced]:
        """Say in whose place this client goes on, unless it was its own before."""
        lost = self._announcer
        if self._me in {None if view.run is None else view.run.client, *self._told.values()}:
            return []
        if lost is None:
            return [ClientReplaced(PeerId(""), "the client", 0.0, now_s, "")]
        each = self._ahead.get(lost)
        gone_s = 0.0 if each is None or each.since_s is None else now_s - each.since_s
        return [ClientReplaced(lost, view.name_of(lost, "client"), gone_s, now_s, view.host_of(lost))]

    def _dial(self, now_s: float) -> list[Hop]:
        """Those before this one that are to be dialled now; each is dialled again only when that has failed."""
        lost = [(each.since_s, each) for each in self._ahead.values() if each.since_s is not None]
        due = [each for _, each in lost if each.dial_at_s <= now_s]
        for each in due:
            each.dial_at_s = math.inf
        times = [each.dial_at_s for _, each in lost] + [since_s + PATIENCE_S for since_s, _ in lost]
        self.wake_at_s = min((time_s for time_s in times if time_s > now_s), default=math.inf)
        return [each.hop for each in due]

    def _ask_servers(self, view: SwarmView, now_s: float) -> list[Hop]:
        """The servers, now and then, while no client announces the run."""
        hops = [hop for hop in view.informed if hop.peer != self._me]
        if not hops:
            return []
        is_due = now_s >= self._asked_at_s + self._again_s
        if is_due:
            self._asked_at_s, self._asked = now_s, {hop.peer for hop in hops}
        self.wake_at_s = min(self.wake_at_s, self._asked_at_s + self._again_s)
        return hops if is_due else []

    @property
    def _again_s(self) -> float:
        """After which servers are asked again."""
        return ANSWER_WITHIN_S if self._asked else ASK_AGAIN_S
