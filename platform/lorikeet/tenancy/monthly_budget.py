"""Monthly budgets of tenants in tokens and money, checked in one gateway."""

from datetime import UTC, datetime
from typing import Protocol

from lorikeet.catalog.records import Limits
from lorikeet.errors import InsufficientQuota
from lorikeet.prices import COST_UNITS, show_money
from lorikeet.retry_after import until_next_month
from lorikeet.usage.ledger import NOTHING, UsageCounts, add_to

READ_S = 30.0
"""Seconds between reads of recorded usage, while tenants with a budget send requests."""


class RecordedUsage(Protocol):
    """Recorded usage of the current calendar month, UTC."""

    def of(self, tenant: str) -> UsageCounts:
        """Return a tenant's usage as of the last refresh."""
        ...

    def refresh(self) -> None:
        """Read new usage. Blocks. Raises StoreError and then keeps the old values."""
        ...


class MonthlyBudget:
    """Tokens and costs of each tenant's month, compared with its budgets.

    The usage is recorded usage, plus the usage that `settle` has counted in this gateway and that
    recorded usage does not include yet. Other gateways' usage is known only once it is recorded.

    Single event loop, except `read`, which runs in a thread.

    recorded: source of recorded usage; None if usage is not recorded.
    unseen_s: age in seconds up to which usage that `settle` counted may be missing from recorded
        usage.

    `now` is in Unix seconds in `check`, and in monotonic seconds in all other methods.
    """

    def __init__(self, recorded: RecordedUsage | None, unseen_s: float = 30.0) -> None:
        self._recorded = recorded
        self._unseen_s = unseen_s
        self._asked = False
        self._read_at: float | None = None
        self._settled: dict[str, dict[int, UsageCounts]] = {}  # by tenant and second

    def check(self, tenant: str, limits: Limits, now: float) -> None:
        """Raise InsufficientQuota if the tenant has used up one of its budgets.

        limits: the tenant's limits.
        """
        tokens, cost = limits.tokens_per_month, limits.cost_per_month
        if tokens is None and cost is None:
            return
        used = self.used(tenant)
        if tokens is not None and used.tokens >= tokens:
            raise _used_up(f"{tokens} tokens a month is", now)
        if cost is not None and used.cost >= cost * COST_UNITS:
            raise _used_up(f"{show_money(cost)} a month, by the service's prices, is", now)

    def used(self, tenant: str) -> UsageCounts:
        """Return the usage that is compared with a tenant's budgets."""
        self._asked = True
        used = sum(self._settled.get(tenant, {}).values(), NOTHING)
        return used if self._recorded is None else used + self._recorded.of(tenant)

    def settle(self, tenant: str, used: UsageCounts, now: float) -> None:
        """Count what an ended request of a tenant with a budget has used."""
        add_to(self._settled.setdefault(tenant, {}), int(now), used)

    def due(self, now: float) -> bool:
        """Whether recorded usage should be read again."""
        recently = self._read_at is not None and now < self._read_at + READ_S
        return self._recorded is not None and self._asked and not recently

    def read(self) -> None:
        """Read recorded usage. Blocks. Raises StoreError."""
        assert self._recorded is not None
        self._recorded.refresh()

    def was_read(self, began: float) -> None:
        """Forget the usage that `settle` counted more than unseen_s seconds before the read began:
        recorded usage includes it.

        began: time at which the read began, monotonic seconds.
        """
        self._asked, self._read_at = False, began
        seen = int(began - self._unseen_s)
        for tenant, settled in list(self._settled.items()):
            for second in [second for second in settled if second < seen]:
                del settled[second]
            if not settled:
                del self._settled[tenant]


def _used_up(budget: str, now: float) -> InsufficientQuota:
    """Return the refusal by a budget, which names the time of the next one.

    now: Unix seconds.
    """
    wait_s = until_next_month(now)
    again = datetime.fromtimestamp(round(now + wait_s), UTC)
    return InsufficientQuota(
        f"this tenant's budget of {budget} used up until {again:%Y-%m-%d %H:%M} UTC: "
        "ask your admin for more",
        retry_after_s=wait_s,
    )
