"""KV pages: free list, reference counts, and the keys by which cached pages are found.

A page is an integer: its index in the KV tensor. Only full pages have a key and can be shared, so a
page that can still be written has one owner. A page without references keeps its key and its
contents until it is allocated again; the least recently used page is allocated first.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Reversible
from itertools import islice


class PagePool:
    """Pool of KV pages. A page can serve any group of layers.

    A key stands for the same tokens in all groups of layers; each group has its own page for that
    key. A method's time is linear in the number of pages that it is given or returns.
    """

    def __init__(self, pages: int, groups: int = 1) -> None:
        self.pages = pages  # that sequences have or may get
        self._withdrawn = bytearray(pages)  # 1: loses its memory as soon as it has no reference
        self._references = [0] * pages
        self._keys: list[bytes | None] = [None] * pages
        self._groups = [0] * pages  # meaningful only for pages with a key
        self._adapters: list[str | None] = [None] * pages  # digests; only for pages with a key
        self._tenants = [""] * pages  # meaningful only for pages with a key
        self._pages_of: list[dict[bytes, int]] = [{} for _ in range(groups)]
        # Pages without references in the order they are given out; those without a key come first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(pages))

    @property
    def free(self) -> int:
        """Number of pages without references, which can be allocated; includes cached pages."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of pages with references, that is, pages of running sequences."""
        return self.pages - len(self._free)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the pages cached under these keys, up to the first key that is not cached.

        They are pages of the first group of layers. Adds no references to them.
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
        """Add a reference to each of these cached pages."""
        for page in pages:
            if self._references[page] == 0:
                del self._free[page]
            self._references[page] += 1

    def take(self, count: int) -> list[int]:
        """Allocate `count` free pages, each with one reference. At least that many must be free."""
        assert count <= self.free, f"{count} KV pages wanted, {self.free} free"
        taken: list[int] = []
        for _ in range(count):
            page, _ = self._free.popitem(last=False)
            if (key := self._keys[page]) is not None:
                self._evict(page, key)
            self._references[page] = 1
            taken.append(page)
        return taken

    def publish(
        self,
        page: int,
        key: bytes,
        adapter_digest: str | None = None,
        group: int = 0,
        tenant: str = "",
    ) -> None:
        """Let other sequences find a full page by its key.

        Do nothing if another page of the group has the key already.

        adapter_digest: adapter under which the page was computed; None for the base model alone.
        group: index of the group of layers that the page belongs to.
        tenant: tenant for whom the page was computed.
        """
        pages = self._pages_of[group]
        if self._keys[page] is None and key not in pages and not self._withdrawn[page]:
            self._keys[page], self._groups[page] = key, group
            self._adapters[page], self._tenants[page] = adapter_digest, tenant
            pages[key] = page

    def forget(self, pages: Iterable[int]) -> None:
        """Remove the keys of these pages, so that no sequence finds them.

        Sequences that have the pages keep them.
        """
        for page in pages:
            key = self._keys[page]
            if key is not None:
                self._forget(page, key)
                if self._references[page] == 0:
                    self._free.move_to_end(page, last=False)

    def forget_keys(self, keys: Iterable[bytes]) -> None:
        """Remove these keys in all groups of layers, so that no sequence finds their pages."""
        for key in keys:
            self.forget([pages[key] for pages in self._pages_of if key in pages])

    def forget_adapter(self, digest: str) -> None:
        """Remove the keys of all pages computed with an adapter, alone or in a composition, so that
        no sequence finds them.
        """
        self.forget(page for page, of in enumerate(self._adapters) if of and digest in of)

    def release(self, pages: Reversible[int]) -> None:
        """Drop one reference from each of these pages of a sequence.

        pages: pages in the order of tokens.
        """
        # From the end: a prefix is then evicted from its tail, which is useless without its head.
        for page in reversed(pages):
            assert self._references[page] > 0, f"KV page {page} released twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._withdrawn[page]:
                    self.pages -= 1
                    continue
                self._free[page] = None
                if self._keys[page] is None:
                    self._free.move_to_end(page, last=False)

    def referenced(self, pages: Iterable[int]) -> int:
        """Return the number of these pages that sequences have."""
        return sum(self._references[page] > 0 for page in pages)

    def freed_by(self, pages: Iterable[int], dropped: Counter[int]) -> int:
        """Return how many of a sequence's pages would become free without its references, and those
        in `dropped`; add the sequence's references to `dropped`.

        dropped: number of references that are to be dropped, too, by page.
        """
        freed = 0
        for page in pages:
            dropped[page] += 1
            freed += dropped[page] == self._references[page] and not self._withdrawn[page]
        return freed

    def least_recent(self, most: int) -> list[int]:
        """Return the free pages that would be allocated first: those without a key, then the least
        recently used ones.
        """
        return list(islice(self._free, most))

    def withdraw(self, pages: Iterable[int]) -> None:
        """Allocate and share these pages no more; those with references stay until they have none.

        Cached pages among them leave the cache.
        """
        for page in pages:
            self._withdrawn[page] = 1
            if (key := self._keys[page]) is not None:
                self._evict(page, key)
            if self._references[page] == 0:
                del self._free[page]
                self.pages -= 1

    def restore(self, pages: Iterable[int]) -> None:
        """Allocate these withdrawn pages again."""
        for page in pages:
            self._withdrawn[page] = 0
            if self._references[page] == 0:
                self._free[page] = None
                self._free.move_to_end(page, last=False)
                self.pages += 1

    def _evict(self, page: int, key: bytes) -> None:
        """Remove the key of a cached page that is about to be given to a sequence."""
        self._forget(page, key)

    def _forget(self, page: int, key: bytes) -> None:
        del self._pages_of[self._groups[page]][key]
        self._keys[page] = None
