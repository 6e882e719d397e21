"""Shares of limits that this gateway enforces, agreed with the other gateways.

A share follows demand. The shares of one limit never add up to more than 1, however late answers
are: a gateway first announces its claim, then asks the others for their claims, and takes only the
remainder. If two gateways claim the same part at once, at least one sees the other's claim (as in
Dekker's mutual exclusion: raise the flag, then look). Shares fall at once.

The shares may add up to more than 1 in two cases: a gateway that has not agreed with any other yet
has a small share, and a gateway that gets no answers takes an equal share after a while.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

FLOOR = 0.1
"""Smallest share of a gateway, as a fraction of an equal share (1/N for N gateways)."""
_RECENT_S = 5.0  # time constant with which a request fades from demand
_GRACE = 5.0  # requests added to every gateway's demand, so that few requests do not move shares
GONE_S = 5.0
"""Seconds without a message from another gateway after which its claims are dropped.

A gateway that this gateway still asks, but that does not answer, keeps its share: without its
answer this gateway's shares stay as they are (`agree`).
"""
DOUBT_S = 10.0
"""Seconds after which a new gateway takes an equal share (1/N), if it could not agree on shares
with the other gateways.
"""
_IDLE_S = 120.0  # by then demand has faded to nothing, and shares are even
_EXACT = 1e-9


class Subject(NamedTuple):
    """Subject of limits: a key of a tenant, or the whole tenant if key_id is None."""

    tenant: str
    key_id: str | None = None


class ShareClaim(NamedTuple):
    """A gateway's demand for the limits of one tenant or key, and its claim to a share of the
    limits.

    demand: number of the gateway's running requests, plus a decayed count of its recent requests.
    share: fraction of the limits that the gateway claims.
    running: number of the gateway's running requests.
    """

    demand: float
    share: float
    running: int


@dataclass(frozen=True, slots=True)
class GatewayClaims:
    """Message of one gateway to another: its claims to shares of limits.

    gateway: sender's name, new at every start.
    claims: claim to the limits of each tenant or key.
    """

    gateway: str
    claims: Mapping[Subject, ShareClaim]


@dataclass(slots=True)
class LimitShare:
    """One gateway's share of the limits of one tenant or key.

    share: fraction of each limit that the gateway enforces.
    claimed: fraction that the gateway claims in the present exchange of claims between gateways.
    at: time of the last request, in seconds.
    running: number of running requests in this gateway.
    others_run: number of running requests in the other gateways.
    """

    share: float
    claimed: float
    at: float
    running: int = 0
    others_run: int = 0
    _recent: float = 0.0

    def count_request(self, now: float) -> None:
        """Count a request as demand, admitted or not."""
        self._recent = self._left(now) + 1.0
        self.at = now

    def demand(self, now: float) -> float:
        """Return this gateway's demand: recent requests, decayed, plus running ones."""
        return self._left(now) + self.running

    def idle(self, now: float) -> bool:
        """Whether no request runs in this gateway, and none has arrived for _IDLE_S seconds."""
        return not self.running and now - self.at > _IDLE_S

    def _left(self, now: float) -> float:
        return self._recent * math.exp((self.at - now) / _RECENT_S)


@dataclass(slots=True)
class _Peer:
    received_s: float
    claims: Mapping[Subject, ShareClaim]


class LimitShares:
    """One gateway's shares of the limits of all tenants and keys. Single event loop.

    A round is `claim`, sending the claims to every other gateway, then `agree` with the answers.
    Rounds of one gateway do not overlap. Every `now` is in seconds.

    name: this gateway's name, new at every start.
    gateways: configured number of gateways.
    """

    def __init__(self, name: str, gateways: int, now: float) -> None:
        self._name = name
        self._gateways = gateways
        self._started = now
        self._agreed: float | None = None
        self._own: dict[Subject, LimitShare] = {}
        self._running = Counter[Subject]()  # of subjects without limits too: one may get a limit
        self._peers: dict[str, _Peer] = {}

    def share_of(self, subject: Subject, now: float) -> LimitShare:
        """Return the share of a subject's limits.

        A new subject starts with an equal share: 1/N for N gateways. In a gateway that has not yet
        agreed with the others, a new subject starts with the least share, FLOOR / N.
        """
        own = self._own.get(subject)
        if own is None:
            share = self.even() if self.settled_s(now) else self.least()
            own = self._own[subject] = LimitShare(share, share, now, self._running[subject])
        return own

    def begin(self, subject: Subject) -> None:
        """Count a running request. The subject may have no limits."""
        self._count_running(subject, 1)

    def end(self, subject: Subject) -> None:
        """Count a running request of a subject as ended."""
        self._count_running(subject, -1)

    def _count_running(self, subject: Subject, change: int) -> None:
        self._running[subject] += change
        own = self._own.get(subject)
        if own is not None:
            own.running = self._running[subject]
        if not self._running[subject]:
            del self._running[subject]

    def even(self) -> float:
        """Return the equal share per gateway: 1/N, where N is the configured number of gateways, or
        the number of known ones if it is larger.
        """
        return 1 / max(self._gateways, 1 + len(self._peers))

    def least(self) -> float:
        """Return the initial share of a limit in a gateway that has not agreed with the others yet:
        FLOOR / N.
        """
        return FLOOR / self._gateways

    def settled_s(self, now: float) -> float:
        """Return the seconds for which this gateway has had its regular shares, 0 at first.

        The regular shares begin when this gateway first agrees on shares with the other gateways,
        or DOUBT_S seconds after its start, whichever is first.
        """
        doubted = self._started + DOUBT_S
        since = doubted if self._agreed is None else min(self._agreed, doubted)
        return max(0.0, now - since)

    def claim(self, now: float) -> GatewayClaims:
        """Begin an exchange of claims with the other gateways: return this gateway's claims.

        A claim is the share that the gateway's demand justifies, or its present share if that is
        larger.
        """
        self._forget(now)
        for subject, own in self._own.items():
            own.claimed = max(own.share, self._target(subject, own, now))
        return self._own_claims(now)

    def answer(self, received: GatewayClaims, now: float) -> GatewayClaims:
        """Record the claims that another gateway sent to this one; return this gateway's claims."""
        self._receive(received, now)
        return self._own_claims(now)

    def agree(self, answers: Iterable[GatewayClaims], *, complete: bool, now: float) -> None:
        """Set this gateway's shares from the claims that the other gateways answered.

        complete: whether every gateway that may exist has answered. If not, shares stay as they
            are; but a gateway that has never agreed with the others takes an equal share after
            DOUBT_S seconds.
        """
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
        """Return the share of a subject's limits that corresponds to this gateway's part of all
        gateways' demand.

        The result is at least FLOOR times an equal share (1/N).

        own: this gateway's present share and demand.
        """
        demand = own.demand(now)
        total = demand + sum(claim.demand for claim in self._claims_of_peers(subject))
        count = 1 + len(self._peers)
        grace = _GRACE + total * FLOOR / (1 - FLOOR) / count
        return (demand + grace) / (total + count * grace)

    def _claims_of_peers(self, subject: Subject) -> Iterable[ShareClaim]:
        """Yield the last claim of each other gateway.

        A gateway without a claim is assumed to have an equal share, 1/N.
        """
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
        """Drop the claims of gateways that sent none for GONE_S seconds, and subjects that are idle
        in all gateways and whose share is at least an equal share, 1/N.
        """
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
