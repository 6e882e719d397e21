"""KV pages of sequences, and the prefix cache.

Layers form groups (models/kv_groups.py); a sequence has its own pages in each group. Groups whose
layers see only a window free pages while the sequence grows: those before everything that the token
after the last full page sees. Freed pages stay cached until they are needed. So a prefix is found
as long as the pages of its last window are cached, and all pages of the other groups.
"""

import hashlib
import json
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest

from lorikeet_engine.scheduling.page_needs import PageNeeds
from lorikeet_engine.scheduling.page_pool import PagePool

TokenIds = tuple[int, ...] | list[int]
"""Tokens of a sequence: a tuple, the prompt that choices share, or a list of its own."""


class PageKeys:
    """Keys of the full pages of a prompt, hashed once for all its choices.

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
        """Hash all of the prompt. Takes 1 to 2 µs a page: call on no thread that steps."""
        self.page_size, self.adapter_digest = page_size, adapter_digest
        self.root = _hash(json.dumps([salt, adapter_digest]).encode())
        self.keys: list[bytes] = []
        self.extend(self.keys, prompt, len(prompt) // page_size)

    def extend(self, keys: list[bytes], tokens: Sequence[int], pages: int) -> None:
        """Append the missing keys of the first `pages` pages, which `tokens` must fill."""
        first, page_bytes = len(keys), self.page_size * 8
        key = keys[-1] if keys else self.root
        data = array("q", tokens[first * self.page_size : pages * self.page_size]).tobytes()
        for start in range(0, len(data), page_bytes):
            key = _hash(key + data[start : start + page_bytes])
            keys.append(key)


class SequencePages:
    """KV pages of one sequence, and the state of their contents.

    pages: pages of each group, in the order of tokens; empty without any.
    first: number of leading pages that windowed groups have freed.
    computed: tokens whose keys and values the launched steps have put into the pages.
    written: tokens whose keys and values the steps read so far have put into the pages.
    announced: number of first pages that KVCache has told others about, written or not.
    score_from: first token whose next token is to be scored, for which its logits are needed; None
        where only the last token's logits are needed.
    awaited: key of a page that another sequence was about to write at the last check.
    tokens: tokens known to the host, at first the prompt; they only grow at their end.
    """

    __slots__ = (
        "_keys",
        "_prompt_keys",
        "announced",
        "awaited",
        "computed",
        "first",
        "pages",
        "score_from",
        "tokens",
        "written",
    )

    def __init__(self, tokens: TokenIds, prompt_keys: PageKeys) -> None:
        """Start without pages."""
        self.pages: list[array[int]] = []  # arrays: page tables are joined from their bytes
        self.first = self.computed = self.written = self.announced = 0
        self.score_from: int | None = None
        self.awaited: bytes | None = None
        self.tokens, self._prompt_keys = tokens, prompt_keys
        self._keys = prompt_keys.keys  # shared until the sequence has more keys

    @property
    def adapter_digest(self) -> str | None:
        """Adapter under which keys and values are computed; None for the base model alone."""
        return self._prompt_keys.adapter_digest

    def keys(self, pages: int) -> list[bytes]:
        """Return the keys of the first `pages` pages, which `tokens` must fill."""
        if len(self._keys) < pages:
            if self._keys is self._prompt_keys.keys:
                self._keys = self._keys.copy()
            self._prompt_keys.extend(self._keys, self.tokens, pages)
        return self._keys[:pages]

    def full_keys(self) -> list[bytes]:
        """Return the keys of all pages that `tokens` fill."""
        return self.keys(len(self.tokens) // self._prompt_keys.page_size)

    def shareable_keys(self) -> list[bytes]:
        """Return the keys of the full pages before all tokens whose logits are needed."""
        tokens = len(self.tokens) - 1 if self.score_from is None else self.score_from
        return self.keys(tokens // self._prompt_keys.page_size)


class KVCache(PagePool):
    """PagePool for sequences. All operations are O(pages named).

    page_size, windows, step_tokens: as in PageNeeds.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        windows: tuple[int | None, ...] = (None,),
        step_tokens: int = 0,
    ) -> None:
        super().__init__(pages, len(windows))
        self.page_size = page_size
        self._needs = PageNeeds(page_size, windows, step_tokens)
        self._whole, self._windowed = self._needs.whole, self._needs.windowed
        # Key → number of sequences that are about to write such a page.
        self._unwritten: Counter[bytes] = Counter()

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that hold N tokens."""
        return -(-tokens // self.page_size)

    def may_all_grow(self, tokens: int) -> bool:
        """Whether the free pages suffice for N more tokens, whichever sequences these belong to."""
        return tokens * (self._whole + self._windowed) <= self.free

    def most_pages(self, tokens: int) -> int:
        """Return the pages that a sequence of N tokens needs if none are cached."""
        return self._needs.in_steps(tokens)

    def pages_lacking(self, pages: int, spare: int) -> int:
        """Return the number of pages to free before `allocate` can give `pages`; 0 or less if none.

        spare: sequences that must still be able to grow by a page in each group.
        """
        return pages + spare * (self._whole + self._windowed) - self.free

    def allocate(self, kv: SequencePages, tokens: int, spare: int) -> bool:
        """Give a sequence without pages those of N tokens, cached ones where possible.

        Windowed groups get the pages of the first window; `grow` adds the others later. Returns
        False, and gives none, if too few pages would be left for one step of the sequence or for
        `spare` others to grow.
        """
        needs, keys, total = self._needs, kv.shareable_keys(), self.pages_for(tokens)
        cached = self.find(keys) if self._whole else []
        hit = self._hit(keys, len(cached)) if self._windowed else len(cached)
        first, end = 0, total
        if self._windowed:
            first = needs.first(hit * self.page_size)
            end = min(total, first + needs.window_pages)
        shared = [cached[:hit]] if self._whole else []
        for pages_of in self._pages_of[len(shared) :]:
            begin = first if len(shared) >= self._whole else 0
            shared.append([pages_of[key] for key in keys[begin:hit]])
        for pages in shared:
            self.share(pages)
        step = min(total - end, self.pages_for(needs.step_tokens))
        wanted = self._whole * (total - hit) + self._windowed * (end - hit + step)
        if self.pages_lacking(wanted, spare) > 0:
            self._release_all(shared)
            return False
        kv.pages = [array("i", pages) for pages in shared]
        kv.first = first
        self._extend(kv, total - hit, end - hit)
        kv.computed = kv.written = hit * self.page_size
        keys = kv.full_keys()
        kv.announced = len(keys)
        self._unwritten.update(keys[hit:])
        return True

    def awaits_prefix(self, kv: SequencePages) -> bool:
        """Whether a sequence without pages would compute a page that another is about to write.

        O(1) while the last of these pages is not written.
        """
        if kv.awaited is not None and kv.awaited in self._unwritten:
            return True
        keys = kv.shareable_keys()
        found = len(self.find(keys)) if self._whole else self._hit(keys, 0)
        # Pages that are about to be written follow the cached ones without a gap.
        end = bisect_left(keys, True, found, key=lambda key: key not in self._unwritten)
        kv.awaited = keys[end - 1] if end > found else None
        return end > found

    def reach(self, kv: SequencePages, tokens: int, spare: int) -> int:
        """Return how many of N tokens a sequence can get pages for while `spare` others grow."""
        if not self._windowed:
            return tokens
        groups = self._whole + self._windowed
        more = max(0, self.free - spare * groups) // self._windowed
        return min(tokens, (kv.first + len(kv.pages[-1]) + more) * self.page_size)

    def grow(self, kv: SequencePages, tokens: int) -> bool:
        """Give a sequence the missing pages for N tokens; return False if too few are free."""
        end = self.pages_for(tokens)
        whole = max(0, end - len(kv.pages[0])) if self._whole else 0
        windowed = max(0, end - kv.first - len(kv.pages[-1])) if self._windowed else 0
        if whole or windowed:
            if whole * self._whole + windowed * self._windowed > self.free:
                return False
            self._extend(kv, whole, windowed)
        return True

    def publish_written(self, kv: SequencePages, end: int) -> None:
        """Publish a sequence's full pages; keys and values are written up to token `end`.

        Windowed groups then free the pages that no finder of the last full page needs.
        """
        first, full = kv.written // self.page_size, end // self.page_size
        kv.written = end
        if first == full:
            return
        keys = kv.keys(full)
        self._no_longer_unwritten(keys[first : kv.announced])
        for group, pages in enumerate(kv.pages):
            before = 0 if group < self._whole else kv.first
            for page, key in zip(pages[first - before : full - before], keys[first:], strict=True):
                self.publish(page, key, kv.adapter_digest, group)
        if self._windowed:
            self._give_back(kv, self._needs.first(full * self.page_size))

    def clear(self, kv: SequencePages) -> None:
        """Take back all pages of a sequence, if it has any."""
        self._no_longer_unwritten(kv.keys(kv.announced)[kv.written // self.page_size :])
        self._release_all(kv.pages)
        kv.pages = []
        kv.first = kv.computed = kv.written = kv.announced = 0

    def _hit(self, keys: list[bytes], most: int) -> int:
        """Return how many first pages can be shared: all pages seen after them are cached.

        most: cached pages of the first group, if that group needs all its pages.
        """
        end, windowed = most if self._whole else len(keys), self._pages_of[self._whole :]
        for pages in self._pages_of[1 : self._whole]:
            end = next((i for i in range(end) if keys[i] not in pages), end)
        at = end
        while at > self._needs.first(end * self.page_size):
            at -= 1
            if any(keys[at] not in pages for pages in windowed):
                end = at
        return end

    def _extend(self, kv: SequencePages, whole: int, windowed: int) -> None:
        for group, pages in enumerate(kv.pages):
            pages.extend(self.take(whole if group < self._whole else windowed))

    def _give_back(self, kv: SequencePages, before: int) -> None:
        """Take back a sequence's pages of windowed groups that precede this page."""
        count = before - kv.first
        if count > 0:
            windowed = kv.pages[self._whole :]
            self._release_all([pages[:count] for pages in windowed])
            for pages in windowed:
                del pages[:count]
            kv.first = before

    def _release_all(self, pages: Sequence[Sequence[int]]) -> None:
        """Release the pages of all groups so that pages of the same tokens are evicted together.

        That order holds where the groups have equally many pages.
        """
        if len(pages) <= 1:
            for only in pages:
                self.release(only)
            return
        from_end = chain.from_iterable(zip_longest(*map(reversed, pages)))
        self.release([page for page in from_end if page is not None][::-1])

    def _no_longer_unwritten(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if self._unwritten[key] > 1:
                self._unwritten[key] -= 1
            else:
                del self._unwritten[key]


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=32).digest()
