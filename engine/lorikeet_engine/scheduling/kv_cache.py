"""The allocation of KV pages, their sharing by reference counts, and the prefix cache.

A page is an integer: its index in the KV tensor. Only full pages have a key and can be shared, so
a page that can still be written to has one owner. A page without references keeps its key and
contents until it is allocated again, least recently used first.
"""

import hashlib
import json
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Reversible, Sequence


class PageKeys:
    """The keys of the pages that a prompt fills, hashed once for all its choices.

    key 0 = H(H(salt, adapter digest), tokens of page 0); key i = H(key i−1, tokens of page i).
    Equal keys therefore mean equal tokens from the start, under one adapter and one tenant's salt.
    """

    __slots__ = ("adapter_digest", "keys", "page_size", "root")

    def __init__(
        self,
        prompt: Sequence[int],
        page_size: int,
        salt: str = "",
        adapter_digest: str | None = None,
    ) -> None:
        """Hash all of the prompt: 1 to 2 µs a page, so not on the thread that steps."""
        self.page_size, self.adapter_digest = page_size, adapter_digest
        self.root = _hash(json.dumps([salt, adapter_digest]).encode())
        self.keys: list[bytes] = []
        self.extend(self.keys, prompt, len(prompt) // page_size)

    def extend(self, keys: list[bytes], tokens: Sequence[int], pages: int) -> None:
        """Add the keys that are missing of the first pages, which `tokens` must fill."""
        first, page_bytes = len(keys), self.page_size * 8
        key = keys[-1] if keys else self.root
        data = array("q", tokens[first * self.page_size : pages * self.page_size]).tobytes()
        for start in range(0, len(data), page_bytes):
            key = _hash(key + data[start : start + page_bytes])
            keys.append(key)


class SequencePages:
    """The KV pages of one sequence, in the order of its tokens, and how far they are filled.

    computed: how many tokens' keys and values the steps launched so far put there.
    written: how many the steps read so far have put there.
    announced: how many of its first pages KVCache has told others of, written or not.
    score_from: the first token behind which the next one is to be scored, so that its logits are
    needed; None where only those of the last token are.
    awaited: the key of a page that another sequence was to write when this one last asked.
    """

    __slots__ = (
        "_keys",
        "_prompt_keys",
        "_tokens",
        "announced",
        "awaited",
        "computed",
        "pages",
        "score_from",
        "written",
    )

    def __init__(self, tokens: list[int], prompt_keys: PageKeys) -> None:
        """Start without pages.

        tokens: those that the host has, a prompt's at first; they only grow at their end.
        """
        self.pages: array[int] = array("i")  # not a list: page tables are joined bytes
        self.computed = self.written = self.announced = 0
        self.score_from: int | None = None
        self.awaited: bytes | None = None
        self._tokens, self._prompt_keys = tokens, prompt_keys
        self._keys = prompt_keys.keys.copy()

    @property
    def adapter_digest(self) -> str | None:
        """The adapter under which they are computed; None for the base model alone."""
        return self._prompt_keys.adapter_digest

    def keys(self, pages: int) -> list[bytes]:
        """The keys of the first pages, which `tokens` must fill."""
        if len(self._keys) < pages:
            self._prompt_keys.extend(self._keys, self._tokens, pages)
        return self._keys[:pages]

    def full_keys(self) -> list[bytes]:
        """The keys of all the pages that `tokens` fill."""
        return self.keys(len(self._tokens) // self._prompt_keys.page_size)

    def shareable_keys(self) -> list[bytes]:
        """The keys of the full pages that leave all tokens whose logits are needed."""
        tokens = len(self._tokens) - 1 if self.score_from is None else self.score_from
        return self.keys(tokens // self._prompt_keys.page_size)


class KVCache:
    """Allocates `pages` KV pages of `page_size` tokens. All operations are O(pages named)."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self._references = [0] * pages
        self._keys: list[bytes | None] = [None] * pages
        self._adapters: list[str | None] = [None] * pages  # of pages with a key, by digest
        self._page_of: dict[bytes, int] = {}
        # By key, how many sequences are to write such a page.
        self._unwritten: Counter[bytes] = Counter()
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
        keys = kv.full_keys()
        kv.announced = len(keys)
        self._unwritten.update(keys[len(shared) :])
        return True

    def awaits_prefix(self, kv: SequencePages) -> bool:
        """Whether a sequence without pages would compute some that another is about to write.

        O(1) while the last of them is not written.
        """
        if kv.awaited is not None and kv.awaited in self._unwritten:
            return True
        keys = kv.shareable_keys()
        found = len(self.find(keys))
        # Those that are to be written follow the cached ones without a gap.
        end = bisect_left(keys, True, found, key=lambda key: key not in self._unwritten)
        kv.awaited = keys[end - 1] if end > found else None
        return end > found

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
            keys = kv.keys(full)
            self._no_longer_unwritten(keys[first : kv.announced])
            for page, key in zip(kv.pages[first:full], keys[first:], strict=True):
                self.publish(page, key, kv.adapter_digest)

    def clear(self, kv: SequencePages) -> None:
        """Take back all pages of a sequence, if it has any."""
        self._no_longer_unwritten(kv.keys(kv.announced)[kv.written // self.page_size :])
        self.release(kv.pages)
        kv.pages = array("i")
        kv.computed = kv.written = kv.announced = 0

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

    def publish(self, page: int, key: bytes, adapter_digest: str | None = None) -> None:
        """Let others find a full page by its key; if the key is taken, the page stays private.

        adapter_digest: of what it was computed with.
        """
        if self._keys[page] is None and key not in self._page_of:
            self._keys[page], self._adapters[page] = key, adapter_digest
            self._page_of[key] = page

    def forget(self, pages: Iterable[int]) -> None:
        """Let nobody find these pages any more, whoever else may have references to them."""
        for page in pages:
            key = self._keys[page]
            if key is not None:
                del self._page_of[key]
                self._keys[page] = None
                if self._references[page] == 0:
                    self._free.move_to_end(page, last=False)

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

    def _no_longer_unwritten(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if self._unwritten[key] > 1:
                self._unwritten[key] -= 1
            else:
                del self._unwritten[key]


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=32).digest()
