"""Virtual token counters, by which tenants are served fairly.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024, arXiv 2401.00588),
Algorithm 2. A tenant's counter is the cost of the work done for the tenant, divided by its weight.
Costs are measured in prompt tokens without attention. Each kind of work adds to the counter:

    computed prompt token: PROMPT_TOKEN, and more the deeper the token stands in its prompt, since
        attention reads all tokens before it (prompt_cost)
    sampled token: OUTPUT_TOKEN
    drafted token, accepted or not: PROMPT_TOKEN
    copy of an adapter to the GPU for the tenant: the prompt tokens that could be computed meanwhile

Of the waiting tenants, the one with the smallest counter is served next. Between two tenants that
always wait, the difference in service, over any span of time and by weight, is at most

    2 · max(cost of the longest prompt, OUTPUT_TOKEN · tokens of a batch)

The paper charges a prompt as a whole when it begins, since it is computed in one step. Here each
chunk is charged when it is computed.

Absence earns no credit: when a tenant begins to wait, its counter is raised to the smallest counter
of the waiting tenants or, if no tenant waits, to the counter of the tenant that waited last. Prompt
tokens found in the cache cost nothing (Cao et al., "Locality-aware Fair Scheduling in LLM Serving",
arXiv 2501.14312): tenants share no cached prefixes, so a tenant has paid for every prefix it finds.

Requests in the background (SchedulingParams.background) have counters of their own, which come
after all others whatever their values. So a tenant's background requests neither cost it foreground
service nor precede anybody's foreground request.
"""

from dataclasses import dataclass

from lorikeet_engine.costs import StepCosts, seen_tokens

PROMPT_TOKEN = 1.0
OUTPUT_TOKEN = 2.0
# Counters are forgotten only once there are more than this.
_MIN_KEPT = 256


@dataclass(slots=True, eq=False)
class VirtualCounter:
    """Virtual token counter of one tenant's foreground or background requests.

    value: cost of the work done for the tenant, divided by its weight. The waiting tenant with the
        smallest value is served next.
    open: number of the tenant's sequences that have not finished.
    backlog: expected cost of the tenant's waiting sequences.
    overtaking: cost of the work that the tenant's shorter prompts may get before its oldest prompt
        (own_order.py).
    """

    tenant: str
    background: bool = False
    weight: float = 1.0
    value: float = 0.0
    open: int = 0
    backlog: float = 0.0
    overtaking: float = 0.0

    @property
    def place(self) -> tuple[bool, float]:
        """Place among waiting tenants, (background, value): the smallest is served next."""
        return self.background, self.value

    def charge(self, cost: float) -> None:
        """Add the cost of work done for the tenant, divided by its weight, to `value`."""
        self.value += cost / self.weight


@dataclass(slots=True, eq=False)
class SequenceCost:
    """Cost of computing one sequence, which is added to its tenant's counter as work is done.

    counter: counter of the tenant.
    expected: estimate of the cost of the prompt and the whole answer.
    charged_tokens: number of prompt tokens up to the last one whose cost was added to the counter;
        cached tokens before it count.
    to_compute: cost of the tokens to compute before the next token is sampled. For a waiting
        sequence this is an estimate, made when the sequence was queued.
    next_chunk: part of to_compute that fits into one step.
    """

    counter: VirtualCounter
    expected: float
    charged_tokens: int = 0
    to_compute: float = 0.0
    next_chunk: float = 0.0

    def set_tokens_to_compute(self, costs: StepCosts, begin: int, end: int) -> None:
        """Set the cost of the tokens to compute before the next token is sampled.

        costs: predicts the time of steps, from which the cost of a token is computed.
        begin: number of the sequence's tokens that are computed or cached.
        end: number of the sequence's tokens, all of which must be computed.
        """
        self.to_compute = prompt_cost(costs, begin, end)
        self.next_chunk = prompt_cost(costs, begin, min(end, begin + costs.step_tokens))

    def charge_prompt(self, costs: StepCosts, begin: int, end: int) -> float:
        """Add the cost of prompt tokens `begin` to `end` to the tenant's counter; return that cost.

        Tokens that are computed again after a preemption cost nothing.

        costs: predicts the time of steps, from which the cost of a token is computed.
        """
        cost = prompt_cost(costs, max(begin, self.charged_tokens), end)
        self.charged_tokens = max(self.charged_tokens, end)
        self.counter.charge(cost)
        return cost


