"""KV pages of sequences, and the prefix cache.

Layers form groups (models/kv_groups.py); a sequence has its own pages in each group. Where a
group's layers attend only to a sliding window, a growing sequence frees the pages that no later
token attends to. Freed pages stay cached until they are needed. So a prefix is found as long as the
cache has all its pages in the groups without a window, and the pages of its last window in the
groups with a window.

In a model with delta nets, a prefix is found only up to a page behind which a state is cached
(state_pool.py). States are saved behind the last full page of a prompt, and behind the last page
that a prompt shares with earlier prompts, so that the next prompt with this beginning finds the
state (as in Marconi, arXiv 2411.19379), and behind the last page before an activated LoRA's
invocation.

A decoding sequence saves its state about every state_piece tokens, and drops the state that it
saved before in the same answer. So an answer of any length leaves one cached state, with which the
next turn of a chat begins near the answer's end. With a copy that costs as much as a prompt token,
an answer of A tokens and probability p of a next turn, an interval of √(2 A / p) tokens costs
least: 64 for A = 600 and p = 0.3.

Pages that leave the cache may be stored in host memory, and then on the disk (host_pages.py). A
waiting sequence whose prefix continues there fetches the pages before it begins. A sequence that is
alone begins at once if the fetch is short: its step is laid out while the pages come, and launched
when they are there.
"""

import hashlib
import json
from array import array
from bisect import bisect_left
from collections import ChainMap, Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

from lorikeet_engine.kernels.delta_net import CHUNK
from lorikeet_engine.scheduling.border_policy import Evicted
from lorikeet_engine.scheduling.host_pages import (
    CachedPage,
    Fetch,
    HostPages,
    PageCopy,
    StateFetch,
)
from lorikeet_engine.scheduling.page_needs import PageNeeds
from lorikeet_engine.scheduling.page_pool import PagePool
from lorikeet_engine.scheduling.state_pool import StatePool

TokenIds = tuple[int, ...] | list[int]
"""Tokens of a sequence: at first the prompt's tuple, which its choices share; later its own
list.
"""


_STATE = -1  # in place of a group of layers: the state behind a page


