"""The sequences that wait to run, in the order in which they get their turns."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from itertools import chain

from lorikeet_engine.scheduling.fairness import VirtualCounter, VirtualCounters
from lorikeet_engine.scheduling.sequence import Sequence


class WaitingQueue:
    """Of each tenant, who was preempted comes first, then the higher priority, then the older.

    Changed by one thread; may be counted and iterated on any.
    """

    def __init__(self, accounts: VirtualCounters) -> None:
        self._accounts = accounts
        self._lines: dict[VirtualCounter, list[Sequence]] = {}  # none of them empty

    def __len__(self) -> int:
        return sum(map(len, list(self._lines.values())))

    def __iter__(self) -> Iterator[Sequence]:
        """Tenant by tenant."""
        return chain.from_iterable(map(list, list(self._lines.values())))

    def add(self, sequence: Sequence) -> None:
        """It waits from now on, and its tenant for a turn."""
        account = sequence.bill.account
        self._accounts.wait(account)
        insort(self._lines.setdefault(account, []), sequence, key=_place)
        account.backlog += sequence.bill.worth

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer."""
        account = sequence.bill.account
        line = self._lines[account]
        del line[bisect_left(line, _place(sequence), key=_place)]
        account.backlog -= sequence.bill.worth
        if not line:
            del self._lines[account]
            account.backlog = 0.0
            self._accounts.leave(account)

    def turns(self, begun: Iterable[Sequence], refuses: Callable[[Sequence], bool]) -> "Turns":
        """A look at those that wait; nobody may be added or removed meanwhile.

        begun: that run already and come before others of their tenants. refuses: whether one need
        not be looked at, for its adapter cannot be used.
        """
        lines: dict[VirtualCounter, list[Sequence]] = {}
        for sequence in begun:
            lines.setdefault(sequence.bill.account, []).append(sequence)
        for account, line in self._lines.items():
            lines[account] = [*lines[account], *line] if account in lines else line
        return Turns(lines, refuses)

    def stand_aside(self, accounts: Iterable[VirtualCounter]) -> None:
        """None of what waits for them could have been served: they gain no credit by it."""
        for account in accounts:
            self._accounts.leave(account)


class Turns:
    """Each once, the next always of the tenant whose counter is the least by then.

    O(tenants), and O(log tenants) for each that is looked at. over: the tenants of whom nobody is
    left.
    """

    def __init__(
        self, lines: Mapping[VirtualCounter, list[Sequence]], refuses: Callable[[Sequence], bool]
    ) -> None:
        self._lines, self._refuses = lines, refuses
        self.over: list[VirtualCounter] = []

    def __iter__(self) -> Iterator[Sequence]:
        rests = [(account, iter(line)) for account, line in self._lines.items()]
        turns = [_turn(account, next(rest), rest) for account, rest in rests]
        heapify(turns)
        while turns:
            _, _, sequence, rest = turns[0]
            account = sequence.bill.account
            yield sequence
            following = next((s for s in rest if not self._refuses(s)), None)
            if following is None:
                heappop(turns)
                self.over.append(account)
            else:
                heapreplace(turns, _turn(account, following, rest))


_Turn = tuple[float, int, Sequence, Iterator[Sequence]]


def _turn(account: VirtualCounter, sequence: Sequence, rest: Iterator[Sequence]) -> _Turn:
    return account.counter, sequence.arrival, sequence, rest


def _place(sequence: Sequence) -> tuple[bool, int, int]:
    return not sequence.progress.preemptions, -sequence.request.terms.priority, sequence.arrival
