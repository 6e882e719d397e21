"""Monthly token budgets of tenants, checked in one gateway."""

from collections import Counter
from typing import Protocol

from lorikeet.errors import InsufficientQuota
from lorikeet.retry_after import until_next_month

READ_S = 30.0
"""Seconds between reads of recorded usage, while tenants with a budget send requests."""


class RecordedUsage(Protocol):
    """Recorded usage of the current calendar month, UTC."""

    def of(self, tenant: str) -> int:
        """Return a tenant's tokens as of the last refresh."""
        ...

    def refresh(self) -> None:
        """Read new usage. Blocks. Raises StoreError and then keeps the old values."""
        ...


class MonthlyBudget:
    """Tokens that each tenant has used this month, compared with its budget.

    The number is recorded usage, plus the tokens that `settle` has counted in this gateway and that
    recorded usage does not include yet. Other gateways' tokens are known only once they are
    recorded.

    Single event loop, except `read`, which runs in a thread.

    recorded: source of recorded usage; None if usage is not recorded.
    unseen_s: age in seconds up to which tokens that `settle` counted may be missing from recorded
        usage.

    `now` is in Unix seconds in `check`, and in monotonic seconds in all other methods.
    """

    def __init__(self, recorded: RecordedUsage | None, unseen_s: float = 30.0) -> None:
        self._recorded = recorded
        self._unseen_s = unseen_s
        self._asked = False
        self._read_at: float | None = None
        self._settled: dict[str, Counter[int]] = {}  # by tenant and second

    def check(self, tenant: str, tokens_per_month: int, now: float) -> None:
        """Raise InsufficientQuota if the tenant has used its budget of `tokens_per_month`
        tokens.
        """
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
        """Count tokens that an ended request of a tenant with a budget has used."""
        self._settled.setdefault(tenant, Counter())[int(now)] += tokens

    def due(self, now: float) -> bool:
        """Whether recorded usage should be read again."""
        recently = self._read_at is not None and now < self._read_at + READ_S
        return self._recorded is not None and self._asked and not recently

    def read(self) -> None:
        """Read recorded usage. Blocks. Raises StoreError."""
        assert self._recorded is not None
        self._recorded.refresh()

    def was_read(self, began: float) -> None:
        """Forget the tokens of `settle` that recorded usage includes since its last read.

        began: time at which the read began, on the clock of `settle`.
        """
        self._asked, self._read_at = False, began
        seen = int(began - self._unseen_s)
        for tenant, settled in list(self._settled.items()):
            for second in [second for second in settled if second < seen]:
                del settled[second]
            if not settled:
                del self._settled[tenant]
