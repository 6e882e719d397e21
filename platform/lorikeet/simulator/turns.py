"""The requests of a simulated replica whose prompts can be computed, in their tenants' turns."""

from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain

from lorikeet_engine.scheduling.fairness import (
    OUTPUT_TOKEN,
    PROMPT_TOKEN,
    VirtualCounter,
    VirtualCounters,
)


class TenantTurns:
    """As the engine's scheduler keeps them: by virtual token counters. All weigh the same.

    waiting: of each tenant that waits, its account.
    """

    def __init__(self) -> None:
        self._accounts = VirtualCounters()
        self._of: dict[int, VirtualCounter] = {}
        self._requests: dict[int, deque[int]] = {}
        self._streams = Counter[int]()
        self.waiting: dict[int, VirtualCounter] = {}

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._requests.values())

    def add(self, request: int, tenant: int) -> None:
        """It waits for its tenant's turn."""
        account = self._of.get(tenant)
        if account is None:
            account = self._of[tenant] = self._accounts.open(str(tenant), 1.0)
            self._requests[tenant] = deque()
        self._accounts.wait(account)
        self.waiting[tenant] = account
        self._requests[tenant].append(request)

    def next(self, prompts: list[int]) -> int:
        """Take the request whose turn it is, charged to its first token.

        prompts: tokens of each request's.
        """
        tenant = min(self.waiting, key=lambda tenant: self.waiting[tenant].counter)
        requests, account = self._requests[tenant], self.waiting[tenant]
        request = requests.popleft()
        account.charge(PROMPT_TOKEN * prompts[request] + OUTPUT_TOKEN)
        if not requests:
            del self.waiting[tenant]
            self._accounts.leave(account)
        return request

    def begun(self, tenant: int) -> None:
        """One of its sequences decodes from now on."""
        self._streams[tenant] += 1

    def ended(self, tenant: int) -> None:
        """One of them has its last token."""
        self._streams[tenant] -= 1

    def decoded(self, steps: float) -> None:
        """Each sequence that decodes has got so many tokens."""
        for tenant, streams in self._streams.items():
            self._of[tenant].charge(OUTPUT_TOKEN * streams * steps)
