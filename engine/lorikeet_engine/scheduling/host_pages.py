"""KV pages in host memory: their slots, and the pages that new ones replace.

A page that leaves the prefix cache on the GPU is stored in a slot of host memory, under the key
that it had in the prefix cache. So pages of different tenants, adapters and versions of adapters
have different keys here, too. A later sequence fetches the pages of its prefix back to the GPU
where that is faster than computing them again. They keep their slots, so they are not copied again
when they leave the GPU the next time.

The least recently used page is replaced first. A page of a tenant that has less than an equal share
of the slots is spared once after each use. Pages of kept prompts are never replaced; they take at
most half of the slots.

With a file on the local disk (execution/page_file.py), pages that would be replaced soon are
written to it while they are still in host memory. A fetch reads pages that only the file has into
slots of host memory again.

This module decides; execution/page_copies.py copies.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from lorikeet_engine.costs import StepCosts, seen_tokens

IN_STEP_S = 0.01
"""Longest expected copy of pages to the GPU, in seconds, for which a step waits."""
_MOST_SPARED = 64  # pages looked at to store one page
_MOST_LOOKED_AT = 1024  # pages looked at for those to write to the disk


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


class DiskCopy(NamedTuple):
    """Copy of a page between host memory and the file on the disk.

    place: index of the page in the file.
    slot: index of the page's slot in host memory.
    key: the page's key.
    """

    place: int
    slot: int
    key: bytes


class Arrival(NamedTuple):
    """Pages that a fetch copies to the GPU.

    pages: the pages, by their slots in host memory.
    reads: pages that are first read from the disk into their slots.
    """

    pages: dict[int, CachedPage]
    reads: tuple[DiskCopy, ...] = ()


class StateFetch(NamedTuple):
    """State of delta nets on its way to the GPU.

    arrival: the state, by the key of the last page of its prefix.
    copy: its slots on the host and on the GPU.
    """

    arrival: Arrival
    copy: PageCopy


@dataclass(eq=False, slots=True)
class Fetch:
    """Pages of one prefix on their way to the GPU. Sequences with this prefix wait until it is
    over.

    arrival: pages that are copied.
    copies: for each of these pages, its slot and the page on the GPU that it is copied to.
    kept: for each group of layers, all pages of the prefix on the GPU, with those that are copied;
        the fetch holds a reference to each, so that none is evicted.
    state: state behind the prefix, if it is copied, too.
    over: whether the fetch has ended.
    in_step: whether sequences share the pages before the fetch is over. The planned step then waits
        for the fetch before it is launched.
    """

    arrival: Arrival
    copies: tuple[PageCopy, ...]
    kept: list[list[int]]
    state: StateFetch | None = None
    over: bool = False
    in_step: bool = False


class PageSlots:
    """Slots of host memory, or places of a file on the disk, for KV pages or for states of delta
    nets, each a page of the one group. For the engine's thread only.

    slots: number of pages for which there is room.
    counts: counts that the slots increase.
    pages_of: for each group of layers, the slots of stored pages by key.
    to_store: slot → the page's index where it is copied from: on the GPU, or in host memory if
        these are places of a file.
    room: number of pages that can still be copied before the next step.
    """

    def __init__(self, slots: int, groups: int, counts: HostPageCounts) -> None:
        """Start with free slots.

        groups: number of groups of layers.
        """
        self.slots, self.counts = slots, counts
        self.pages_of: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self.to_store: dict[int, int] = {}
        self.room = 0
        self._free = deque(range(slots))
        self._pages: dict[int, CachedPage] = {}
        self._order: OrderedDict[int, None] = (
            OrderedDict()
        )  # replaceable, least recently used first
        self._spared = set[int]()  # slots
        self._of_tenants = Counter[str]()
        self._holds = Counter[int]()  # copies under way from or to a slot

    @property
    def used(self) -> int:
        """Number of slots with pages."""
        return len(self._pages)

    def store(self, cached: CachedPage, page: int) -> None:
        """Plan to copy a page to a slot, unless there is a slot with the page already.

        Do nothing if no slot is free and no page may be replaced now, or if no more pages can be
        copied before the next step.

        cached: the page's key, group, adapter and tenant.
        page: index of the page where it is copied from.
        """
        slot = self.pages_of[cached.group].get(cached.key)
        if slot is not None:
            self.touch(slot)
            return
        if self.room <= 0 or (slot := self._place(cached)) is None:
            return
        self.room -= 1
        self.counts.stored += 1
        self.to_store[slot] = page

    def take_to_store(self) -> tuple[PageCopy, ...]:
        """Return the page copies that `store` has planned, and empty `to_store`."""
        copies = tuple(PageCopy(slot, page) for slot, page in self.to_store.items())
        self.to_store.clear()
        return copies

    def touch(self, slot: int) -> None:
        """Make the page in a slot the most recently used one."""
        if slot in self._order:
            self._order.move_to_end(slot)
        self._spared.discard(slot)

    def hold(self, slots: Iterable[int]) -> dict[int, CachedPage]:
        """Keep pages in their slots while they are copied, until `drop_holds`.

        Returns the page in each of these slots.
        """
        held = {slot: self._pages[slot] for slot in slots}
        self._holds.update(held.keys())
        return held

    def drop_holds(self, slots: Iterable[int]) -> None:
        """End one hold on each of these slots."""
        for slot in slots:
            self._holds[slot] -= 1
            if not self._holds[slot]:
                del self._holds[slot]
                if slot not in self._pages:
                    self._free.append(slot)

    def has(self, cached: CachedPage, slot: int) -> bool:
        """Whether a page is still in this slot."""
        return self.pages_of[cached.group].get(cached.key) == slot

    def forget(self, slots: Iterable[int]) -> None:
        """Drop the pages in these slots, so that no sequence finds them."""
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
            self._on_forget(slot, cached)

    def forget_keys(self, keys: Iterable[bytes]) -> None:
        """Drop the pages with these keys, in all groups of layers."""
        for key in keys:
            self.forget([pages[key] for pages in self.pages_of if key in pages])

    def forget_adapter(self, digest: str) -> None:
        """Drop all pages computed with an adapter, alone or in a composition."""
        self.forget([slot for slot, page in self._pages.items() if digest in (page.adapter or "")])

    def _place(self, cached: CachedPage) -> int | None:
        """Give a slot to a page; return None if none is free, and no page may be replaced now."""
        if not (self._free or self._evict()):
            return None
        slot = self._free.popleft()
        self._pages[slot] = cached
        if self._is_replaceable(cached):
            self._order[slot] = None
        self._of_tenants[cached.tenant] += 1
        self.pages_of[cached.group][cached.key] = slot
        return slot

    def _evict(self) -> bool:
        """Make a slot free, by dropping the page that was used least recently.

        Passes over pages that are being copied, and once over pages of tenants below their share.
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

    def _is_replaceable(self, _cached: CachedPage) -> bool:
        """Whether other pages may replace a page."""
        return True

    def _on_forget(self, slot: int, cached: CachedPage) -> None:
        """React to the loss of the page in a slot."""


