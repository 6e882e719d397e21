"""How many KV pages sequences need, where some layers see no more than a window."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageNeeds:
    """What sequences need of pages of `page_size` tokens, one list of pages for each of the groups.

    windows: of each group of layers (models/kv_groups.py), None for those that see all tokens,
    which come first; all others are one. step_tokens: the most that a step computes.
    """

    page_size: int
    windows: tuple[int | None, ...] = (None,)
    step_tokens: int = 0

    @property
    def whole(self) -> int:
        """How many groups need the pages of all tokens."""
        return self.windows.count(None)

    @property
    def windowed(self) -> int:
        """How many groups need the last pages alone; they come last."""
        return len(self.windows) - self.whole

    @property
    def window_pages(self) -> int:
        """The most pages of a windowed group that a sequence has between two steps.

        Those that the token behind the last full page sees, and two that are being filled.
        """
        return self.pages_for((self.windows[-1] or 1) - 1) + 2

    def pages_for(self, tokens: int) -> int:
        """How many pages hold that many tokens."""
        return -(-tokens // self.page_size)

    def first(self, token: int) -> int:
        """The first page of a windowed group that this token sees, or one behind it."""
        return max(0, token + 1 - (self.windows[-1] or 0)) // self.page_size

    def between_steps(self, tokens: int) -> int:
        """The most pages that a sequence of N tokens has between two steps."""
        return self._with(self.window_pages, self.pages_for(tokens))

    def in_steps(self, tokens: int) -> int:
        """The pages that it needs to be computed alone, as many tokens a step as may be."""
        return self._with(self._pages_in_steps, self.pages_for(tokens))

    def longest(self, pages: int) -> int | None:
        """The tokens of the longest sequence that N pages are enough for; None: any."""
        length = pages // len(self.windows)
        if self.windowed and length >= self._pages_in_steps:
            if not self.whole:
                return None
            length = (pages - self.windowed * self._pages_in_steps) // self.whole
        return length * self.page_size

    def tokens(self, pages: int, context: int) -> int:
        """How many tokens N pages hold, in sequences of `context` tokens."""
        if not self.windowed:
            return pages // self.whole * self.page_size
        longest = self.longest(pages)
        if longest is not None and longest < context:
            return longest
        more = pages - self.in_steps(context)
        return context + more * context // self.between_steps(context)

    @property
    def _pages_in_steps(self) -> int:
        return self.window_pages + self.pages_for(self.step_tokens)

    def _with(self, windowed: int, pages: int) -> int:
        return self.whole * pages + self.windowed * min(windowed, pages)
