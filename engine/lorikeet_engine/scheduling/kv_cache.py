"""The allocation of KV pages, their sharing by reference counts, and the prefix cache.

A page is an integer: its index in the KV tensor. Only full pages have a key and can be shared, so
a page that can still be written to has one owner. A page without references keeps its key and
contents until it is allocated again, least recently used first.
"""

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Reversible


class SequencePages:
    """The KV pages of one sequence, in the order of its tokens, and how far they are filled.

    computed: how many tokens' keys and values the steps launched so far put there.
    written: how many the steps read so far have put there.
    """

    __slots__ = ("_keys", "_page_size", "_root", "_tokens", "computed", "pages", "written")

    def __init__(
        self, tokens: list[int], page_size: int, salt: str = "", adapter_digest: str | None = None
    ) -> None:
        """Start without pages. tokens: those that the host has; they only grow at their end."""
        self.pages: array[int] = array("i")  # not a list: page tables are joined bytes
        self.computed = self.written = 0
        self._tokens, self._page_size = tokens, page_size
        self._root = _hash(json.dumps([salt, adapter_digest]).encode())
        self._keys: list[bytes] = []

    def keys(self, pages: int) -> list[bytes]:
        """The keys of the first pages, which `tokens` must fill.

        key 0 = H(H(salt, adapter digest), tokens of page 0); key i = H(key i−1, tokens of page i).
        Equal keys therefore mean equal tokens from the start, under one adapter and one tenant's
        salt.
        """
        size = self._page_size
        for page in range(len(self._keys), pages):
            before = self._keys[-1] if self._keys else self._root
            span = self._tokens[page * size : (page + 1) * size]
            self._keys.append(_hash(before + array("q", span).tobytes()))
        return self._keys[:pages]

    def unwritten_keys(self) -> list[bytes]:
        """The keys of the pages that `tokens` fill but that are not written yet."""
        written, full = self.written // self._page_size, len(self._tokens) // self._page_size
        return self.keys(full)[written:] if written < full else []

    def shareable_keys(self) -> list[bytes]:
        """The keys of the full pages that leave at least one token to compute logits from."""
        return self.keys((len(self._tokens) - 1) // self._page_size)


class KVCache:
    """Allocates `pages` KV pages of `page_size` tokens. All operations are O(pages named)."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self._references = [0] * pages
        self._keys: list[bytes | None] = [None] * pages
        self._page_of: dict[bytes, int] = {}
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

    def pages_for(self, tokens: int) -> int:
        """How many pages hold that many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, kv: SequencePages, tokens: int, spare: int) -> bool:
        """Give a sequence without pages enough for this many tokens, cached ones where it can.

        Returns False and gives none if fewer than `spare` pages would stay free.
        """
        shared = self.find(kv.shareable_keys())
        self.share(shared)
        fresh = self.pages_for(tokens) - len(shared)
        if fresh + spare > self.free:
            self.release(shared)
            return False
        kv.pages = array("i", shared + self.take(fresh))
        kv.computed = kv.written = len(shared) * self.page_size
        return True

    def grow(self, kv: SequencePages, tokens: int) -> bool:
        """Give a sequence the pages it lacks for this many tokens; False if too few are free."""
        missing = self.pages_for(tokens) - len(kv.pages)
        if missing > self.free:
            return False
        if missing:
            kv.pages.extend(self.take(missing))
        return True

    def publish_written(self, kv: SequencePages, end: int) -> None:
        """Let others find a sequence's full pages; its keys and values are written up to `end`."""
        first, full = kv.written // self.page_size, end // self.page_size
        kv.written = end
        if first < full:
            for page, key in zip(kv.pages[first:full], kv.keys(full)[first:], strict=True):
                self.publish(page, key)

    def clear(self, kv: SequencePages) -> None:
        """Take back all pages of a sequence, if it has any."""
        self.release(kv.pages)
        kv.pages = array("i")
        kv.computed = kv.written = 0

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The cached pages of the longest run of keys from the first; adds no references."""
        found: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each page that `find` gave."""
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
                del self._page_of[key]
                self._keys[page] = None
            self._references[page] = 1
            taken.append(page)
        return taken

    def publish(self, page: int, key: bytes) -> None:
        """Let others find a full page by its key; if the key is taken, the page stays private."""
        if self._keys[page] is None and key not in self._page_of:
            self._keys[page] = key
            self._page_of[key] = page

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


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=32).digest()
