"""What tenants have left of the month's tokens."""

from collections import Counter
from typing import Protocol

from lorikeet.errors import InsufficientQuota
from lorikeet.retry_after import until_next_month

READ_S = 30.0
"""Seconds between two readings of recorded usage, while tenants with a budget send requests."""


class RecordedUsage(Protocol):
    """The usage of this month, by UTC's calendar, as far as it is recorded."""

    def of(self, tenant: str) -> int:
        """Tokens, as of the last refresh."""
        ...

    def refresh(self) -> None:
        """Read what is new. Blocks. Raises StoreError; then what was read stays."""
        ...


class MonthlyBudget:
    """The tokens used this month: what was recorded, and what this gateway has settled since.

    unseen_s: usage of the last seconds before a reading that it may lack. What other gateways
    have settled since is not known here. `now` is in Unix seconds. For one event loop; only `read`
    is for a thread.
    """

    def __init__(self, recorded: RecordedUsage | None, unseen_s: float = 30.0) -> None:
        self._recorded = recorded
        self._unseen_s = unseen_s
        self._asked = False
        self._read_at: float | None = None
        self._settled: dict[str, Counter[int]] = {}  # by tenant and second

    def check(self, tenant: str, tokens_per_month: int, now: float) -> None:
        """Raises InsufficientQuota when the tenant has used that much."""
        self._asked = True
        used = self._settled[tenant].total() if tenant in self._settled else 0
        if self._recorded is not None:
            used += self._recorded.of(tenant)
        if used >= tokens_per_month:
            raise InsufficientQuota(
                f"this tenant's budget of {tokens_per_month} tokens a month is used up: "
                "ask your admin for more",
                retry_after_s=until_next_month(now),
            )

    def settle(self, tenant: str, tokens: int, now: float) -> None:
        """A tenant with a budget has used this."""
        self._settled.setdefault(tenant, Counter())[int(now)] += tokens

    def due(self, now: float) -> bool:
        """Whether to read again."""
        recently = self._read_at is not None and now < self._read_at + READ_S
        return self._recorded is not None and self._asked and not recently

    def read(self) -> None:
        """Read what was recorded. Raises StoreError."""
        assert self._recorded is not None
        self._recorded.refresh()

    def was_read(self, began: float) -> None:
        """A reading that began then is over: it holds what was settled long before."""
        self._asked, self._read_at = False, began
        seen = int(began - self._unseen_s)
        for tenant, settled in list(self._settled.items()):
            for second in [second for second in settled if second < seen]:
                del settled[second]
            if not settled:
                del self._settled[tenant]
