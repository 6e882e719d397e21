"""Number of KV pages that sequences need, where some layers attend only to a window."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageNeeds:
    """Number of KV pages that sequences need, with one list of pages for each group of layers.

    page_size: tokens of a page.
    windows: attention window of each group of layers (models/kv_groups.py). Groups that attend to
        all tokens (None) come first; all others have the same window.
    step_tokens: maximum number of tokens that a step computes.
    """

    page_size: int
    windows: tuple[int | None, ...] = (None,)
    step_tokens: int = 0

    @property
    def whole(self) -> int:
        """Number of groups of layers without a window, which keep the pages of all tokens."""
        return self.windows.count(None)

    @property
    def windowed(self) -> int:
        """Number of groups of layers with a window, which keep only the last pages."""
        return len(self.windows) - self.whole

    @property
    def window_pages(self) -> int:
        """Limit on a sequence's pages between two steps, in one group of layers with a window.

        That is the number of pages that the token after the last full page attends to, plus two
        pages that are being filled.
        """
        return self.pages_for((self.windows[-1] or 1) - 1) + 2

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that `tokens` tokens need, in one group of layers."""
        return -(-tokens // self.page_size)

    def first(self, token: int) -> int:
        """Return the index of the first page that a token or any later token attends to.

        Only for groups of layers with a window; the other groups attend to all pages.

        token: index of the token in its sequence.
        """
        return max(0, token + 1 - (self.windows[-1] or 0)) // self.page_size

    def between_steps(self, tokens: int) -> int:
        """Return the most pages, over all groups, that a sequence of `tokens` tokens holds between
        steps.
        """
        return self._with(self.window_pages, self.pages_for(tokens))

    def in_steps(self, tokens: int) -> int:
        """Return a number of pages, in all groups, that suffices to compute a sequence of `tokens`
        tokens if no other sequence has pages.

        The sequence is computed in steps of up to step_tokens tokens.
        """
        return self._with(self._pages_in_steps, self.pages_for(tokens))

    def longest(self, pages: int) -> int | None:
        """Return the length, in tokens, of the longest sequence for which `pages` pages suffice.

        None if they suffice for a sequence of any length.
        """
        length = pages // len(self.windows)
        if self.windowed and length >= self._pages_in_steps:
            if not self.whole:
                return None
            length = (pages - self.windowed * self._pages_in_steps) // self.whole
        return length * self.page_size

    def tokens(self, pages: int, context: int) -> int:
        """Return how many tokens `pages` pages hold, in sequences of `context` tokens."""
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
