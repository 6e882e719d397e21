"""Grammar of numbers for tests: every token is smaller than the one before.

"below 50, end under 10": the first token is below 50, and the choice may end once its last token is
below 10.
"…, by one from 40 to 20": a token from 41 to 21 is followed only by the next smaller number.

Faults at a token:

"…, fail at 7": the matcher refuses 7 with InvalidRequest.
"…, crash at 7": the matcher raises Panic on 7.
"…, stuck at 7": the matcher cannot tell which tokens may follow 7.
"…, panic at 7": the code that lists the tokens after 7 raises Panic.
"…, undecided at 7": the code that decides whether 7 may be the last token raises Panic.
"…, unsure at 7": the code that lists the forced tokens after 7 raises Panic.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lorikeet_engine.errors import InvalidRequest
from lorikeet_engine.sampling.grammar import TokenBitmask

EOS = 2
_FAULT = r"(fail|crash|stuck|panic|undecided|unsure) at (\d+)"
_RUN = r"by one from (\d+) to (\d+)"
_TEXT = re.compile(rf"below (\d+), end under (\d+)(?:, {_RUN})?(?:, {_FAULT})?")


class Panic(BaseException):
    """Error of a grammar's code that is no Exception, like pyo3's panics."""


@dataclass
class Descending:
    """Matcher of a Descending grammar."""

    last: int
    end: int
    run: range
    fault: str | None
    at: int

    @property
    def may_end(self) -> bool:
        self.break_at("undecided", self.last)
        return self.last < self.end and self.last - 1 not in self.run

    @property
    def must_end(self) -> bool:
        return self.last == 0

    @property
    def possible(self) -> set[int]:
        if self.last - 1 in self.run:
            return {self.last - 1}
        return set(range(self.last)) - {EOS}

    def forced_tokens(self) -> list[int]:
        self.break_at("unsure", self.last)
        if self.last - 1 not in self.run:
            return []
        return list(range(self.last - 1, self.run.start - 1, -1))

    def accept(self, token: int) -> None:
        if token not in self.possible or (self.fault, self.at) == ("fail", token):
            raise InvalidRequest(f"no {token} after {self.last}")
        self.break_at("crash", token)
        self.last = token

    def break_at(self, fault: str, token: int) -> None:
        if (self.fault, self.at) == (fault, token):
            raise Panic("the matcher's own code broke")

    def copy(self) -> "Descending":
        return replace(self)


class DescendingGrammars:
    """Compiler of Descending grammars."""

    def compile(self, text: str) -> Descending:
        match = _TEXT.fullmatch(text)
        if match is None:
            raise InvalidRequest(f"{text!r} is no grammar of mine", param="grammar")
        below, end, first, last, fault, at = match.groups()
        run = range(int(last or 0), int(first or -1) + 1)
        return Descending(int(below), int(end), run, fault, int(at or 0))

    def fill_bitmasks(
        self, matchers: Sequence[Descending], bitmasks: TokenBitmask
    ) -> list[InvalidRequest | None]:
        problems: list[InvalidRequest | None] = []
        for matcher, row in zip(matchers, bitmasks, strict=True):
            matcher.break_at("panic", matcher.last)
            stuck = (matcher.fault, matcher.at) == ("stuck", matcher.last)
            for token in matcher.possible:
                row[token // 8] |= 1 << token % 8
            problems.append(InvalidRequest("it is too complex") if stuck else None)
        return problems
