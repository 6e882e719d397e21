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


class SequencePages:
    """The KV pages of one sequence, in the order of its tokens, and what is in them.

    computed: how many tokens' keys and values a step given to the device has put there.
    written: how many are there for sure, since that step has been read.
    """

    __slots__ = ("_keys", "_page_size", "_root", "_tokens", "computed", "pages", "written")

    def __init__(
        self, tokens: list[int], page_size: int, salt: str = "", adapter_digest: str | None = None
    ) -> None:
        """tokens: those that are known, which only ever grow at their end."""
        self.pages: array[int] = array("i")  # not a list: page tables are joined bytes
        self.computed = self.written = 0
        self._tokens, self._page_size = tokens, page_size
        self._root = _hash(json.dumps([salt, adapter_digest]).encode())
        self._keys: list[bytes] = []

    def keys(self, pages: int) -> list[bytes]:
        """The keys of the first pages, which known tokens must fill.

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

    def coming_keys(self) -> list[bytes]:
        """The keys of the pages that known tokens will fill once they are written."""
        written, known = self.written // self._page_size, len(self._tokens) // self._page_size
        return self.keys(known)[written:] if written < known else []

    def shareable_keys(self) -> list[bytes]:
        """The keys of the full pages that leave a token to compute logits from."""
        return self.keys((len(self._tokens) - 1) // self._page_size)


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

    def allocate(self, kv: SequencePages, tokens: int, spare: int) -> bool:
        """Give a sequence that has none pages for so many tokens, cached ones where there are.

        False, and nothing, where that would leave fewer than `spare` free.
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
        """Give a sequence what it lacks for so many tokens; False where too few are free."""
        missing = self.pages_for(tokens) - len(kv.pages)
        if missing > self.free:
            return False
        if missing:
            kv.pages.extend(self.take(missing))
        return True

    def publish_written(self, kv: SequencePages, end: int) -> None:
        """Keys and values up to `end` are in the sequence's pages: let others find full ones."""
        first, full = kv.written // self.page_size, end // self.page_size
        kv.written = end
        if first < full:
            for page, key in zip(kv.pages[first:full], kv.keys(full)[first:], strict=True):
                self.publish(page, key)

    def clear(self, kv: SequencePages) -> None:
        """Take back what a sequence has, if it has any."""
        self.release(kv.pages)
        kv.pages = array("i")
        kv.computed = kv.written = 0

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
