"""Beginnings that prompts of an adapter share, such as its system prompt, learned from traffic.

Each replica finds them in its requests (`SharedPrefixes`). Once a minute the controller joins what
replicas have found, and lets replicas that have a version of the adapter on the GPU compute its
most frequent beginning (`LearnedPrompts`), as after a start of the replica or a push of the
version.

Tokens are in memory alone, and forgotten a day after the last request with them. Only requests of
the adapter's own tenant count, since no other tenant shares the pages, and only what two of them
share leaves the replica.
"""

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lorikeet.protocol.placement_decision import LearnedPrompt
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet_engine.adapter import Adapter, AdapterRef, Residency

_TOKEN_BYTES = 4
_SHORTEST = 256  # tokens; fewer are computed in milliseconds
_LONGEST = 8192
_MOST_PREFIXES = 4  # of an adapter
_FEWEST_REQUESTS = 8.0
_HALF_LIFE_S = 6 * 3600.0
_DAY_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Beginning of prompts of one adapter.

    tokens: token ids as int32.
    requests: number of these prompts, of which older ones count less.
    asked_s: time at which they were counted last.
    is_shared: whether several prompts have begun with it; only a prompt that begins with half of it
        or more then shortens it.
    """

    tokens: bytes
    requests: float
    asked_s: float
    is_shared: bool = False

    def at(self, now_s: float) -> float:
        """Return the number of requests as it counts now: half after 6 hours."""
        return self.requests * math.exp2((self.asked_s - now_s) / _HALF_LIFE_S)


Found = Mapping[tuple[str, str], Sequence[SharedPrefix]]
"""Shared prefixes by tenant and name of their adapter."""


class SharedPrefixes:
    """Finds the beginnings that prompts of each adapter share.

    A prompt shortens the prefix that it shares at least half of, and is else a prefix of its own,
    of which an adapter has four at most. The adapter without requests for longest is dropped first.
    """

    def __init__(self, adapters: int) -> None:
        """Begin without prefixes.

        adapters: maximum number of adapters; 0 finds nothing.
        """
        self._most = adapters
        self._found: dict[tuple[str, str], list[SharedPrefix]] = {}

    def count(
        self, adapter: Adapter | None, tenant: str, prompt: Sequence[int], now_s: float
    ) -> None:
        """Count a request's prompt, if its tenant owns the adapter.

        now_s: seconds of the caller's clock.
        """
        if not self._most or not isinstance(adapter, AdapterRef) or adapter.tenant != tenant:
            return
        if adapter.invocation_tokens or adapter.head or len(prompt) < _SHORTEST:
            return
        tokens = array("i", prompt[:_LONGEST]).tobytes()
        self.add((tenant, adapter.name), SharedPrefix(tokens, 1.0, now_s))

    def add(self, at: tuple[str, str], new: SharedPrefix) -> None:
        """Add a prompt, or what another process has found, for the adapter of a tenant and name."""
        prefixes, now_s = self._found.pop(at, []), new.asked_s
        if len(self._found) >= self._most:
            del self._found[next(iter(self._found))]
        self._found[at] = prefixes
        for number, old in enumerate(prefixes):
            shared = _shared(old.tokens, new.tokens)
            least = max(len(each.tokens) if each.is_shared else 0 for each in (old, new)) // 2
            if shared >= max(least, _SHORTEST * _TOKEN_BYTES):
                requests = old.at(now_s) + new.requests
                prefixes[number] = SharedPrefix(
                    old.tokens[:shared], requests, now_s, is_shared=True
                )
                return
        if len(prefixes) >= _MOST_PREFIXES:  # as Misra and Gries (1982) find frequent items
            weaker = [replace(each, requests=each.requests - new.requests) for each in prefixes]
            self._found[at] = prefixes = [each for each in weaker if each.requests > 0]
        if len(prefixes) < _MOST_PREFIXES:
            prefixes.append(new)

    def forget(self, before_s: float) -> None:
        """Drop prefixes that no prompt has begun with since a time."""
        kept = {
            at: [each for each in prefixes if each.asked_s >= before_s]
            for at, prefixes in self._found.items()
        }
        self._found = {at: prefixes for at, prefixes in kept.items() if prefixes}

    @property
    def found(self) -> Found:
        """Prefixes that at least two prompts share."""
        return {
            at: [each for each in prefixes if each.requests > 1]
            for at, prefixes in self._found.items()
        }

    def take(self, now_s: float) -> Found:
        """Return the prefixes that at least two prompts share, with the number of further prompts
        since the last call; forget those that no prompt has begun with for a day.
        """
        self.forget(now_s - _DAY_S)
        found = self.found
        for at, prefixes in found.items():
            others = [each for each in self._found[at] if each.requests <= 1]
            self._found[at] = others + [replace(each, requests=1.0) for each in prefixes]
        return {
            at: [replace(each, requests=each.requests - 1) for each in prefixes]
            for at, prefixes in found.items()
            if prefixes
        }


class LearnedPrompts:
    """Prompts that replicas of one base model should compute before users ask."""

    def __init__(self, adapters: int) -> None:
        """Begin without prompts.

        adapters: maximum number of adapters with prompts.
        """
        self._prefixes = SharedPrefixes(adapters)

    def add(self, found: Found, now_s: float) -> None:
        """Add what a replica has found; forget what nobody has asked for a day.

        now_s: seconds of the caller's clock.
        """
        self._prefixes.forget(now_s - _DAY_S)
        for at, prefixes in found.items():
            for each in prefixes:
                often = each.requests > 1
                self._prefixes.add(at, replace(each, asked_s=now_s, is_shared=often))

    def wanted(
        self, reports: Iterable[ReplicaReport], now_s: float
    ) -> dict[str, tuple[LearnedPrompt, ...]]:
        """Return, by replica, the most frequent prefix of each adapter on its GPU."""
        prompts = dict[tuple[str, str], bytes]()
        for at, prefixes in self._prefixes.found.items():
            often = max(prefixes, key=lambda each: each.at(now_s), default=None)
            if often is not None and often.at(now_s) >= _FEWEST_REQUESTS:
                prompts[at] = often.tokens
        if not prompts:
            return {}
        return {
            report.replica: tuple(
                LearnedPrompt(ref, prompts[ref.tenant, ref.name])
                for ref in sorted(_on_gpu(report), key=lambda ref: ref.digest)
                if (ref.tenant, ref.name) in prompts
            )
            for report in reports
        }


def _on_gpu(report: ReplicaReport) -> Iterator[AdapterRef]:
    for each in report.adapters:
        if each.residency is Residency.GPU and not each.arriving:
            yield each.ref


def _shared(one: bytes, other: bytes) -> int:
    """Return the number of leading bytes of whole tokens that both have, by bisection."""
    low, high = 0, min(len(one), len(other)) // _TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        part = slice(low * _TOKEN_BYTES, middle * _TOKEN_BYTES)
        low, high = (middle, high) if one[part] == other[part] else (low, middle - 1)
    return low * _TOKEN_BYTES
