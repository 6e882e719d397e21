"""What is counted, for whom, and what of it a process has not written yet."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from threading import Lock
from typing import NamedTuple, TypeVar

K = TypeVar("K")


class UsageAccount(NamedTuple):
    """Whose use it is, and of what. adapter: tenant/name, None for the base model alone."""

    tenant: str
    base_model: str
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class UsageCounts:
    """Sums. requests: that a replica took. cached_tokens: of the prompts', found computed.

    slot_s: the adapter's slot on some GPU was leased for the tenant's requests; leases of the same
    time on one replica count once, and tenants who share an adapter share the time. loads,
    load_bytes: onto a GPU, because the tenant's requests asked for the adapter. pushes,
    pushed_bytes: versions of the adapter that a gateway has checked and taken.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    slot_s: float = 0.0
    loads: int = 0
    load_bytes: int = 0
    pushes: int = 0
    pushed_bytes: int = 0

    def __add__(self, more: "UsageCounts") -> "UsageCounts":
        return UsageCounts(
            self.requests + more.requests,
            self.prompt_tokens + more.prompt_tokens,
            self.cached_tokens + more.cached_tokens,
            self.output_tokens + more.output_tokens,
            self.slot_s + more.slot_s,
            self.loads + more.loads,
            self.load_bytes + more.load_bytes,
            self.pushes + more.pushes,
            self.pushed_bytes + more.pushed_bytes,
        )

    @property
    def tokens(self) -> int:
        """Prompt and output."""
        return self.prompt_tokens + self.output_tokens


NOTHING = UsageCounts()

UsageByAccount = Mapping[UsageAccount, UsageCounts]
"""What was used, by account."""


class UsageLedger:
    """What one process has counted and not written yet: sums by day and account.

    For any thread. clock: Unix seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = Lock()
        self._days: dict[date, dict[UsageAccount, UsageCounts]] = {}

    def add(self, account: UsageAccount, counts: UsageCounts) -> None:
        """Add what was used now."""
        day = day_of(self._clock())
        with self._lock:
            add_to(self._days.setdefault(day, {}), account, counts)

    def take(self) -> dict[date, UsageByAccount]:
        """Everything since the call before."""
        with self._lock:
            taken, self._days = self._days, {}
        return dict(taken)


def add_to(sums: dict[K, UsageCounts], key: K, counts: UsageCounts) -> None:
    """Add counts to those of this key."""
    sums[key] = sums.get(key, NOTHING) + counts


def day_of(unix_s: float) -> date:
    """The day of this time, which begins at midnight UTC."""
    return datetime.fromtimestamp(unix_s, UTC).date()
