"""KV pages in host memory: their slots, and the pages that new ones replace.

A page that leaves the prefix cache on the GPU is stored in a slot of host memory, under the key
that it had in the prefix cache. So pages of different tenants, adapters and versions of adapters
have different keys here, too. A later sequence fetches the pages of its prefix back to the GPU
where that is faster than computing them again. They keep their slots, so they are not copied again
when they leave the GPU the next time.

The least recently used page is replaced first. A page of a tenant that has less than an equal share
of the slots is spared once after each use. Pages of kept prompts are never replaced; they take at
most half of the slots.

This module decides; execution/page_copies.py copies.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from lorikeet_engine.costs import StepCosts, seen_tokens

_MOST_SPARED = 64  # pages looked at to store one page


@dataclass(slots=True)
class HostPageCounts:
    """Counts of pages since the engine's start.

    stored: number of pages copied to the host.
    fetched: number of pages copied back to the GPU.
    evicted: number of pages replaced by others.
    damaged: number of pages dropped because the checksum of their fetch was wrong.
    """

    stored: int = 0
    fetched: int = 0
    evicted: int = 0
    damaged: int = 0


class CachedPage(NamedTuple):
    """Page as the prefix cache knows it.

    group: index of the group of layers whose keys and values the page holds.
    key: hash of all tokens up to the page's end, by which the prefix cache finds the page.
    adapter: digest of the adapter under which the page was computed; None for the base model.
    tenant: tenant for whom the page was computed.
    """

    group: int
    key: bytes
    adapter: str | None
    tenant: str


class PageCopy(NamedTuple):
    """Copy of a page between host and GPU.

    slot: index of the page's slot in host memory.
    page: index of the page on the GPU.
    """

    slot: int
    page: int


class StateFetch(NamedTuple):
    """State of delta nets on its way to the GPU.

    cached: the state, by the key of the last page of its prefix.
    copy: its slots on the host and on the GPU.
    """

    cached: CachedPage
    copy: PageCopy


@dataclass(eq=False, slots=True)
class Fetch:
    """Pages of one prefix on their way to the GPU. Sequences with this prefix wait until it is
    over.

    arriving: pages that are copied, by their slots in host memory.
    copies: for each of these pages, its slot and the page on the GPU that it is copied to.
    kept: for each group of layers, all pages of the prefix on the GPU, with those that are copied;
        the fetch holds a reference to each, so that none is evicted.
    state: state behind the prefix, if it is copied, too.
    over: whether the fetch has ended.
    """

    arriving: dict[int, CachedPage]
    copies: tuple[PageCopy, ...]
    kept: list[list[int]]
    state: StateFetch | None = None
    over: bool = False


class HostPages:
    """Slots of host memory for KV pages, or for states of delta nets, each a page of the one group.
    For the engine's thread only.

    Plans copies; execution/page_copies.py makes them.

    pages_of: for each group of layers, the slots of stored pages by key.
    kept: pages of each kept prompt by its name; () for a prompt for which there was no room.
    to_store: slot → page on the GPU, of pages to copy before the next step writes to them.
    to_fetch: fetches to begin, after the pages of to_store are copied.
    room: number of pages that can still be copied before the next step.
    """

    def __init__(
        self,
        slots: int,
        page_bytes: int,
        groups: int,
        counts: HostPageCounts,
        fetch_s: Callable[[int], float],
        costs: StepCosts,
    ) -> None:
        """Start with free slots.

        slots: number of pages that the host memory holds.
        page_bytes: bytes of a page on one GPU.
        groups: number of groups of layers.
        counts: counts to increase.
        fetch_s: returns the seconds that a copy of so many bytes to the GPU takes.
        costs: predicts the time of steps that compute pages again.
        """
        self.slots, self.page_bytes, self.counts = slots, page_bytes, counts
        self.pages_of: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self.kept: dict[str, tuple[CachedPage, ...]] = {}
        self.to_store: dict[int, int] = {}
        self.to_fetch: list[Fetch] = []
        self.room = 0
        self._fetch_s, self._costs = fetch_s, costs
        self._free = deque(range(slots))
        self._pages: dict[int, CachedPage] = {}
        self._order: OrderedDict[int, None] = (
            OrderedDict()
        )  # replaceable, least recently used first
        self._keepers = Counter[tuple[int, bytes]]()  # kept prompts with a page, by group and key
        self._to_keep: list[CachedPage] = []  # perhaps not on the host yet
        self._spared = set[int]()  # slots
        self._of_tenants = Counter[str]()
        self._holds = Counter[int]()  # fetches that read a slot
        self._fetching = 0  # pages

    @property
    def used(self) -> int:
        """Number of slots with pages."""
        return len(self._pages)

    @property
    def used_by_prompts(self) -> int:
        """Number of these slots that kept prompts hold."""
        return len(self._pages) - len(self._order)

    def store(self, cached: CachedPage, page: int) -> None:
        """Plan to copy to the host a page that leaves the GPU, unless the host has it already.

        Do nothing if no slot is free and no page on the host may be replaced now, or if no more
        pages can be copied before the next step.

        cached: the page's key, group, adapter and tenant.
        page: index of the page on the GPU.
        """
        slot = self.pages_of[cached.group].get(cached.key)
        if slot is not None:
            self.touch(slot)
            return
        if self.room <= 0 or not (self._free or self._evict()):
            return
        slot = self._free.popleft()
        self.room -= 1
        self.counts.stored += 1
        self._pages[slot] = cached
        if (cached.group, cached.key) not in self._keepers:
            self._order[slot] = None
        self._of_tenants[cached.tenant] += 1
        self.pages_of[cached.group][cached.key] = slot
        self.to_store[slot] = page

    def keep(self, name: str, pages: Sequence[CachedPage]) -> None:
        """Keep the pages of a prompt until `keep_only` drops the prompt.

        The pages of all kept prompts take at most half of the slots. If there is no room, the
        newest prompts of the tenant with the most kept pages are no longer kept, as long as it has
        more kept pages than this prompt's tenant would then have. A prompt that does not fit is not
        kept.

        name: name by which `keep_only` and `kept` know the prompt; an older prompt of this name is
            dropped first.
        pages: the prompt's pages, all of one tenant.
        """
        self._drop(name)
        fits = not pages or self._make_room(pages[0].tenant, len(pages))
        self.kept[name] = tuple(pages) if fits else ()
        for cached in self.kept[name]:
            self._keepers[cached.group, cached.key] += 1
            slot = self.pages_of[cached.group].get(cached.key)
            if slot is None:
                self._to_keep.append(cached)
            else:
                self._order.pop(slot, None)

    def keep_only(self, names: Container[str]) -> None:
        """Drop the kept prompts whose names are not among these; their pages may be replaced."""
        for name in [name for name in self.kept if name not in names]:
            self._drop(name)

    def take_to_keep(self) -> list[CachedPage]:
        """Return pages of kept prompts that are not on the host and may still be on the GPU: as
        many as can be copied before the next step. Each is returned once.
        """
        taken, self._to_keep = self._to_keep[: self.room], self._to_keep[self.room :]
        return [each for each in taken if (each.group, each.key) in self._keepers]

    def touch(self, slot: int) -> None:
        """Make the page in a slot the most recently used one."""
        if slot in self._order:
            self._order.move_to_end(slot)
        self._spared.discard(slot)

    def take_to_store(self) -> tuple[PageCopy, ...]:
        """Return the page copies that `store` has planned, and empty `to_store`."""
        copies = tuple(PageCopy(slot, page) for slot, page in self.to_store.items())
        self.to_store.clear()
        return copies

    def pays(self, pages: int, tokens: int, depth: int, more_bytes: int = 0) -> bool:
        """Whether fetching pages is expected to take less time than computing them again.

        pages: number of pages to fetch.
        tokens: number of tokens that need not be computed then.
        depth: number of tokens before these.
        more_bytes: bytes to fetch beside the pages.
        """
        fetch_s = self._fetch_s((self._fetching + pages) * self.page_bytes + more_bytes)
        return fetch_s < self._costs.prompts_s(tokens, seen_tokens(tokens, depth))

    def hold(self, slots: Iterable[int]) -> dict[int, CachedPage]:
        """Keep pages in their slots while they are copied to the GPU, until `drop_holds`.

        Returns the page in each of these slots.
        """
        held = {slot: self._pages[slot] for slot in slots}
        for slot in held:
            self._holds[slot] += 1
            self.touch(slot)
        self._fetching += len(held)
        return held

    def drop_holds(self, slots: Iterable[int]) -> None:
        """End one hold on each of these slots."""
        for slot in slots:
            self._fetching -= 1
            self._holds[slot] -= 1
            if not self._holds[slot]:
                del self._holds[slot]
                if slot not in self._pages:
                    self._free.append(slot)

    def has(self, cached: CachedPage, slot: int) -> bool:
        """Whether a page is still in this slot."""
        return self.pages_of[cached.group].get(cached.key) == slot

    def forget(self, slots: Iterable[int]) -> None:
        """Drop the pages in these slots, so that no sequence finds them, and the kept prompts that
        have such a page.
        """
        for slot in slots:
            cached = self._pages.pop(slot, None)
            if cached is None:
                continue
            del self.pages_of[cached.group][cached.key]
            self._order.pop(slot, None)
            self._spared.discard(slot)
            self.to_store.pop(slot, None)
            self._of_tenants[cached.tenant] -= 1
            if not self._of_tenants[cached.tenant]:
                del self._of_tenants[cached.tenant]
            if slot not in self._holds:
                self._free.append(slot)
            if (cached.group, cached.key) in self._keepers:
                for name in [name for name, pages in self.kept.items() if cached in pages]:
                    self._drop(name)

    def forget_keys(self, keys: Iterable[bytes]) -> None:
        """Drop the pages with these keys, in all groups of layers."""
        for key in keys:
            self.forget([pages[key] for pages in self.pages_of if key in pages])

    def forget_adapter(self, digest: str) -> None:
        """Drop all pages computed with an adapter, alone or in a composition."""
        self.forget([slot for slot, page in self._pages.items() if digest in (page.adapter or "")])

    def _make_room(self, tenant: str, count: int) -> bool:
        """Whether a tenant may keep `count` more pages, after prompts of the tenants with the most
        kept pages are dropped if necessary.
        """
        of_tenants = Counter[str]()
        for pages in self.kept.values():
            for cached in pages[:1]:
                of_tenants[cached.tenant] += len(pages)
        while len(self._keepers) + count > self.slots // 2:
            (most, held), *_ = of_tenants.most_common(1) or [(tenant, 0)]
            if held <= of_tenants[tenant] + count:
                return False
            newest = [
                name for name, pages in self.kept.items() if pages and pages[0].tenant == most
            ]
            of_tenants[most] -= len(self.kept[newest[-1]])
            self._drop(newest[-1])
            self.kept[newest[-1]] = ()
        return True

    def _drop(self, name: str) -> None:
        """Forget a kept prompt, if there is one of this name; its pages may be replaced."""
        for cached in self.kept.pop(name, ()):
            at = cached.group, cached.key
            self._keepers[at] -= 1
            if not self._keepers[at]:
                del self._keepers[at]
                slot = self.pages_of[cached.group].get(cached.key)
                if slot is not None:
                    self._order[slot] = None

    def _evict(self) -> bool:
        """Make a slot free, by dropping the page that was used least recently.

        Passes over pages that a fetch reads, and once over pages of tenants below their share.
        Returns False if the first _MOST_SPARED pages are such pages.
        """
        for slot in list(islice(self._order, _MOST_SPARED)):
            share = self.slots / len(self._of_tenants)
            below = self._of_tenants[self._pages[slot].tenant] < share
            if slot in self._holds or (below and slot not in self._spared):
                self._order.move_to_end(slot)
                self._spared.add(slot)
            else:
                self.counts.evicted += 1
                self.forget([slot])
                return True
        return False