class PageKeys:
    """Keys by which the full pages of a prompt are found in the cache; hashed once for all choices.

    The salt is a tenant's text that keeps its cached pages apart from other tenants' pages.

    key 0 = H(H(salt), tokens of page 0); key i = H(key i−1, tokens of page i). On the first page
    with a token that an adapter changes, H(key i−1, adapter digest, position of that token) takes
    the place of key i−1. Equal keys therefore mean equal tokens from the start, which one adapter
    changes from the same token on, under one tenant's salt. Pages before an activated LoRA's
    invocation have the base model's keys.

    adapter_digest: adapter that changes some of the prompt's tokens; None for the base model alone.
    active_from: position of the first token that the adapter changes; 0 without an adapter.
    pages_of_base: number of first pages that no adapter changes, if an adapter changes a later one.
    """

    __slots__ = (
        "_adapter",
        "_root",
        "active_from",
        "adapter_digest",
        "keys",
        "page_size",
        "pages_of_base",
    )

    def __init__(
        self,
        prompt: Sequence[int],
        page_size: int,
        salt: str = "",
        adapter_digest: str | None = None,
        active_from: int = 0,
    ) -> None:
        """Hash all full pages of the prompt. Takes 1 to 2 µs a page: do not call on the engine's
        thread.

        salt: keeps tenants' cached prefixes apart.
        adapter_digest: adapter that changes some of the prompt's tokens; None: the base model
            computes all.
        active_from: position of the first token that the adapter changes.
        """
        self.page_size, self.adapter_digest = page_size, adapter_digest
        self.active_from, self.pages_of_base = active_from, active_from // page_size
        self._root = _hash(json.dumps(salt).encode())
        self._adapter: bytes | None = None
        if adapter_digest is not None:
            self._adapter = json.dumps([adapter_digest, active_from]).encode()
        self.keys: list[bytes] = []
        self.extend(self.keys, prompt, len(prompt) // page_size)

    def extend(self, keys: list[bytes], tokens: Sequence[int], pages: int) -> None:
        """Append keys to a sequence's list until it has the keys of the first `pages` pages.

        keys: keys of the sequence's first pages.
        tokens: all tokens of the sequence; they must fill `pages` pages.
        """
        first, page_bytes = len(keys), self.page_size * 8
        key = keys[-1] if keys else self._root
        data = array("q", tokens[first * self.page_size : pages * self.page_size]).tobytes()
        for page, start in enumerate(range(0, len(data), page_bytes), first):
            if page == self.pages_of_base and self._adapter is not None:
                key = _hash(key + self._adapter)
            key = _hash(key + data[start : start + page_bytes])
            keys.append(key)


class StateSave(NamedTuple):
    """State of delta nets (linear attention) that a step copies to a slot of the cache.

    tokens: the state is the one behind so many first tokens of the step's chunk.
    slot: slot of the cache that receives the copy.
    """

    tokens: int
    slot: int


class StateUse(NamedTuple):
    """Use that a step makes of a sequence's state of delta nets (linear attention).

    slot: slot of the state, which the step updates.
    restore: slot of the state to copy into `slot` before the step: a cached state or, after a
        rejected drafted token, the backup; None: nothing is copied.
    saves: states to copy to the cache during the step.
    copy: slot of the cache into which the state in `slot` is copied before the step; None: nothing
        is copied.
    backup: slot into which the state in `slot` is copied before a step with drafted tokens. If one
        of these is rejected, a later step begins with this copy. None without drafted tokens.
    """

    slot: int
    restore: int | None
    saves: tuple[StateSave, ...]
    copy: int | None = None
    backup: int | None = None


class SequencePages:
    """KV pages of one sequence, and the number of tokens written to them.

    A group of layers has its keys and values in the same pages. The state is that of delta nets
    (linear attention).

    pages: for each group of layers, the sequence's pages in the order of tokens; an empty list if
        the sequence has no pages.
    first: number of leading pages that groups with a window have freed.
    computed: number of tokens whose keys and values the steps launched so far write.
    written: number of tokens whose keys and values are known to be written, by the steps that the
        host has read.
    announced: number of first pages that other sequences wait for, because this sequence is about
        to write them.
    score_from: first prompt token whose logits or hidden state are still needed: to score the token
        after it, or for a mean of hidden states; None if only the last prompt token's are needed.
    background: whether foreground sequences wait for no page that this sequence is about to write.
    awaited: key of a page that another sequence was about to write at the last check.
    state: slot of the sequence's state; None for a sequence without pages, and for a model without
        delta nets.
    save_at: numbers of first tokens behind which the state is to be cached, ascending.
    saving: by number of first tokens, the slots into which the steps launched so far copy the state
        behind these tokens.
    saved: number of first tokens behind which the state was last saved; at first, the number of
        cached tokens with which the sequence began.
    answered: number of first tokens behind which the answer's latest cached state stands, which the
        answer's next one replaces; 0: there is none.
    restore: slot of the cached state with which the sequence's first step begins; None if there is
        none, or once that step is planned.
    backup: slot with a copy of the state before the last step with drafted tokens, while a token of
        that step may still be rejected or its tokens are to be computed again; else None.
    rolled_back: whether the next step begins with the state in `backup`.
    tokens: tokens that the host knows, at first the prompt; new ones are only appended.
    tenant: tenant for whom the tokens are computed.
    fetch: last fetch of pages from host memory that the sequence waited for; None if there was none
        since it last had pages.
    has_fetched: whether the sequence has begun a fetch since it last had pages.
    cached_before: number of tokens that were cached on the GPU before the first of these fetches.
    """

    __slots__ = (
        "_keys",
        "_prompt_keys",
        "announced",
        "answered",
        "awaited",
        "background",
        "backup",
        "cached_before",
        "computed",
        "fetch",
        "first",
        "has_fetched",
        "pages",
        "restore",
        "rolled_back",
        "save_at",
        "saved",
        "saving",
        "score_from",
        "state",
        "tenant",
        "tokens",
        "written",
    )

    def __init__(
        self,
        tokens: TokenIds,
        prompt_keys: PageKeys,
        tenant: str = "",
        *,
        background: bool = False,
    ) -> None:
        """Start without pages.

        prompt_keys: keys of the prompt's full pages.
        """
        self.background = background
        self.pages: list[array[int]] = []  # arrays: page tables are joined from their bytes
        self.first = self.computed = self.written = self.announced = 0
        self.score_from: int | None = None
        self.awaited: bytes | None = None
        self.state: int | None = None
        self.restore: int | None = None
        self.backup: int | None = None
        self.rolled_back = False
        self.save_at: tuple[int, ...] = ()
        self.saving: dict[int, int] = {}
        self.saved = self.answered = 0
        self.fetch: Fetch | None = None
        self.has_fetched, self.cached_before = False, 0
        self.tokens, self._prompt_keys, self.tenant = tokens, prompt_keys, tenant
        self._keys = prompt_keys.keys  # shared until the sequence has more keys

    def adapter_of(self, page: int) -> str | None:
        """Return the digest of the adapter that changes tokens of a page; None if none does."""
        keys = self._prompt_keys
        return keys.adapter_digest if page >= keys.pages_of_base else None

    @property
    def pages_of_base(self) -> int:
        """Number of first pages that no adapter changes, if an adapter changes a later one."""
        return self._prompt_keys.pages_of_base

    @property
    def tokens_of_host(self) -> int:
        """Number of first tokens whose pages were fetched from the host. Correct only when the
        sequence begins: later, the tokens that its steps compute are counted, too.
        """
        return 0 if self.fetch is None else max(0, self.computed - self.cached_before)

    def keys(self, pages: int) -> list[bytes]:
        """Return the cache keys of the first `pages` pages, which the sequence must fill."""
        if len(self._keys) < pages:
            if self._keys is self._prompt_keys.keys:
                self._keys = self._keys.copy()
            self._prompt_keys.extend(self._keys, self.tokens, pages)
        return self._keys[:pages]

    def full_keys(self) -> list[bytes]:
        """Return the cache keys of all pages that the sequence's tokens fill."""
        return self.keys(len(self.tokens) // self._prompt_keys.page_size)

    def shareable_keys(self) -> list[bytes]:
        """Return the cache keys of the full pages before the first token whose logits are needed.

        Only these pages can be taken from the cache: logits exist only for tokens that are
        computed.
        """
        if self.score_from is None:
            return self.keys_before_last()
        return self.keys(self.score_from // self._prompt_keys.page_size)

    def keys_before_last(self) -> list[bytes]:
        """Return the cache keys of the full pages before the sequence's last token."""
        return self.keys((len(self.tokens) - 1) // self._prompt_keys.page_size)


class KVCache(PagePool):
    """PagePool that gives pages to sequences. A method's time is linear in the pages it handles.

    page_size: tokens of a page.
    windows: attention window of each group of layers; None for a group that attends to all tokens.
    step_tokens: maximum number of tokens that a step computes.
    states: slots for states of delta nets; None for a model without delta nets.
    state_piece: number of tokens in a piece. Kernels compute a sequence's tokens of a step in such
        pieces, and a step can save only the states at the ends of full pieces. A decoding sequence
        saves its state again only after at least this many tokens.
    host: host memory for pages that leave the cache; None if there is none.
    host_states: host memory for states that leave the cache; None if there is none, or if the model
        has no delta nets.
    evicted: keys of the pages that left the cache last; None where the number of pages is fixed.
    missed_tokens: tokens computed again whose pages are in `evicted`.
    """

    state_piece = CHUNK

    def __init__(
        self,
        pages: int,
        page_size: int,
        windows: tuple[int | None, ...] = (None,),
        step_tokens: int = 0,
        states: StatePool | None = None,
        host: HostPages | None = None,
        host_states: HostPages | None = None,
    ) -> None:
        super().__init__(pages, len(windows))
        self.page_size = page_size
        self._needs = PageNeeds(page_size, windows, step_tokens)
        self._whole, self._windowed = self._needs.whole, self._needs.windowed
        # For sequences in the foreground and in the background (True): key → number of them that
        # are about to write such a page.
        self._unwritten: dict[bool, Counter[bytes]] = {False: Counter(), True: Counter()}
        self.states, self.host, self.host_states = states, host, host_states
        if states is not None and host_states is not None:
            states.on_evict = self._store_state
        self._arriving: dict[tuple[int, bytes], Fetch] = {}  # by group of layers and key
        self.evicted: Evicted | None = None
        self.missed_tokens = 0

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages, in one group of layers, that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    @property
    def least_free_tokens(self) -> int:
        """Number of tokens for which the free pages suffice, whichever sequences get them."""
        return self.free // (self._whole + self._windowed)

    def may_all_grow(self, tokens: int) -> bool:
        """Whether the free pages suffice for `tokens` more tokens, whichever sequences get them."""
        return tokens <= self.least_free_tokens

    def most_pages(self, tokens: int) -> int:
        """Return the number of pages, in all groups of layers, that a sequence of `tokens` tokens
        needs if none of its pages is cached.
        """
        return self._needs.in_steps(tokens)

    def pages_lacking(self, pages: int, spare: int) -> int:
        """Return the number of pages that must be freed before a sequence can get `pages` pages.

        0 or less: enough pages are free.

        spare: number of other sequences; one free page per group is left for each of them.
        """
        return pages + spare * (self._whole + self._windowed) - self.free

    def allocate(self, kv: SequencePages, tokens: int, spare: int) -> bool:
        """Give pages for `tokens` tokens to a sequence that has none; take cached pages where
        possible.

        Groups with a window get the pages of the first window; `grow` adds the others later.
        Returns False and gives no pages if too few are free, or no slot for the state of delta
        nets.

        spare: number of other sequences; one free page per group is left for each of them.
        """
        needs, keys, total = self._needs, kv.shareable_keys(), self.pages_for(tokens)
        if self.states is not None and self.states.free < 2:  # one may be the state to begin with
            return False
        cached = self.find(keys) if self._whole else []
        hit = found = self._hit(keys, len(cached)) if self._windowed else len(cached)
        if self.states is not None:
            hit = self.states.longest(keys[:found])
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
        if self.evicted is not None:
            self.missed_tokens += self.page_size * self.evicted.run(keys[hit:])
        kv.pages = [array("i", pages) for pages in shared]
        kv.first = first
        self._extend(kv, total - hit, end - hit)
        kv.computed = kv.written = hit * self.page_size
        if self.states is not None:
            self._begin_state(kv, keys, hit, found)
        keys = kv.full_keys()
        kv.announced = len(keys)
        self._unwritten[kv.background].update(keys[hit:])
        return True

    def expected_hit(self, kv: SequencePages) -> int:
        """Estimate how many tokens of a sequence without pages are cached, by a few look-ups.

        The estimate is exact for a single group of layers.
        """
        keys, pages = kv.shareable_keys(), self._pages_of[0]
        if self.states is not None:
            return self.page_size * self.states.longest(keys)
        return self.page_size * bisect_left(keys, True, key=lambda key: key not in pages)

    def awaits_prefix(self, kv: SequencePages) -> bool:
        """Whether a sequence without pages would compute pages that another sequence is about to
        write.

        A sequence in the foreground waits for none in the background, which may pause.
        """
        unwritten = self._unwritten_for(kv)
        if kv.awaited is not None and kv.awaited in unwritten:
            return True
        keys = kv.shareable_keys()
        if self.states is not None and (not keys or keys[-1] not in unwritten):
            return False  # behind pages of another prompt, no state will be cached
        found = len(self.find(keys)) if self._whole else self._hit(keys, 0)
        # Pages that are about to be written follow the cached ones without a gap.
        end = bisect_left(keys, True, found, key=lambda key: key not in unwritten)
        kv.awaited = keys[end - 1] if end > found else None
        return end > found

    def awaits_fetch(self, kv: SequencePages, spare: int, *, alone: bool = False) -> bool:
        """Whether a sequence without pages waits for pages of its prefix from host memory or disk.

        Begins to fetch pages if that pays, once for each time that the sequence waits: with those
        that only the disk has, else without them.

        spare: number of other sequences; one free page per group is left for each of them.
        alone: whether there is no other sequence. The sequence then need not wait for a short
            fetch: the step that is being planned does (Fetch.in_step), unless it scores the prompt.
        """
        if self.host is None:
            return False
        if kv.fetch is not None and not kv.fetch.over:
            return True
        fetch = None
        if self.host.disk is not None:
            fetch = self._wanted_fetch(kv, spare, with_disk=True)
        fetch = fetch or self._wanted_fetch(kv, spare, with_disk=False)
        if fetch is not None and alone and kv.score_from is None:  # a plan's scores come once
            self._share_early(fetch)
        return fetch is not None and not fetch.in_step

    def _wanted_fetch(self, kv: SequencePages, spare: int, *, with_disk: bool) -> Fetch | None:
        """Return the fetch of pages of a sequence's prefix; begin it if there is none and it pays.

        with_disk: whether to count pages that only the disk has.
        """
        assert self.host is not None, "a fetch without a host"
        keys = kv.shareable_keys()
        hit, end = self._hit_with_host(keys, with_disk=with_disk)
        if self.states is not None:
            hit = self.states.longest(keys[:hit])
            end = self._longest_with_host(keys[:end], with_disk=with_disk)
        if end <= hit:
            return None
        begins = self._needed_from(end)
        lacking = [
            (group, key)
            for group, begin in enumerate(begins)
            for key in keys[begin:end]
            if key not in self._pages_of[group]
        ]
        state = None if self._has_state(keys[end - 1]) else keys[end - 1]
        wanted = lacking if state is None else [*lacking, (_STATE, state)]
        fetch = next((self._arriving[each] for each in wanted if each in self._arriving), None)
        if fetch is None and not kv.has_fetched:
            size = self.page_size
            more = 0 if state is None or self.host_states is None else self.host_states.page_bytes
            reads = 0
            if with_disk:
                reads = sum(key not in self.host.pages_of[group] for group, key in lacking)
            if self.host.pays(len(lacking), (end - hit) * size, hit * size, more, reads):
                kept = [
                    [pages[key] for key in keys[begin:end] if key in pages]
                    for pages, begin in zip(self._pages_of, begins, strict=True)
                ]
                fetch = self._begin_fetch(lacking, kept, spare, state)
                kv.has_fetched = fetch is not None
        if fetch is not None:
            if kv.fetch is None:
                kv.cached_before = hit * self.page_size
            kv.fetch = fetch
        return fetch

    def _share_early(self, fetch: Fetch) -> None:
        """Let sequences share the pages of a short fetch that has not begun to copy yet."""
        assert self.host is not None, "a fetch without a host"
        is_new = fetch in self.host.to_fetch and fetch.state is None
        if is_new and self.host.is_short(fetch.arrival):
            fetch.in_step = True
            for cached, (_, page) in zip(fetch.arrival.pages.values(), fetch.copies, strict=True):
                self.publish(page, cached.key, cached.adapter, cached.group, cached.tenant)

    def end_fetch(self, fetch: Fetch, damaged: bool) -> None:
        """Let sequences share the pages that a fetch has brought; drop them if they are damaged."""
        assert self.host is not None, "a fetch without a host"
        if fetch.in_step and damaged:
            self.forget(copy.page for copy in fetch.copies)
        for (slot, cached), (_, page) in zip(
            fetch.arrival.pages.items(), fetch.copies, strict=True
        ):
            del self._arriving[cached.group, cached.key]
            if not (damaged or fetch.in_step) and self.host.has(cached, slot):
                self.publish(page, cached.key, cached.adapter, cached.group, cached.tenant)
        if fetch.state is not None:
            self._end_state_fetch(fetch.state, damaged)
        self.host.end_fetch(fetch.arrival, damaged=damaged)
        self._release_all(fetch.kept)
        fetch.over = True

    def reach(self, kv: SequencePages, tokens: int, spare: int) -> int:
        """Return the number of tokens, at most `tokens`, for which a sequence can have pages.

        tokens: number of tokens wanted, from the sequence's start.
        spare: number of other sequences; one free page per group is left for each of them.
        """
        if not self._windowed:
            return tokens
        groups = self._whole + self._windowed
        more = max(0, self.free - spare * groups) // self._windowed
        return min(tokens, (kv.first + len(kv.pages[-1]) + more) * self.page_size)

    def grow(self, kv: SequencePages, tokens: int) -> bool:
        """Give a sequence the pages that it lacks to hold its first `tokens` tokens.

        Returns False and gives no pages if too few are free.
        """
        end = self.pages_for(tokens)
        whole = max(0, end - len(kv.pages[0])) if self._whole else 0
        windowed = max(0, end - kv.first - len(kv.pages[-1])) if self._windowed else 0
        if whole or windowed:
            if whole * self._whole + windowed * self._windowed > self.free:
                return False
            self._extend(kv, whole, windowed)
        return True

    def publish_written(self, kv: SequencePages, end: int) -> None:
        """Let other sequences share a sequence's full pages, whose contents are now written.

        In groups with a window, also free the pages that no later token attends to: neither of this
        sequence nor of another sequence that continues after its last full page.

        end: number of tokens, from the sequence's start, whose keys and values are written.
        """
        first, full = kv.written // self.page_size, end // self.page_size
        kv.written = end
        if kv.saving:
            self._publish_states(kv, end)
        if first == full:
            return
        keys = kv.keys(full)
        self._no_longer_unwritten(kv, keys[first : kv.announced])
        adapters = [kv.adapter_of(page) for page in range(first, full)]
        for group, pages in enumerate(kv.pages):
            before = 0 if group < self._whole else kv.first
            written = pages[first - before : full - before]
            for page, key, adapter in zip(written, keys[first:], adapters, strict=True):
                self.publish(page, key, adapter, group, kv.tenant)
        if self._windowed:
            self._give_back(kv, self._needs.first(full * self.page_size))

    def keep(self, name: str, kv: SequencePages, tokens: int) -> None:
        """Keep the full pages of a sequence's first tokens on the host, as a prompt of this name.

        Do nothing without a host, or unless all these tokens are written.
        """
        if self.host is None or kv.written < tokens:
            return
        keys = kv.keys(tokens // self.page_size)
        if self.states is not None and self.host_states is not None:
            keys = keys[: self.states.longest(keys)]
            states = [
                CachedPage(0, key, kv.adapter_of(len(keys) - 1), kv.tenant) for key in keys[-1:]
            ]
            self.host_states.keep(name, states)
            if not self.host_states.kept[name]:
                keys = []  # without the state, nothing finds the pages
        begins = self._needed_from(len(keys))
        self.host.keep(
            name,
            [
                CachedPage(group, key, kv.adapter_of(page), kv.tenant)
                for group, begin in enumerate(begins)
                for page, key in enumerate(keys[begin:], begin)
            ],
        )

    def store_kept(self) -> None:
        """Plan to copy pages of kept prompts to the host, as far as the GPU has them."""
        assert self.host is not None, "no pages on the host"
        for cached in self.host.take_to_keep():
            page = self._pages_of[cached.group].get(cached.key)
            if page is not None:
                self.host.store(cached, page)
        if self.states is not None and self.host_states is not None:
            for cached in self.host_states.take_to_keep():
                slot = self.states.slot_of(cached.key)
                if slot is not None:
                    self.host_states.store(cached, slot)

    def clear(self, kv: SequencePages) -> None:
        """Release all pages of a sequence, if it has any."""
        self._no_longer_unwritten(kv, kv.keys(kv.announced)[kv.written // self.page_size :])
        self._release_all(kv.pages)
        if self.states is not None and kv.state is not None:
            self._take_restore(kv)
            self.drop_backup(kv)
            for slot in (kv.state, *kv.saving.values()):
                self.states.release(slot)
            kv.state, kv.save_at, kv.saving = None, (), {}
            kv.saved = kv.answered = 0
        kv.pages, kv.fetch, kv.has_fetched = [], None, False
        kv.first = kv.computed = kv.written = kv.announced = 0

    def back_up_state(self, kv: SequencePages) -> bool:
        """Reserve kv.backup, a slot for a copy of the sequence's state before the next step.

        The copy is needed if a drafted token of that step is rejected. Returns False if no slot is
        free. A model without delta nets needs no slot.
        """
        if self.states is not None and kv.backup is None:
            kv.backup = self.states.take_to_save()
            return kv.backup is not None
        return True

    def roll_back(self, kv: SequencePages, start: int) -> None:
        """Have the sequence's next step compute its tokens again from token `start` on.

        That step begins with the state in kv.backup, which was copied before the step whose drafted
        token was rejected.
        """
        assert kv.backup is not None, "a drafted token without a backup of the state"
        kv.rolled_back, kv.computed = True, start

    def drop_backup(self, kv: SequencePages) -> None:
        """Release kv.backup, the slot that `back_up_state` reserved, if there is one."""
        if self.states is not None and kv.backup is not None:
            self.states.release(kv.backup)
        kv.backup, kv.rolled_back = None, False

    def state_use(
        self, kv: SequencePages, start: int, end: int, *, drafted: bool = False
    ) -> StateUse:
        """Return the use that the next step makes of a sequence's state, in a model with delta
        nets.

        Reserves slots for the states that the step saves. A state that falls within a piece
        (`state_piece`) of the step's tokens is saved before that piece instead, since kernels have
        states only after whole pieces. If no slot is free, no state is saved.

        start, end: the tokens of the sequence that the step computes, without drafted ones.
        drafted: whether the step has drafted tokens; back_up_state must have reserved a slot then.
        """
        assert self.states is not None
        assert kv.state is not None, "a step of a sequence without a state"
        if kv.rolled_back:
            kv.rolled_back, restore = False, kv.backup
            if not drafted:
                self.drop_backup(kv)  # the step reads it before it writes another state there
            return StateUse(kv.state, restore, ())
        saves, copy = list[StateSave](), None
        in_answer = start >= kv.announced * self.page_size
        if in_answer and start - kv.saved >= self.state_piece and not start % self.page_size:
            copy = self._take_to_save(kv, start)
        for tokens in kv.save_at:
            behind = tokens - (tokens - start) % self.state_piece
            if not start < behind <= end or behind % self.page_size or behind in kv.saving:
                continue
            slot = self._take_to_save(kv, behind)
            if slot is not None:
                saves.append(StateSave(behind - start, slot))
        return StateUse(kv.state, self._take_restore(kv), tuple(saves), copy, kv.backup)

    def forget_keys(self, keys: Iterable[bytes]) -> None:
        """Remove these keys in all groups, so that no sequence finds their pages and states."""
        keys = list(keys)
        super().forget_keys(keys)
        for kept in (self.states, self.host, self.host_states):
            if kept is not None:
                kept.forget_keys(keys)

    def forget_adapter(self, digest: str) -> None:
        """Remove the keys of all pages and states computed with an adapter."""
        super().forget_adapter(digest)
        for kept in (self.states, self.host, self.host_states):
            if kept is not None:
                kept.forget_adapter(digest)

    def _evict(self, page: int, key: bytes) -> None:
        if self.host is not None:
            of = self._groups[page], key, self._adapters[page], self._tenants[page]
            self.host.store(CachedPage(*of), page)
        if self.evicted is not None and not self._groups[page]:
            self.evicted.add(key, 1)
        super()._evict(page, key)

    def _store_state(self, slot: int, key: bytes, adapter: str | None, tenant: str) -> None:
        assert self.host_states is not None, "no states on the host"
        self.host_states.store(CachedPage(0, key, adapter, tenant), slot)

    def _has_state(self, key: bytes) -> bool:
        """Whether the GPU has the state behind a page; True in a model without states."""
        return self.states is None or self.states.slot_of(key) is not None

    def _longest_with_host(self, keys: list[bytes], *, with_disk: bool) -> int:
        """Return the number of leading keys up to and including the last one whose state the GPU or
        the host has; 0 if none has.

        with_disk: whether the disk counts, too.
        """
        stored = list[Container[bytes]]()
        if self.host_states is not None:
            stored.append(self.host_states.pages_of[0])
            if with_disk and self.host_states.disk is not None:
                stored.append(self.host_states.disk.pages_of[0])
        found = (at for at in range(len(keys), 0, -1) if any(keys[at - 1] in s for s in stored))
        assert self.states is not None
        return max(self.states.longest(keys), next(found, 0))

    def _end_state_fetch(self, fetch: StateFetch, damaged: bool) -> None:
        """Let sequences find a state that a fetch has brought; drop it if it is damaged."""
        assert self.states is not None
        assert self.host_states is not None
        ((slot, cached),) = fetch.arrival.pages.items()
        del self._arriving[_STATE, cached.key]
        if damaged or not self.host_states.has(cached, slot):
            self.states.release(fetch.copy.page)
        else:
            self.states.publish(fetch.copy.page, cached.key, cached.adapter, cached.tenant)
        self.host_states.end_fetch(fetch.arrival, damaged=damaged)

    def _begin_fetch(
        self,
        lacking: list[tuple[int, bytes]],
        kept: list[list[int]],
        spare: int,
        state: bytes | None,
    ) -> Fetch | None:
        """Give pages to a fetch; return None if too few are free, on the GPU or the host, or no
        slot for the state.

        lacking: group of layers and key of each page to fetch.
        kept: for each group of layers, pages of the prefix that are cached on the GPU; the fetch
            keeps them there.
        spare: number of other sequences; one free page per group is left for each of them.
        state: key of the page behind which a state is to be fetched; None: no state is.
        """
        assert self.host is not None, "a fetch without a host"
        for pages in kept:
            self.share(pages)
        arrival = None
        if self.pages_lacking(len(lacking), spare) <= 0:
            # Held before pages are taken: pages that these evict are stored in other slots.
            arrival = self.host.begin_fetch(lacking)
        if arrival is None:
            self._release_all(kept)
            return None
        arriving_state = None
        if state is not None:
            arriving_state = self._begin_state_fetch(state)
            if arriving_state is None:
                self.host.cancel_fetch(arrival)
                self._release_all(kept)
                return None
        taken = self.take(len(lacking))
        copies = tuple(map(PageCopy, arrival.pages, taken))
        fetch = Fetch(arrival, copies, kept, arriving_state)
        if state is not None:
            self._arriving[_STATE, state] = fetch
        for cached, page in zip(arrival.pages.values(), taken, strict=True):
            self._arriving[cached.group, cached.key] = fetch
            kept[cached.group].append(page)
        self.host.to_fetch.append(fetch)
        return fetch

    def _begin_state_fetch(self, key: bytes) -> StateFetch | None:
        """Give slots to a state that is to be fetched; return None if none is free."""
        assert self.states is not None
        assert self.host_states is not None, "no states on the host"
        # Held before a slot is taken, which may store its state.
        arrival = self.host_states.begin_fetch([(0, key)])
        own = None if arrival is None else self.states.take_to_save()
        if arrival is None:
            return None
        if own is None:
            self.host_states.cancel_fetch(arrival)
            return None
        (slot,) = arrival.pages
        return StateFetch(arrival, PageCopy(slot, own))

    def _take_to_save(self, kv: SequencePages, tokens: int) -> int | None:
        """Give a slot for the state behind a sequence's first `tokens` tokens, if one is free."""
        assert self.states is not None
        slot = self.states.take_to_save()
        if slot is not None:
            kv.saving[tokens], kv.saved = slot, tokens
        return slot

    def _publish_states(self, kv: SequencePages, end: int) -> None:
        """Let other sequences find the states that a sequence has saved in its first `end` tokens.

        A state saved in the answer replaces the state that was saved before in the same answer.
        """
        assert self.states is not None
        for tokens in [tokens for tokens in kv.saving if tokens <= end]:
            keys = kv.keys(tokens // self.page_size)
            adapter = kv.adapter_of(len(keys) - 1)
            self.states.publish(kv.saving.pop(tokens), keys[-1], adapter, kv.tenant)
            if tokens > kv.announced * self.page_size:
                if kv.answered:
                    self.states.forget_keys([keys[kv.answered // self.page_size - 1]])
                kv.answered = tokens

    def _begin_state(self, kv: SequencePages, keys: list[bytes], hit: int, found: int) -> None:
        """Give a sequence a slot for its state, and choose where its state is to be saved.

        keys: keys of the pages that the sequence may take from the cache.
        hit: number of cached pages that the sequence takes; if not 0, the state behind the last of
            them is cached.
        found: number of first pages that are cached, with or without a state behind them.
        """
        assert self.states is not None
        kv.restore = self.states.hold(keys[hit - 1]) if hit else None
        kv.saved = hit * self.page_size
        kv.state = self.states.take()
        assert kv.state is not None, "a sequence without a slot for its state"
        if kv.score_from is not None:  # others find more of its pages than it may take itself
            keys = kv.keys_before_last()
            found = len(self.find(keys))
        unwritten = self._unwritten_for(kv)
        being_written = bisect_left(keys, True, found, key=lambda key: key not in unwritten)
        pages = sorted({found, being_written, kv.pages_of_base, len(keys)})
        kv.save_at = tuple(count * self.page_size for count in pages if count > hit)

    def _take_restore(self, kv: SequencePages) -> int | None:
        """Return kv.restore, the slot of the cached state with which the sequence begins; clear it.

        The sequence no longer protects that cached state from eviction.
        """
        slot, kv.restore = kv.restore, None
        if slot is not None and self.states is not None:
            self.states.drop_hold(slot)
        return slot

    def _needed_from(self, pages: int) -> list[int]:
        """Return, for each group of layers, the first page that tokens behind the first `pages`
        pages attend to.
        """
        first = self._needs.first(pages * self.page_size) if self._windowed else 0
        return [0] * self._whole + [first] * self._windowed

    def _hit_with_host(self, keys: list[bytes], *, with_disk: bool) -> tuple[int, int]:
        """Return the number of pages of the longest prefix that is cached on the GPU, and of the
        longest that is cached on the GPU and the host together.

        with_disk: whether the disk counts, too.
        """
        assert self.host is not None, "no pages on the host"
        cached = len(self.find(keys)) if self._whole else 0
        hit = self._hit(keys, cached)
        if hit == len(keys):
            return hit, hit
        tiers = [self._pages_of, self.host.pages_of]
        if with_disk and self.host.disk is not None:
            tiers.append(self.host.disk.pages_of)
        both = [ChainMap(*pages) for pages in zip(*tiers, strict=True)]
        whole = both[: self._whole]
        end = next((i for i in range(hit, len(keys)) if any(keys[i] not in p for p in whole)), -1)
        return hit, self._hit(keys, len(keys) if end < 0 else end, both)

    def _hit(
        self,
        keys: list[bytes],
        most: int,
        pages_of: Sequence[Container[bytes]] | None = None,
    ) -> int:
        """Return the number of pages of the longest prefix that can be shared from the cache.

        In groups with a window, only the pages of the prefix's last window must be cached.

        most: number of the pages with these keys that are cached in the first group; ignored if all
            groups have windows.
        pages_of: for each group of layers, the keys of its cached pages; None: those on the GPU.
        """
        pages_of = self._pages_of if pages_of is None else pages_of
        end, windowed = most if self._whole else len(keys), pages_of[self._whole :]
        for pages in pages_of[1 : self._whole]:
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
        """Release a sequence's pages before page `before`, in the groups with a window."""
        count = before - kv.first
        if count > 0:
            windowed = kv.pages[self._whole :]
            self._release_all([pages[:count] for pages in windowed])
            for pages in windowed:
                del pages[:count]
            kv.first = before

    def _release_all(self, pages: Sequence[Sequence[int]]) -> None:
        """Release a sequence's pages in such an order that pages of the same tokens are evicted
        together.

        This holds only if all groups have the same number of pages.

        pages: for each group of layers, pages in the order of tokens.
        """
        if len(pages) <= 1:
            for only in pages:
                self.release(only)
            return
        from_end = chain.from_iterable(zip_longest(*map(reversed, pages)))
        self.release([page for page in from_end if page is not None][::-1])

    def _unwritten_for(self, kv: SequencePages) -> Mapping[bytes, int]:
        """Return the keys of the pages that other sequences are about to write, and for which this
        one may wait; the value of a key is the number of those sequences.

        A sequence in the foreground may wait only for pages of sequences in the foreground.
        """
        if kv.background:
            return ChainMap(*self._unwritten.values())
        return self._unwritten[False]

    def _no_longer_unwritten(self, kv: SequencePages, keys: Iterable[bytes]) -> None:
        unwritten = self._unwritten[kv.background]
        for key in keys:
            if unwritten[key] > 1:
                unwritten[key] -= 1
            else:
                del unwritten[key]


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=32).digest()
