"""Whose turn it is: virtual token counters.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024, arXiv 2401.00588),
Algorithm 2. A tenant's counter is the cost of what was done for it, over its weight. Costs are in
prompt tokens:

    += PROMPT_TOKEN for each token of a prompt that is computed, more the deeper it stands there:
       attention reads all that comes before (prompt_cost)
    += OUTPUT_TOKEN for each token that is sampled
    += the prompt tokens that could be computed while an adapter is copied to the GPU for it

and of the tenants that wait, the one with the least counter is served next. Of two that always
wait, neither is served more than the other, over any span of time and by weight, by more than

    2 · max(cost of the longest prompt, OUTPUT_TOKEN · tokens of a batch)

The paper charges a prompt when it begins, since it is computed in one step. Ours are computed in
chunks, and each is a turn: a tenant behind a long prompt waits for one chunk of it.

Having been away is no credit: the counter of a tenant that begins to wait is lifted to the least of
the waiting ones, or, where none waits, to that of the last that did. Tokens of a prompt that are
found in the cache cost nothing, as in Cao et al., "Locality-aware Fair Scheduling in LLM Serving"
(arXiv 2501.14312): caches are not shared between tenants, so a tenant that finds a prefix has paid
for it. Loads no torch.
"""

from dataclasses import dataclass

from lorikeet_engine.costs import StepCosts, seen_tokens

PROMPT_TOKEN = 1.0
OUTPUT_TOKEN = 2.0
# With fewer counters than this, none is looked at to be forgotten.
_MIN_KEPT = 256


@dataclass(slots=True, eq=False)
class VirtualCounter:
    """A tenant's counter. open: its sequences that have not ended. backlog: cost of what waits."""

    tenant: str
    weight: float = 1.0
    value: float = 0.0
    open: int = 0
    backlog: float = 0.0

    def charge(self, cost: float) -> None:
        """Add the cost of something that was done for the tenant."""
        self.value += cost / self.weight


@dataclass(slots=True, eq=False)
class SequenceCost:
    """What one sequence costs its tenant. expected: an estimate of all of it.

    charged_tokens: how many tokens of its prompt were charged, or found in the cache before them.
    """

    counter: VirtualCounter
    expected: float
    charged_tokens: int = 0

    def charge_prompt(self, costs: StepCosts, begin: int, end: int) -> float:
        """Charge for these tokens of the prompt, which are computed now; returns their cost.

        What is computed anew after a preemption costs the tenant nothing.
        """
        cost = prompt_cost(costs, max(begin, self.charged_tokens), end)
        self.charged_tokens = max(self.charged_tokens, end)
        self.counter.charge(cost)
        return cost


def prompt_cost(costs: StepCosts, begin: int, end: int) -> float:
    """The cost of these tokens of a prompt, without adapters: 0 if there are none."""
    tokens = max(0, end - begin)
    seen = seen_tokens(tokens, begin)
    return PROMPT_TOKEN * costs.prompts_s(tokens, seen) / costs.prompt_token_s


class VirtualCounters:
    """The counters of all tenants that could be ahead of a new one; others are forgotten.

    Used by one thread; `cost_ahead_of` may be called from any.
    """

    def __init__(self) -> None:
        self._counters: dict[str, VirtualCounter] = {}
        self._waiting: dict[str, VirtualCounter] = {}
        self._last_waiting: VirtualCounter | None = None  # that stopped waiting
        self._forget_above = _MIN_KEPT

    def __len__(self) -> int:
        return len(self._counters)

    def open_sequence(self, tenant: str, weight: float) -> VirtualCounter:
        """The tenant's counter, with one more open sequence."""
        counter = self._counters.get(tenant)
        if counter is None:
            if len(self._counters) >= self._forget_above:
                self._forget()
            counter = self._counters[tenant] = VirtualCounter(tenant)
        counter.weight = weight
        counter.open += 1
        return counter

    def start_waiting(self, counter: VirtualCounter) -> None:
        """The tenant has something that could be served; nothing happens if it had before."""
        if counter.tenant not in self._waiting:
            counter.value = max(counter.value, self.level)
            self._waiting[counter.tenant] = counter

    def stop_waiting(self, counter: VirtualCounter) -> None:
        """The tenant has nothing that could be served; nothing happens if it had nothing before."""
        if self._waiting.pop(counter.tenant, None):
            self._last_waiting = counter

    @property
    def level(self) -> float:
        """The value to which the counter of a tenant that begins to wait is lifted; never falls."""
        values = [counter.value for counter in list(self._waiting.values())]
        return min(values, default=self._last_waiting.value if self._last_waiting else 0.0)

    def cost_ahead_of(self, tenant: str, weight: float) -> float:
        """The cost of all that would be served before a request that this tenant sent now.

        That is its own backlog, and of each other tenant's what its turns allow until then.
        """
        own = self._counters.get(tenant) or VirtualCounter(tenant)
        served_at = max(own.value, self.level) + own.backlog / weight
        return own.backlog + sum(
            min(other.backlog, max(0.0, served_at - other.value) * other.weight)
            for other in list(self._waiting.values())
            if other is not own
        )

    def _forget(self) -> None:
        """Drop counters with nothing open that would be lifted anyway, which changes no turn.

        Others are as far ahead as the bound says at most, so they are reached soon.
        """
        level = self.level
        kept = [c for c in self._counters.values() if c.open or c.value > level]
        self._counters = {counter.tenant: counter for counter in kept}
        self._forget_above = max(_MIN_KEPT, 2 * len(kept))
