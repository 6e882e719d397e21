"""Which KV page is whose: allocation, sharing by reference counts, and the cache of prefixes.

A page is an integer: its index in the KV tensor. Only full pages have a key and can be shared, so
a page that somebody can still write to has one owner. A page that nobody refers to keeps its key
and contents until it is given out again, least recently used first.
"""

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Reversible


class PrefixKeys:
    """The keys of one sequence's full pages.

    key 0 = H(H(salt, adapter digest), tokens of page 0); key i = H(key i−1, tokens of page i).
    Equal keys therefore mean equal tokens from the start, under one adapter and one tenant's salt.
    """

    def __init__(self, page_size: int, salt: str = "", adapter_digest: str = "") -> None:
        self._page_size = page_size
        self._root = _hash(json.dumps([salt, adapter_digest]).encode())
        self._keys: list[bytes] = []

    def first(self, pages: int, tokens: list[int]) -> list[bytes]:
        """The keys of the first `pages` pages of `tokens`, which only ever grow at their end."""
        for page in range(len(self._keys), pages):
            before = self._keys[-1] if self._keys else self._root
            span = tokens[page * self._page_size : (page + 1) * self._page_size]
            self._keys.append(_hash(before + array("q", span).tobytes()))
        return self._keys[:pages]


class KVCache:
    """The accounts of `pages` KV pages of `page_size` tokens. All operations are O(pages named)."""

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
        """Pages that `take` can give out, cached ones included."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that somebody refers to."""
        return self.pages - len(self._free)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold that many tokens."""
        return -(-tokens // self.page_size)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The cached pages of the longest run of keys from the first; refers to none of them."""
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
