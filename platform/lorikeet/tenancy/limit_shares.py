"""Which part of a tenant's limits this gateway enforces: agreed with the other gateways.

A share follows demand, and the shares of one limit never add up to more than the whole, however
late answers are: a gateway first makes known what it claims, then asks the others what they claim,
and takes only what they leave. Of two that claim the same at once at least one sees the other's
claim (as in Dekker's mutual exclusion: raise the flag, then look). Shares fall at once.

What may add to the whole: a gateway that has not agreed with anybody yet has a small share that
the others do not know of, and one that nobody answers takes the even share after a while. A
gateway that is silent, but not known to be gone, keeps its part: the others only hold theirs.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

FLOOR = 0.1
"""The least share, as a part of the even one."""
_LATELY_S = 5.0  # a request counts as demand for about so long
_GRACE = 5.0  # requests that every gateway is taken to have: few requests do not move shares
GONE_S = 5.0
"""A gateway that was not heard for so long, and is not among those asked, is gone."""
DOUBT_S = 10.0
"""After so long without an agreement a new gateway takes the even share."""
_IDLE_S = 120.0  # then demand has faded to nothing, and shares are even
_EXACT = 1e-9


class Subject(NamedTuple):
    """Who has limits: a key of a tenant; with key_id None the tenant, all its keys together."""

    tenant: str
    key_id: str | None = None


class ShareClaim(NamedTuple):
    """What a gateway says of a subject: demand, the share it claims, requests that run."""

    demand: float
    share: float
    running: int


@dataclass(frozen=True, slots=True)
class GatewayClaims:
    """What one gateway says to another. gateway: its name, new at every start."""

    gateway: str
    claims: Mapping[Subject, ShareClaim]


@dataclass(slots=True)
class LimitShare:
    """What one gateway has of one subject. running: requests; others_run: in other gateways."""

    share: float
    claimed: float
    at: float
    running: int = 0
    others_run: int = 0
    _lately: float = 0.0

    def asked(self, now: float) -> None:
        """Count a request, whether it is let in or not."""
        self._lately = self._left(now) + 1.0
        self.at = now

    def demand(self, now: float) -> float:
        """Requests that came lately, and those that run."""
        return self._left(now) + self.running

    def idle(self, now: float) -> bool:
        """Whether nobody has asked for a while."""
        return not self.running and now - self.at > _IDLE_S

    def _left(self, now: float) -> float:
        return self._lately * math.exp((self.at - now) / _LATELY_S)


@dataclass(slots=True)
class _Peer:
    heard: float
    claims: Mapping[Subject, ShareClaim] = field(default_factory=dict)


class LimitShares:
    """One gateway's end of the agreement. For one event loop; `now` is in seconds.

    gateways: how many there should be. A round is `claim`, asking everyone with it, then `agree`
    with the answers; rounds of one gateway do not overlap.
    """

    def __init__(self, name: str, gateways: int, now: float) -> None:
        self._name = name
        self._gateways = gateways
        self._started = now
        self._agreed: float | None = None
        self._parts: dict[Subject, LimitShare] = {}
        self._peers: dict[str, _Peer] = {}

    def part(self, subject: Subject, now: float) -> LimitShare:
        """What this gateway has of a subject; at first the even share, in a new one the least."""
        part = self._parts.get(subject)
        if part is None:
            share = self.even() if self.settled_s(now) else self.least()
            part = self._parts[subject] = LimitShare(share, share, now)
        return part

    def even(self) -> float:
        """The share of each gateway where none asks for more than another."""
        return 1 / max(self._gateways, 1 + len(self._peers))

    def least(self) -> float:
        """What a new gateway begins with."""
        return FLOOR / self._gateways

    def settled_s(self, now: float) -> float:
        """For how long this gateway has had shares that are more than a beginning; 0: it has not.

        It has when it has agreed with the others, or when that takes too long.
        """
        doubted = self._started + DOUBT_S
        since = doubted if self._agreed is None else min(self._agreed, doubted)
        return max(0.0, now - since)

    def claim(self, now: float) -> GatewayClaims:
        """Begin a round: claim what this gateway should have."""
        self._forget(now)
        for subject, part in self._parts.items():
            part.claimed = max(part.share, self._target(subject, part, now))
        return self._statement(now)

    def answer(self, asked: GatewayClaims, now: float) -> GatewayClaims:
        """What another gateway is told that begins a round with this statement."""
        self._hear(asked, now)
        return self._statement(now)

    def agree(self, answers: Iterable[GatewayClaims], *, complete: bool, now: float) -> None:
        """End a round. complete: everyone answered who may be there; else all shares stay."""
        for answer in answers:
            self._hear(answer, now)
        if complete and self._agreed is None:
            self._agreed = now
        for subject, part in self._parts.items():
            if complete:
                target = min(part.claimed, self._target(subject, part, now))
                others = sum(claim.share for claim in self._said(subject))
                part.share = min(target, max(part.share, 1 - others))
            elif self._agreed is None and self.settled_s(now):
                part.share = max(part.share, self.even())
            part.claimed = part.share
            part.others_run = sum(claim.running for claim in self._said(subject))

    def _target(self, subject: Subject, part: LimitShare, now: float) -> float:
        """What demand gives this gateway: never less than FLOOR of the even share."""
        demand = part.demand(now)
        total = demand + sum(claim.demand for claim in self._said(subject))
        count = 1 + len(self._peers)
        grace = _GRACE + total * FLOOR / (1 - FLOOR) / count
        return (demand + grace) / (total + count * grace)

    def _said(self, subject: Subject) -> Iterable[ShareClaim]:
        """What each peer said last; one that said nothing may have the even share."""
        unsaid = ShareClaim(0.0, self.even(), 0)
        return (peer.claims.get(subject, unsaid) for peer in self._peers.values())

    def _hear(self, said: GatewayClaims, now: float) -> None:
        if said.gateway == self._name:
            return
        self._peers[said.gateway] = _Peer(now, said.claims)
        for subject in said.claims:
            self.part(subject, now)

    def _statement(self, now: float) -> GatewayClaims:
        claims = {
            subject: ShareClaim(part.demand(now), part.claimed, part.running)
            for subject, part in self._parts.items()
        }
        return GatewayClaims(self._name, claims)

    def _forget(self, now: float) -> None:
        """Peers that are gone, and subjects that nobody asks for, whose shares are even."""
        gone = [name for name, peer in self._peers.items() if now - peer.heard > GONE_S]
        for name in gone:
            del self._peers[name]
        even = self.even()
        idle = [
            subject
            for subject, part in self._parts.items()
            if part.idle(now)
            and part.share >= even - _EXACT
            and all(claim.demand < _EXACT for claim in self._said(subject))
        ]
        for subject in idle:
            del self._parts[subject]
