"""Whose turn it is: virtual token counters.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024, arXiv 2401.00588),
Algorithm 2. A tenant's counter is what was done for it, in tokens' worth, over its weight:

    += PROMPT_TOKEN for each token of a prompt that is computed
    += OUTPUT_TOKEN for each token that is made
    += the prompt tokens that could be computed while a cold adapter is copied for it

and of the tenants that wait, the one with the least counter is served next. Of two that always
wait, neither is served more than the other, over any span of time and by weight, by more than

    2 · max(PROMPT_TOKEN · longest prompt, OUTPUT_TOKEN · tokens of a batch)

The paper charges a prompt when it begins, since it is computed in one step. Ours are computed in
chunks, and each is a turn: who waits behind a long prompt waits for a chunk of it.

Having been away is no credit: a tenant that begins to wait is lifted to the least of those that do,
or, where nobody waits, to the last that did. Tokens of a prompt that are found in the cache cost
nothing, as in Cao et al., "Locality-aware Fair Scheduling in LLM Serving" (arXiv 2501.14312):
caches are not shared between tenants, so whoever finds a prefix has paid for it. Loads no torch.
"""

from dataclasses import dataclass

PROMPT_TOKEN = 1.0
OUTPUT_TOKEN = 2.0
# So many accounts are kept before it is asked whose can be forgotten.
_FEW = 256


@dataclass(slots=True, eq=False)
class VirtualCounter:
    """One tenant's. open: its sequences that have not ended. backlog: tokens' worth that waits."""

    tenant: str
    weight: float = 1.0
    counter: float = 0.0
    open: int = 0
    backlog: float = 0.0

    def charge(self, worth: float) -> None:
        """Something was done for it, in tokens' worth."""
        self.counter += worth / self.weight


@dataclass(slots=True, eq=False)
class Bill:
    """What one sequence costs its tenant. worth: so much is expected, in tokens' worth.

    paid: so many tokens of its prompt were charged, or found in the cache before them.
    """

    account: VirtualCounter
    worth: float
    paid: int = 0

    def charge_prompt(self, begin: int, end: int) -> float:
        """These tokens of the prompt are computed; returns what that is worth.

        What is computed anew after a preemption is not the tenant's to pay.
        """
        worth = PROMPT_TOKEN * max(0, end - max(begin, self.paid))
        self.paid = max(self.paid, end)
        self.account.charge(worth)
        return worth


class VirtualCounters:
    """Of all tenants that could be ahead of one that comes; the others are forgotten.

    Used by one thread; `ahead_of` may be called from any.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, VirtualCounter] = {}
        self._waiting: dict[str, VirtualCounter] = {}
        self._last: VirtualCounter | None = None  # that stopped waiting
        self._forget_above = _FEW

    def __len__(self) -> int:
        return len(self._accounts)

    def open(self, tenant: str, weight: float) -> VirtualCounter:
        """The account for one more sequence of this tenant."""
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= self._forget_above:
                self._forget()
            account = self._accounts[tenant] = VirtualCounter(tenant)
        account.weight = weight
        account.open += 1
        return account

    def wait(self, account: VirtualCounter) -> None:
        """It has something to be served from now on; nothing happens if it had."""
        if account.tenant not in self._waiting:
            account.counter = max(account.counter, self.level)
            self._waiting[account.tenant] = account

    def leave(self, account: VirtualCounter) -> None:
        """It has nothing that could be served; nothing happens if it had not."""
        if self._waiting.pop(account.tenant, None):
            self._last = account

    @property
    def level(self) -> float:
        """The counter to which one that comes is lifted; never falls."""
        counters = [account.counter for account in list(self._waiting.values())]
        return min(counters, default=self._last.counter if self._last else 0.0)

    def ahead_of(self, tenant: str, weight: float) -> float:
        """The tokens' worth that would be served before a request that this tenant sent now.

        Its own that waits, and of each other tenant what its turns allow until that is served.
        """
        own = self._accounts.get(tenant) or VirtualCounter(tenant)
        served_at = max(own.counter, self.level) + own.backlog / weight
        return own.backlog + sum(
            min(other.backlog, max(0.0, served_at - other.counter) * other.weight)
            for other in list(self._waiting.values())
            if other is not own
        )

    def _forget(self) -> None:
        """Those with nothing open whose counters would be lifted anyway: nobody sees a difference.

        Others are as far ahead as the bound says at most, so they are reached soon.
        """
        level = self.level
        kept = [a for a in self._accounts.values() if a.open or a.counter > level]
        self._accounts = {account.tenant: account for account in kept}
        self._forget_above = max(_FEW, 2 * len(kept))
