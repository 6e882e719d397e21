"""Virtual token counters, by which tenants are served fairly.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024, arXiv 2401.00588),
Algorithm 2. A tenant's counter is the cost of the work done for the tenant, divided by its weight.
The unit of cost is a prompt token:

    += PROMPT_TOKEN for each computed prompt token, more the deeper the token stands in its prompt:
       attention reads all tokens before it (prompt_cost)
    += OUTPUT_TOKEN for each sampled token
    += the prompt tokens that could be computed while an adapter is copied to the GPU for the tenant

Of the waiting tenants, the one with the least counter is served next. Between two tenants that
always wait, the difference in service, over any span of time and by weight, is at most

    2 · max(cost of the longest prompt, OUTPUT_TOKEN · tokens of a batch)

The paper charges a prompt as a whole when it begins, since it is computed in one step. Here each
chunk is charged alone: a tenant behind a long prompt waits for one chunk of it.

Absence earns no credit: the counter of a tenant that begins to wait is lifted to the least counter
of the waiting tenants or, if none waits, to that of the tenant that waited last. Prompt tokens
found in the cache cost nothing, as in Cao et al., "Locality-aware Fair Scheduling in LLM Serving"
(arXiv 2501.14312): tenants share no cached prefixes, so a tenant has paid for every prefix it
finds. Loads no torch.
"""

from dataclasses import dataclass

from lorikeet_engine.costs import StepCosts, seen_tokens

PROMPT_TOKEN = 1.0
OUTPUT_TOKEN = 2.0
# Counters are forgotten only once there are more than this.
_MIN_KEPT = 256


@dataclass(slots=True, eq=False)
class VirtualCounter:
    """Counter of one tenant.

    value: cost of the work done for the tenant, divided by weight.
    open: the tenant's sequences that have not finished.
    backlog: expected cost of the tenant's waiting sequences.
    """

    tenant: str
    weight: float = 1.0
    value: float = 0.0
    open: int = 0
    backlog: float = 0.0

    def charge(self, cost: float) -> None:
        """Add the cost of work done for the tenant."""
        self.value += cost / self.weight


@dataclass(slots=True, eq=False)
class SequenceCost:
    """Cost of one sequence to its tenant.

    expected: estimate of the total cost.
    charged_tokens: prompt tokens charged so far, cached ones before them included.
    """

    counter: VirtualCounter
    expected: float
    charged_tokens: int = 0

    def charge_prompt(self, costs: StepCosts, begin: int, end: int) -> float:
        """Charge for computing prompt tokens `begin` to `end`; return their cost.

        Tokens that are computed again after a preemption cost nothing.
        """
        cost = prompt_cost(costs, max(begin, self.charged_tokens), end)
        self.charged_tokens = max(self.charged_tokens, end)
        self.counter.charge(cost)
        return cost


def prompt_cost(costs: StepCosts, begin: int, end: int) -> float:
    """Return the cost of prompt tokens `begin` to `end` without adapters; 0 if there are none."""
    tokens = max(0, end - begin)
    seen = seen_tokens(tokens, begin)
    return PROMPT_TOKEN * costs.prompts_s(tokens, seen) / costs.prompt_token_s


class VirtualCounters:
    """Counters of all tenants that could be ahead of a new tenant; other counters are forgotten.

    One thread only, except `cost_ahead_of`.
    """

    def __init__(self) -> None:
        self._counters: dict[str, VirtualCounter] = {}
        self._waiting: dict[str, VirtualCounter] = {}
        self._last_waiting: VirtualCounter | None = None  # tenant that stopped waiting last
        self._forget_above = _MIN_KEPT

    def __len__(self) -> int:
        return len(self._counters)

    def open_sequence(self, tenant: str, weight: float) -> VirtualCounter:
        """Return the tenant's counter, with one more open sequence."""
        counter = self._counters.get(tenant)
        if counter is None:
            if len(self._counters) >= self._forget_above:
                self._forget()
            counter = self._counters[tenant] = VirtualCounter(tenant)
        counter.weight = weight
        counter.open += 1
        return counter

    def start_waiting(self, counter: VirtualCounter) -> None:
        """Count the tenant among the waiting ones and lift its counter, unless it waits already."""
        if counter.tenant not in self._waiting:
            counter.value = max(counter.value, self.level)
            self._waiting[counter.tenant] = counter

    def stop_waiting(self, counter: VirtualCounter) -> None:
        """Count the tenant among the waiting ones no more."""
        if self._waiting.pop(counter.tenant, None):
            self._last_waiting = counter

    @property
    def level(self) -> float:
        """Least counter of the waiting tenants, to which new ones are lifted; never falls."""
        values = [counter.value for counter in list(self._waiting.values())]
        return min(values, default=self._last_waiting.value if self._last_waiting else 0.0)

    def cost_ahead_of(self, tenant: str, weight: float) -> float:
        """Return the cost of all work that would precede a request that this tenant sent now.

        The sum of the tenant's own backlog and, of each other tenant's backlog, the part that fair
        order serves first. Any thread.
        """
        own = self._counters.get(tenant) or VirtualCounter(tenant)
        served_at = max(own.value, self.level) + own.backlog / weight
        return own.backlog + sum(
            min(other.backlog, max(0.0, served_at - other.value) * other.weight)
            for other in list(self._waiting.values())
            if other is not own
        )

    def _forget(self) -> None:
        """Drop counters with nothing open that would be lifted anyway, which changes no order.

        Counters above the level stay. By the fairness bound the level reaches them soon.
        """
        level = self.level
        kept = [c for c in self._counters.values() if c.open or c.value > level]
        self._counters = {counter.tenant: counter for counter in kept}
        self._forget_above = max(_MIN_KEPT, 2 * len(kept))
