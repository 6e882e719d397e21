"""How a service's requests fare: its last minutes as lines, and who waits now.

Each gateway counts its own; whichever is asked adds up what all of them say.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lorikeet.api.explain import Explanations
from lorikeet.api.peers import Peers, Poll
from lorikeet.api.recent import (
    CAME,
    FAILED,
    HIT,
    LOOKED,
    REFUSED,
    SPAN_S,
    WINDOW_S,
    Recent,
    Second,
    quantile_s,
)
from lorikeet.errors import Unavailable

_QUESTION = "pulse"

Lines = Mapping[str, Sequence[float | None]]
"""A value for each of SPAN_S seconds, by what it is; None where there is none."""


class Waiting(NamedTuple):
    """Requests of one tenant for one adapter, None for the base model alone, without a first token.

    oldest_s: how long the first of them has waited.
    """

    tenant: str
    base_model: str
    adapter: str | None
    requests: int
    oldest_s: float


class Word(NamedTuple):
    """What one gateway says."""

    seconds: Mapping[int, Second]
    waiting: Sequence[Waiting]


class Beat(NamedTuple):
    """What gateways say together. waiting: the longest first.

    silent: how many did not say anything; None where nobody could be asked.
    """

    words: Sequence[Word]
    silent: int | None


class Pulse:
    """One gateway's end. For one event loop."""

    def __init__(self, peers: Peers, recent: Recent, explanations: Explanations) -> None:
        self._peers, self._recent, self._explanations = peers, recent, explanations
        peers.answers(_QUESTION, self._answer)

    async def beat(self) -> Beat:
        """What all gateways say now."""
        own = await self._answer()
        try:
            others: Poll = await self._peers.poll(_QUESTION)
        except Unavailable:
            return Beat([own], None)
        return Beat([own, *others.answers], others.silent)

    async def _answer(self) -> Word:
        running = self._explanations.running()
        waits: dict[tuple[str, str, str | None], list[float]] = defaultdict(list)
        for record in running:
            if record.first_s is None and record.load_s is None:  # told with the first token
                adapter = str(record.adapter) if record.adapter else None
                at = record.tenant or "", record.base_model or "", adapter
                waits[at].append(record.until_s)
        waiting = [Waiting(*at, len(waited), max(waited)) for at, waited in waits.items()]
        return Word(self._recent.seconds(running), waiting)


def waiting_of(words: Sequence[Word]) -> list[Waiting]:
    """Of all gateways, who has waited longest first."""
    together: dict[tuple[str, str, str | None], Waiting] = {}
    for one in (each for word in words for each in word.waiting):
        other = together.get(one[:3])
        if other is not None:
            oldest_s = max(one.oldest_s, other.oldest_s)
            one = one._replace(requests=one.requests + other.requests, oldest_s=oldest_s)
        together[one[:3]] = one
    return sorted(together.values(), key=lambda one: -one.oldest_s)


def lines_of(words: Sequence[Word], now: float) -> Lines:
    """The last SPAN_S whole seconds before `now`, Unix seconds; each point of WINDOW_S of them.

    requests, refused, failed: a second. hit_rate: of requests with an adapter, whose adapter was on
    the GPU. ttft_p50_ms, ttft_p99_ms: time to first token.
    """
    seconds: defaultdict[int, Second] = defaultdict(Counter)
    for word in words:
        for at, second in word.seconds.items():
            seconds[at].update(second)
    lines: dict[str, list[float | None]] = defaultdict(list)
    window, until = Second(), int(now)
    begin = until - SPAN_S
    for at in range(begin - WINDOW_S + 1, until):
        window.update(seconds[at])
        if at < begin:
            continue
        for name, what in (("requests", CAME), ("refused", REFUSED), ("failed", FAILED)):
            lines[name].append(round(window[what] / WINDOW_S, 2))
        looked = window[LOOKED]
        lines["hit_rate"].append(round(window[HIT] / looked, 4) if looked else None)
        for name, share in (("ttft_p50_ms", 0.5), ("ttft_p99_ms", 0.99)):
            found_s = quantile_s(window, share)
            lines[name].append(None if found_s is None else round(1000 * found_s, 2))
        window.subtract(seconds[at - WINDOW_S + 1])
    return lines