def prompt_cost(costs: StepCosts, begin: int, end: int) -> float:
    """Return the cost of computing prompt tokens `begin` to `end`, without the cost of adapters.

    The unit is the cost of a prompt token without attention. The cost is 0 if `end` is not after
    `begin`.

    costs: predicts the time of steps, from which the cost is computed.
    """
    tokens = max(0, end - begin)
    seen = seen_tokens(tokens, begin)
    return PROMPT_TOKEN * costs.prompts_s(tokens, seen) / costs.prompt_token_s


class VirtualCounters:
    """Virtual token counters of all tenants.

    If there are many, counters that do not affect the order of tenants are dropped. Only one thread
    may use the counters; any thread may call `cost_ahead_of`.
    """

    def __init__(self) -> None:
        self._counters: dict[tuple[str, bool], VirtualCounter] = {}
        self._waiting: dict[VirtualCounter, None] = {}
        # by background: the tenant that stopped waiting last
        self._last_waiting: dict[bool, VirtualCounter] = {}
        self._forget_above = _MIN_KEPT

    def __len__(self) -> int:
        return len(self._counters)

    def open_sequence(
        self, tenant: str, weight: float, *, background: bool = False
    ) -> VirtualCounter:
        """Count one more unfinished sequence of the tenant, and return the tenant's counter.

        weight: the tenant's weight from now on; a tenant with twice the weight gets twice the
            service.
        background: whether the sequence is in the background.
        """
        counter = self._counters.get((tenant, background))
        if counter is None:
            if len(self._counters) >= self._forget_above:
                self._forget()
            counter = VirtualCounter(tenant, background)
            self._counters[tenant, background] = counter
        counter.weight = weight
        counter.open += 1
        return counter

    def start_waiting(self, counter: VirtualCounter) -> None:
        """Add the tenant to the waiting tenants.

        If the tenant was not waiting, raise its counter to `level` at least.
        """
        if counter not in self._waiting:
            counter.value = max(counter.value, self.level(background=counter.background))
            self._waiting[counter] = None

    def stop_waiting(self, counter: VirtualCounter) -> None:
        """Remove the tenant from the waiting tenants."""
        if counter in self._waiting:
            del self._waiting[counter]
            self._last_waiting[counter.background] = counter

    def level(self, *, background: bool = False) -> float:
        """Return the smallest counter of the tenants that wait in the foreground, or in the
        background. The level never falls.

        The counter of a tenant that begins to wait is raised to this level. Without waiting
        tenants, the level is the counter of the tenant that stopped waiting last.
        """
        values = [c.value for c in list(self._waiting) if c.background is background]
        last = self._last_waiting.get(background)
        return min(values, default=last.value if last else 0.0)

    def next_place(self) -> tuple[bool, float]:
        """Return the place (background, counter's value) of the waiting tenant served next.

        If no tenant waits, return the smallest place that a tenant that begins to wait can have.
        """
        background = bool(self._waiting) and all(c.background for c in self._waiting)
        return background, self.level(background=background)

    def cost_ahead_of(self, tenant: str, weight: float) -> float:
        """Return the cost of the work that would precede a new foreground request of this tenant.

        The cost is the sum of the tenant's own backlog and, for each other tenant, the part of the
        backlog that is served before the request. Any thread may call this.

        weight: the tenant's weight.
        """
        own = self._counters.get((tenant, False)) or VirtualCounter(tenant)
        served_at = max(own.value, self.level()) + own.backlog / weight
        return own.backlog + sum(
            min(other.backlog, max(0.0, served_at - other.value) * other.weight)
            for other in list(self._waiting)
            if other is not own and not other.background
        )

    def _forget(self) -> None:
        """Drop the counters that have no open sequence and whose value is at most the level.

        Their value would be raised to the level anyway.
        """
        levels = {background: self.level(background=background) for background in (False, True)}
        kept = [c for c in self._counters.values() if c.open or c.value > levels[c.background]]
        self._counters = {(counter.tenant, counter.background): counter for counter in kept}
        self._forget_above = max(_MIN_KEPT, 2 * len(kept))