class HostPages(PageSlots):
    """Slots of host memory, and the file on the disk behind them.

    Plans copies; execution/page_copies.py makes them.

    page_bytes: bytes of a page on one GPU.
    disk: places of the file; None without one.
    kept: pages of each kept prompt by its name; () for a prompt for which there was no room.
    to_fetch: fetches to begin, after the pages of to_store are copied.
    """

    def __init__(
        self,
        slots: int,
        page_bytes: int,
        groups: int,
        counts: HostPageCounts,
        fetch_s: Callable[[int], float],
        costs: StepCosts,
        disk: PageSlots | None = None,
        read_s: Callable[[int], float] = lambda _: 0.0,
    ) -> None:
        """Start with free slots.

        slots: number of pages that the host memory holds.
        groups: number of groups of layers.
        counts: counts to increase.
        fetch_s: returns the seconds that a copy of so many bytes to the GPU takes.
        costs: predicts the time of steps that compute pages again.
        read_s: returns the seconds that reading so many bytes from the file takes.
        """
        super().__init__(slots, groups, counts)
        self.page_bytes, self.disk = page_bytes, disk
        self.kept: dict[str, tuple[CachedPage, ...]] = {}
        self.to_fetch: list[Fetch] = []
        self._fetch_s, self._costs, self._read_s = fetch_s, costs, read_s
        self._keepers = Counter[tuple[int, bytes]]()  # kept prompts with a page, by group and key
        self._to_keep: list[CachedPage] = []  # perhaps not on the host yet
        self._written = set[int]()  # slots whose pages were written to the disk, or came from it
        self._fetching = self._reading = 0  # pages

    @property
    def used_by_prompts(self) -> int:
        """Number of these slots that kept prompts hold."""
        return len(self._pages) - len(self._order)

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

    def pays(
        self, pages: int, tokens: int, depth: int, more_bytes: int = 0, reads: int = 0
    ) -> bool:
        """Whether fetching pages is expected to take less time than computing them again.

        pages: number of pages to fetch.
        tokens: number of tokens that need not be computed then.
        depth: number of tokens before these.
        more_bytes: bytes to fetch beside the pages.
        reads: number of these pages to read from the disk before.
        """
        fetch_s = self._fetch_s((self._fetching + pages) * self.page_bytes + more_bytes)
        if reads:
            fetch_s += self._read_s((self._reading + reads) * self.page_bytes)
        return fetch_s < self._costs.prompts_s(tokens, seen_tokens(tokens, depth))

    def begin_fetch(self, wanted: Iterable[tuple[int, bytes]]) -> Arrival | None:
        """Keep pages in their slots until `end_fetch`; give slots to pages that only the disk has.

        Returns None, and keeps none, if too few slots can be had.

        wanted: group of layers and key of each page; the host or the disk has each.
        """
        on_disk = list[tuple[int, bytes]]()
        slots = list[int]()
        for group, key in wanted:
            slot = self.pages_of[group].get(key)
            if slot is None:
                on_disk.append((group, key))
            else:
                slots.append(slot)
                self.touch(slot)
        pages, reads = self.hold(slots), list[DiskCopy]()
        for group, key in on_disk:
            assert self.disk is not None, "a page that neither host nor disk has"
            place = self.disk.pages_of[group][key]
            (cached,) = self.disk.hold([place]).values()
            slot = self._place(cached)
            if slot is None:
                self.disk.drop_holds([place])
                self._cancel(Arrival(pages, tuple(reads)))
                return None
            self.disk.touch(place)
            self._written.add(slot)
            reads.append(DiskCopy(place, slot, key))
            pages |= self.hold([slot])
        self._fetching += len(pages)
        self._reading += len(reads)
        return Arrival(pages, tuple(reads))

    def is_short(self, arrival: Arrival) -> bool:
        """Whether a fetch that was just begun needs no disk, is the only one under way, and is
        expected to end within IN_STEP_S.
        """
        if arrival.reads or self._fetching > len(arrival.pages):
            return False
        return self._fetch_s(len(arrival.pages) * self.page_bytes) <= IN_STEP_S

    def cancel_fetch(self, arrival: Arrival) -> None:
        """End a fetch that copies nothing."""
        self._fetching -= len(arrival.pages)
        self._reading -= len(arrival.reads)
        self._cancel(arrival)

    def end_fetch(self, arrival: Arrival, *, damaged: bool) -> None:
        """Count the pages of a fetch that is over, and let them be replaced; drop damaged ones."""
        self._fetching -= len(arrival.pages)
        self._reading -= len(arrival.reads)
        if damaged:
            self.counts.damaged += len(arrival.pages)
            self.forget(arrival.pages)
            if self.disk is not None:
                at = [
                    self.disk.pages_of[each.group].get(each.key) for each in arrival.pages.values()
                ]
                self.disk.forget(place for place in at if place is not None)
        else:
            self.counts.fetched += len(arrival.pages)
        self.drop_holds(arrival.pages)
        if self.disk is not None:
            self.disk.counts.fetched += 0 if damaged else len(arrival.reads)
            self.disk.drop_holds(each.place for each in arrival.reads)

    def begin_writes(self) -> tuple[DiskCopy, ...]:
        """Choose pages to write to the disk, and keep them and their places until `end_writes`.

        They are the least recently used ones; none while an eighth of the slots is free. A page is
        written once while it is in host memory, even if the disk loses it again, as a disk smaller
        than host memory would.
        """
        disk = self.disk
        if disk is None or disk.room <= 0 or len(self._free) > self.slots // 8:
            return ()
        for slot in islice(self._order, _MOST_LOOKED_AT):
            if disk.room <= 0:
                break
            if slot not in self._written:
                self._written.add(slot)
                disk.store(self._pages[slot], slot)
        copies = disk.take_to_store()
        self.hold(copy.page for copy in copies)
        places = disk.hold(copy.slot for copy in copies)
        return tuple(DiskCopy(place, slot, places[place].key) for place, slot in copies)

    def end_writes(self, copies: Sequence[DiskCopy], *, failed: bool) -> None:
        """Let pages be replaced that have been written to the disk; forget places that were not."""
        assert self.disk is not None, "pages written without a disk"
        if failed:
            self.disk.forget(copy.place for copy in copies)
        self.disk.drop_holds(copy.place for copy in copies)
        self.drop_holds(copy.slot for copy in copies)

    def forget_keys(self, keys: Iterable[bytes]) -> None:
        """Drop the pages with these keys, in all groups of layers, on the disk, too."""
        keys = list(keys)
        super().forget_keys(keys)
        if self.disk is not None:
            self.disk.forget_keys(keys)

    def forget_adapter(self, digest: str) -> None:
        """Drop all pages computed with an adapter, on the disk, too."""
        super().forget_adapter(digest)
        if self.disk is not None:
            self.disk.forget_adapter(digest)

    def _cancel(self, arrival: Arrival) -> None:
        self.forget(each.slot for each in arrival.reads)
        self.drop_holds(arrival.pages)
        if self.disk is not None:
            self.disk.drop_holds(each.place for each in arrival.reads)

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

    def _is_replaceable(self, cached: CachedPage) -> bool:
        return (cached.group, cached.key) not in self._keepers

    def _on_forget(self, slot: int, cached: CachedPage) -> None:
        """Drop the kept prompts that have lost a page."""
        self._written.discard(slot)
        if not self._is_replaceable(cached):
            for name in [name for name, pages in self.kept.items() if cached in pages]:
                self._drop(name)
