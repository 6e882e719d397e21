"""Usage counts, the accounts they belong to, and a process's ledger of unwritten counts."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, date, datetime
from operator import add, attrgetter
from threading import Lock
from typing import NamedTuple, TypeVar

from lorikeet_engine.adapter import Adapter

K = TypeVar("K")


class UsageAccount(NamedTuple):
    """Account of usage: a tenant and the model that it used.

    adapter: tenant/name, joined by + for a composition (several adapters applied together). Slot
        time and loads are in the accounts of its single adapters. None for the base model alone.
    """

    tenant: str
    base_model: str
    adapter: str | None = None

    @classmethod
    def of(cls, tenant: str, base_model: str, adapter: Adapter | None) -> "UsageAccount":
        """Return the account of a tenant's requests with an adapter.

        adapter: None for the base model alone.
        """
        names = [f"{member.tenant}/{member.name}" for member in adapter.members] if adapter else []
        return cls(tenant, base_model, "+".join(sorted(names)) or None)


@dataclass(frozen=True, slots=True)
class UsageCounts:
    """Sums of usage.

    requests: requests that a replica accepted.
    cached_tokens: prompt tokens found in the prefix cache.
    slot_s: seconds for which requests of the tenant kept the adapter's slot on a GPU (a lease).
        Concurrent leases on one replica count once; tenants with leases of the same adapter share
        the time.
    loads: loads of the adapter onto a GPU that the tenant's requests caused.
    load_bytes: bytes of these loads.
    pushes: pushed versions of the adapter that a gateway has validated and accepted.
    pushed_bytes: bytes of these versions.
    cost: price of the tokens when they were counted, in units of cost (prices.py).
    flex_prompt_tokens, flex_cached_tokens, flex_output_tokens: tokens of batches' lines and of
        requests of service tier flex, which the other counts include.
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
    cost: int = 0
    flex_prompt_tokens: int = 0
    flex_cached_tokens: int = 0
    flex_output_tokens: int = 0

    def __add__(self, more: "UsageCounts") -> "UsageCounts":
        return UsageCounts(*map(add, _values(self), _values(more)))

    @property
    def tokens(self) -> int:
        """Prompt and output tokens."""
        return self.prompt_tokens + self.output_tokens


_values = attrgetter(*(each.name for each in fields(UsageCounts)))  # astuple would copy deeply
NOTHING = UsageCounts()

UsageByAccount = Mapping[UsageAccount, UsageCounts]
"""Usage of each tenant with each model that it used."""


class UsageLedger:
    """Usage that one process has counted and not written to the store yet, by day and account.
    Thread-safe.

    clock: Unix seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = Lock()
        self._days: dict[date, dict[UsageAccount, UsageCounts]] = {}

    def add(self, account: UsageAccount, counts: UsageCounts) -> None:
        """Add usage to the present day."""
        day = day_of(self._clock())
        with self._lock:
            add_to(self._days.setdefault(day, {}), account, counts)

    def take(self) -> dict[date, UsageByAccount]:
        """Return and clear the usage since the last call, by day."""
        with self._lock:
            taken, self._days = self._days, {}
        return dict(taken)


def add_to(sums: dict[K, UsageCounts], key: K, counts: UsageCounts) -> None:
    """Add counts to the sum of a key."""
    sums[key] = sums.get(key, NOTHING) + counts


def day_of(unix_s: float) -> date:
    """Return the day, UTC, of a time in Unix seconds."""
    return datetime.fromtimestamp(unix_s, UTC).date()
