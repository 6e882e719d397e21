"""The sequences that wait to run, in the order in which they get their turns."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from itertools import chain

from lorikeet_engine.fairness import Account, Accounts
from lorikeet_engine.sequence import Sequence


class Waiting:
    """Of each tenant, who was preempted comes first, then the higher priority, then the older.

    Changed by one thread; may be counted and iterated on any.
    """

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._lines: dict[Account, list[Sequence]] = {}  # none of them empty

    def __len__(self) -> int:
        return sum(map(len, list(self._lines.values())))

    def __iter__(self) -> Iterator[Sequence]:
        """Tenant by tenant."""
        return chain.from_iterable(map(list, list(self._lines.values())))

    def add(self, sequence: Sequence) -> None:
        """It waits from now on, and its tenant for a turn."""
        account = sequence.account
        self._accounts.wait(account)
        insort(self._lines.setdefault(account, []), sequence, key=_place)
        account.backlog += sequence.worth

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer."""
        account = sequence.account
        line = self._lines[account]
        del line[bisect_left(line, _place(sequence), key=_place)]
        account.backlog -= sequence.worth
        if not line:
            del self._lines[account]
            account.backlog = 0.0
            self._accounts.leave(account)

    def turns(self, begun: Iterable[Sequence]) -> Iterator[Sequence]:
        """Each once, the next always of the tenant whose counter is the least by then.

        begun: that run already and come before others of their tenants. Nobody may be added or
        removed meanwhile. O(tenants), and O(log tenants) for each that is looked at.
        """
        begun_of = defaultdict[Account, list[Sequence]](list)
        for sequence in begun:
            begun_of[sequence.account].append(sequence)
        lines = {**begun_of, **self._lines}
        turns = []
        for account, line in lines.items():
            rest = iter(line)
            if account in begun_of and account in self._lines:
                rest = chain(begun_of[account], line)
            head = next(rest)
            turns.append((account.counter, head.arrival, head, rest))
        heapify(turns)
        while turns:
            _, _, head, rest = turns[0]
            yield head
            following = next(rest, None)
            if following is None:
                heappop(turns)
            else:
                turn = following.account.counter, following.arrival, following, rest
                heapreplace(turns, turn)

    def stand_aside(self, held_up: Mapping[Account, int]) -> None:
        """Tenants of whom all that wait could not have been served: they gain no credit by it.

        held_up: how many of a tenant's could not.
        """
        for account, count in held_up.items():
            if count == len(self._lines[account]):
                self._accounts.leave(account)


def _place(sequence: Sequence) -> tuple[bool, int, int]:
    return not sequence.preemptions, -sequence.request.terms.priority, sequence.arrival
