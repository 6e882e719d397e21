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
from dataclasses import dataclass
from typing import NamedTuple

FLOOR = 0.1
"""The least share, as a part of the even one."""
_RECENT_S = 5.0  # a request counts as demand for about so long
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
    _recent: float = 0.0

    def count_request(self, now: float) -> None:
        """Count a request, whether it is let in or not."""
        self._recent = self._left(now) + 1.0
        self.at = now

    def demand(self, now: float) -> float:
        """Requests that came lately, and those that run."""
        return self._left(now) + self.running

    def idle(self, now: float) -> bool:
        """Whether nobody has asked for a while."""
        return not self.running and now - self.at > _IDLE_S

    def _left(self, now: float) -> float:
        return self._recent * math.exp((self.at - now) / _RECENT_S)


@dataclass(slots=True)
class _Peer:
    received_s: float
    claims: Mapping[Subject, ShareClaim]


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
        self._own: dict[Subject, LimitShare] = {}
        self._peers: dict[str, _Peer] = {}

    def share_of(self, subject: Subject, now: float) -> LimitShare:
        """What this gateway has of a subject; at first the even share, in a new one the least."""
        own = self._own.get(subject)
        if own is None:
            share = self.even() if self.settled_s(now) else self.least()
            own = self._own[subject] = LimitShare(share, share, now)
        return own

    def even(self) -> float:
        """The share of each gateway where none asks for more than another."""
        return 1 / max(self._gateways, 1 + len(self._peers))

    def least(self) -> float:
        """What a new gateway begins with."""
        return FLOOR / self._gateways

    def settled_s(self, now: float) -> float:
        """How long this gateway has had shares that are more than a beginning; 0: it has not.

        It has when it has agreed with the others, or when that takes too long.
        """
        doubted = self._started + DOUBT_S
        since = doubted if self._agreed is None else min(self._agreed, doubted)
        return max(0.0, now - since)

    def claim(self, now: float) -> GatewayClaims:
        """Begin a round: claim what this gateway should have."""
        self._forget(now)
        for subject, own in self._own.items():
            own.claimed = max(own.share, self._target(subject, own, now))
        return self._own_claims(now)

    def answer(self, received: GatewayClaims, now: float) -> GatewayClaims:
        """What another gateway is told that begins a round with this statement."""
        self._receive(received, now)
        return self._own_claims(now)

    def agree(self, answers: Iterable[GatewayClaims], *, complete: bool, now: float) -> None:
        """End a round. complete: everyone answered who may be there; else all shares stay."""
        for answer in answers:
            self._receive(answer, now)
        if complete and self._agreed is None:
            self._agreed = now
        for subject, own in self._own.items():
            if complete:
                target = min(own.claimed, self._target(subject, own, now))
                others = sum(claim.share for claim in self._claims_of_peers(subject))
                own.share = min(target, max(own.share, 1 - others))
            elif self._agreed is None and self.settled_s(now):
                own.share = max(own.share, self.even())
            own.claimed = own.share
            own.others_run = sum(claim.running for claim in self._claims_of_peers(subject))

    def _target(self, subject: Subject, own: LimitShare, now: float) -> float:
        """What demand gives this gateway: never less than FLOOR of the even share."""
        demand = own.demand(now)
        total = demand + sum(claim.demand for claim in self._claims_of_peers(subject))
        count = 1 + len(self._peers)
        grace = _GRACE + total * FLOOR / (1 - FLOOR) / count
        return (demand + grace) / (total + count * grace)

    def _claims_of_peers(self, subject: Subject) -> Iterable[ShareClaim]:
        """What each peer said last; one that said nothing may have the even share."""
        default = ShareClaim(0.0, self.even(), 0)
        return (peer.claims.get(subject, default) for peer in self._peers.values())

    def _receive(self, claims: GatewayClaims, now: float) -> None:
        if claims.gateway == self._name:
            return
        self._peers[claims.gateway] = _Peer(now, claims.claims)
        for subject in claims.claims:
            self.share_of(subject, now)

    def _own_claims(self, now: float) -> GatewayClaims:
        claims = {
            subject: ShareClaim(own.demand(now), own.claimed, own.running)
            for subject, own in self._own.items()
        }
        return GatewayClaims(self._name, claims)

    def _forget(self, now: float) -> None:
        """Peers that are gone, and subjects that nobody asks for, whose shares are even."""
        gone = [name for name, peer in self._peers.items() if now - peer.received_s > GONE_S]
        for name in gone:
            del self._peers[name]
        even = self.even()
        idle = [
            subject
            for subject, own in self._own.items()
            if own.idle(now)
            and own.share >= even - _EXACT
            and all(claim.demand < _EXACT for claim in self._claims_of_peers(subject))
        ]
        for subject in idle:
            del self._own[subject]
