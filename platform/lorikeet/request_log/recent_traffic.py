"""Recent traffic for the page at /ui: time series of the last minutes, and waiting requests.

Each gateway counts its own requests by second.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from lorikeet.protocol.peers import Peers, Poll
from lorikeet.request_log.record import RequestRecord
from lorikeet.request_log.request_log import RequestLog
from lorikeet_engine.adapter import Residency

SPAN_S = 180
"""Seconds of recent traffic that the page at /ui shows."""
WINDOW_S = 5
"""Seconds that each point covers: a single second has too few requests for quantiles."""

RECEIVED, REFUSED, FAILED, LOOKUPS, HITS = "received", "refused", "failed", "lookups", "hits"
Second = Counter[str | int]
"""Counts of one second: events by name, and times to first token by bucket number."""
Lines = Mapping[str, Sequence[float | None]]
"""Time series by name: SPAN_S values, one for each second; None for an unknown value."""

_QUESTION = "traffic"
_MIN_S = 1e-4
_PER_OCTAVE = 8  # buckets an octave: quantiles are accurate to 5%


class WaitingRequest(NamedTuple):
    """Requests of one tenant for one adapter that wait for their first token.

    adapter: None for the base model alone.
    requests: number of requests.
    oldest_s: seconds that the oldest has waited.
    """

    tenant: str
    base_model: str
    adapter: str | None
    requests: int
    oldest_s: float


class GatewayTraffic(NamedTuple):
    """Traffic of one gateway.

    seconds: for each recent Unix second, the counts of its events (requests received, refused and
        failed, adapter lookups and GPU hits) and of times to first token, by bucket.
    waiting: requests that wait for their first token now.
    """

    seconds: Mapping[int, Second]
    waiting: Sequence[WaitingRequest]


class RecentTraffic:
    """Counts of one gateway's events in each of the last SPAN_S + WINDOW_S seconds.

    For one event loop.

    peers: asks the other gateways for their counts, and answers theirs.
    request_log: has this gateway's running requests.
    """

    def __init__(self, peers: Peers, request_log: RequestLog) -> None:
        self._peers, self._request_log = peers, request_log
        self._seconds: defaultdict[int, Second] = defaultdict(Counter)
        peers.register(_QUESTION, self._answer)

    def ended(self, record: RequestRecord) -> None:
        """Count an ended request."""
        _count(record, self._seconds)
        if len(self._seconds) > 2 * (SPAN_S + WINDOW_S):
            since = time.time() - SPAN_S - WINDOW_S
            for at in [at for at in self._seconds if at < since]:
                del self._seconds[at]

    async def everywhere(self) -> Poll:
        """Return the recent traffic of all gateways, a GatewayTraffic from each."""
        return await self._peers.ask(_QUESTION)

    async def _answer(self) -> GatewayTraffic:
        running = self._request_log.running()
        waits: dict[tuple[str, str, str | None], list[float]] = defaultdict(list)
        for record in running:
            # load_s is set with the first token
            if record.first_byte_s is None and record.load_s is None:
                adapter = str(record.adapter) if record.adapter else None
                at = record.tenant or "", record.base_model or "", adapter
                waits[at].append(record.until_s)
        waiting = [WaitingRequest(*at, len(waited), max(waited)) for at, waited in waits.items()]
        return GatewayTraffic(self._recent(running), waiting)

    def _recent(self, running: Iterable[RequestRecord]) -> dict[int, Second]:
        """Return the numbers of events (arrivals, first tokens, ends …) of each Unix second.

        They cover the last SPAN_S + WINDOW_S seconds.

        running: requests that have not ended, whose events so far are counted too.
        """
        since = time.time() - SPAN_S - WINDOW_S
        seconds = defaultdict(Counter, {t: s.copy() for t, s in self._seconds.items() if t > since})
        for record in running:
            _count(record, seconds)
        return dict(seconds)


def waiting_of(gateways: Sequence[GatewayTraffic]) -> list[WaitingRequest]:
    """Return the waiting requests of all gateways, the longest wait first."""
    together: dict[tuple[str, str, str | None], WaitingRequest] = {}
    for one in (each for gateway in gateways for each in gateway.waiting):
        other = together.get(one[:3])
        if other is not None:
            oldest_s = max(one.oldest_s, other.oldest_s)
            one = one._replace(requests=one.requests + other.requests, oldest_s=oldest_s)
        together[one[:3]] = one
    return sorted(together.values(), key=lambda one: -one.oldest_s)


def lines_of(gateways: Sequence[GatewayTraffic], now: float) -> Lines:
    """Return the time series of the last SPAN_S whole seconds before `now` (Unix).

    Each point covers the WINDOW_S seconds up to it.

    requests, refused, failed: mean number of requests per second.
    hit_rate: of the accepted requests with an adapter, the share that found it on the GPU.
    ttft_p50_ms, ttft_p99_ms: median and 99th percentile of the time to first token.
    """
    seconds: defaultdict[int, Second] = defaultdict(Counter)
    for one in gateways:
        for at, second in one.seconds.items():
            seconds[at].update(second)
    lines: dict[str, list[float | None]] = defaultdict(list)
    window, until = Second(), int(now)
    begin = until - SPAN_S
    for at in range(begin - WINDOW_S + 1, until):
        window.update(seconds[at])
        if at < begin:
            continue
        for name, what in (("requests", RECEIVED), ("refused", REFUSED), ("failed", FAILED)):
            lines[name].append(round(window[what] / WINDOW_S, 2))
        lookups = window[LOOKUPS]
        lines["hit_rate"].append(round(window[HITS] / lookups, 4) if lookups else None)
        for name, share in (("ttft_p50_ms", 0.5), ("ttft_p99_ms", 0.99)):
            accepted_s = _quantile_s(window, share)
            lines[name].append(None if accepted_s is None else round(1000 * accepted_s, 2))
        window.subtract(seconds[at - WINDOW_S + 1])
    return lines


def _quantile_s(second: Second, share: float) -> float | None:
    """Return a quantile of the times to first token, seconds; None if there are none.

    second: counts of the events of one or several seconds.
    share: fraction of the times at or below the quantile.
    """
    buckets = sorted((at, times) for at, times in second.items() if isinstance(at, int) and times)
    left = share * sum(times for _, times in buckets)
    for bucket, times in buckets:
        left -= times
        if left <= 0:
            return _MIN_S * math.exp2((bucket - 0.5) / _PER_OCTAVE)
    return None


def _count(record: RequestRecord, seconds: defaultdict[int, Second]) -> None:
    """Count each event of a request in the second of the event."""

    def happened(after_s: float, what: str | int) -> None:
        seconds[int(record.received + after_s)][what] += 1

    happened(0.0, RECEIVED)
    end = record.outcome
    if end in (REFUSED, FAILED):
        happened(record.until_s, end)
    if record.residency is not None and record.accepted_s is not None:
        happened(record.accepted_s, LOOKUPS)
        if record.residency is Residency.GPU:
            happened(record.accepted_s, HITS)
    if (first_s := record.first_token_s) is not None:
        happened(first_s, _bucket(first_s))


def _bucket(duration_s: float) -> int:
    return math.ceil(_PER_OCTAVE * math.log2(max(duration_s, _MIN_S) / _MIN_S))
