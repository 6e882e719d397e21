"""KV pages: which are free, who shares them, and by which keys they are found again.

A page is an integer: its index in the KV tensor. Only full pages have a key and can be shared, so
a page that can still be written to has one owner. A page without references keeps its key and
contents until it is allocated again, least recently used first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Reversible


class PagePool:
    """`pages` KV pages, any of which a group of layers may have. All operations are O(pages named).

    A key stands for the same tokens in all groups; each has its own page of it.
    """

    def __init__(self, pages: int, groups: int = 1) -> None:
        self.pages = pages
        self._references = [0] * pages
        self._keys: list[bytes | None] = [None] * pages
        self._groups = [0] * pages  # of pages with a key, and so
        self._adapters: list[str | None] = [None] * pages  # by digest
        self._pages_of: list[dict[bytes, int]] = [{} for _ in range(groups)]
        # Pages without references in the order they are given out: those without a key in front.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(pages))

    @property
    def free(self) -> int:
        """How many pages `take` can give out, cached ones included."""
        return len(self._free)

    @property
    def used(self) -> int:
        """How many pages have references."""
        return self.pages - len(self._free)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The first group's cached pages of the longest run of keys from the first.

        Adds no references.
        """
        found: list[int] = []
        pages = self._pages_of[0]
        for key in keys:
            page = pages.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each of some cached pages."""
        for page in pages:
            if self._references[page] == 0:
                del self._free[page]
            self._references[page] += 1

    def take(self, count: int) -> list[int]:
        """Give out `count` pages with one reference each. There must be that many free."""
        assert count <= self.free, f"{count} KV pages wanted, {self.free} free"
        taken: list[int] = []
        for _ in range(count):
            page, _ = self._free.popitem(last=False)
            key = self._keys[page]
            if key is not None:
                del self._pages_of[self._groups[page]][key]
                self._keys[page] = None
            self._references[page] = 1
            taken.append(page)
        return taken

    def publish(
        self, page: int, key: bytes, adapter_digest: str | None = None, group: int = 0
    ) -> None:
        """Let others find a full page by its key; if the key is taken, the page stays private.

        adapter_digest: of what it was computed with. group: whose page it is.
        """
        pages = self._pages_of[group]
        if self._keys[page] is None and key not in pages:
            self._keys[page], self._groups[page] = key, group
            self._adapters[page] = adapter_digest
            pages[key] = page

    def forget(self, pages: Iterable[int]) -> None:
        """Let nobody find these pages any more, whoever else may have references to them."""
        for page in pages:
            key = self._keys[page]
            if key is not None:
                del self._pages_of[self._groups[page]][key]
                self._keys[page] = None
                if self._references[page] == 0:
                    self._free.move_to_end(page, last=False)

    def forget_keys(self, keys: Iterable[bytes]) -> None:
        """Let nobody find pages by these keys any more."""
        for key in keys:
            self.forget([pages[key] for pages in self._pages_of if key in pages])

    def forget_adapter(self, digest: str) -> None:
        """Let nobody find what was computed with an adapter any more."""
        self.forget(page for page, adapter in enumerate(self._adapters) if adapter == digest)

    def release(self, pages: Reversible[int]) -> None:
        """Drop one reference from each page of a sequence, given in the sequence's order."""
        # From the end: a chain is then forgotten from its tail, useless without its head.
        for page in reversed(pages):
            assert self._references[page] > 0, f"KV page {page} released twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free[page] = None
                if self._keys[page] is None:
                    self._free.move_to_end(page, last=False)
