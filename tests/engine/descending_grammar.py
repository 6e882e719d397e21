"""A grammar of numbers for tests: every token is smaller than the one before.

"below 50, end under 10": the first is smaller than 50, and the choice may end once its last token
is smaller than 10. "…, fail at 7": saying 7 breaks the matcher; "…, crash at 7": in a way that no
matcher should; "…, stuck at 7": it cannot tell what may follow a 7; "…, panic at 7": its code
breaks when it is asked that; "…, undecided at 7": when it is asked whether a 7 may be the last;
"…, unsure at 7": when it is asked what must follow a 7. "below 50, end under 10, by one from 40 to
20": what is from 41 to 21 is followed by the next smaller number alone.
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
    """No Exception, as what pyo3 raises is none."""


@dataclass
class Descending:
    """A Matcher."""

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
    """Grammars."""

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
