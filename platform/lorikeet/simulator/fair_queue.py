"""Queue of a simulated replica's requests that can start prefill, fair among tenants."""

from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain

from lorikeet_engine.scheduling.fairness import (
    OUTPUT_TOKEN,
    PROMPT_TOKEN,
    VirtualCounter,
    VirtualCounters,
)


class FairQueue:
    """Waiting requests, served in the order of their tenants' virtual token counters.

    A counter adds up the cost of a tenant's tokens, as in the engine's scheduler: the tenant with
    the smallest counter is next. All tenants have equal weights.

    waiting: tenant → counter, for tenants with waiting requests.
    """

    def __init__(self) -> None:
        self._counters = VirtualCounters()
        self._counter_of: dict[int, VirtualCounter] = {}
        self._requests: dict[int, deque[int]] = {}
        self._decoding = Counter[int]()
        self.waiting: dict[int, VirtualCounter] = {}

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._requests.values())

    def add(self, request: int, tenant: int) -> None:
        """Queue a request of a tenant."""
        counter = self._counter_of.get(tenant)
        if counter is None:
            counter = self._counter_of[tenant] = self._counters.open_sequence(str(tenant), 1.0)
            self._requests[tenant] = deque()
        self._counters.start_waiting(counter)
        self.waiting[tenant] = counter
        self._requests[tenant].append(request)

    def first(self) -> int:
        """Return the next request, which stays in the queue."""
        return self._requests[self._first_tenant()][0]

    def next(self, prompts: list[int]) -> int:
        """Take the next request, and add the cost of its prompt and its first token to its tenant's
        counter.

        prompts: number of prompt tokens of each of the fleet's requests, [requests].
        """
        tenant = self._first_tenant()
        requests, counter = self._requests[tenant], self.waiting[tenant]
        request = requests.popleft()
        counter.charge(PROMPT_TOKEN * prompts[request] + OUTPUT_TOKEN)
        if not requests:
            del self.waiting[tenant]
            self._counters.stop_waiting(counter)
        return request

    def begun(self, tenant: int) -> None:
        """Record that a sequence of the tenant begins to decode."""
        self._decoding[tenant] += 1

    def ended(self, tenant: int) -> None:
        """Record that a sequence of the tenant has its last token."""
        self._decoding[tenant] -= 1

    def decoded(self, steps: float) -> None:
        """Add the cost of `steps` tokens of each decoding sequence to its tenant's counter."""
        for tenant, sequences in self._decoding.items():
            self._counter_of[tenant].charge(OUTPUT_TOKEN * sequences * steps)

    def _first_tenant(self) -> int:
        return min(self.waiting, key=lambda tenant: self.waiting[tenant].value)
