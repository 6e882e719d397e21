"""Border between the adapters' arena and the KV pages, which moves between steps by demand.

    arena   | least size | units that it has borrowed |     (addresses without memory)     |
    KV      | unit 0 | lent | unit 2 | lent | unit 4 | …

The arena begins with EngineSettings.adapter_gpu_bytes and never has less. The KV pages begin with
all the rest. They lend units of it, and always keep a quarter, and the pages of one sequence of
max_context tokens. border_policy.py decides how many units move; a unit moves like this:

to the arena      A unit with few pages of sequences, and many of the least recently used cached
                  pages. The KV cache allocates its pages no more and drops those that are cached.
                  Sequences keep theirs until they end. Then the memory moves.
to the KV pages   Cold adapters are evicted until the rest fits without the arena's last unit, whose
                  images move to holes. Then the memory moves.

The memory itself moves on another thread, after the end of all steps that were launched before
(device/border_memory.py). So no step waits, and no running sequence loses a page. All ranks move
the same units.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import torch

from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.costs import StepCosts
from lorikeet_engine.device.border_memory import BorderMemory, MoveUnit, border_memory
from lorikeet_engine.device.memory import resolve
from lorikeet_engine.execution.kv_tensors import kv_shape
from lorikeet_engine.execution.memory_plan import arena_bytes, border_unit, least_units
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.parallel.followers import Followers
from lorikeet_engine.residency.tiers import Tiers
from lorikeet_engine.residency.workers import Workers
from lorikeet_engine.scheduling.border_policy import EVERY_S, BorderPolicy, Evicted
from lorikeet_engine.scheduling.kv_cache import KVCache
from lorikeet_engine.settings import EngineSettings
from lorikeet_engine.telemetry.status import BorderUsage

log = logging.getLogger(__name__)

_FIRST_NUMBER = 1 << 62  # of moves in reports; copies have smaller numbers
_CANDIDATES = 32  # units of KV pages among which one is chosen
_MOST_DRAINING = 8  # units of KV pages that are withdrawn while sequences still have pages there


class RankBorder:
    """Arena and KV pages of one rank in one memory.

    unit: memory that moves at once.
    arena_units: units of the arena at the start.
    most_units: units for which the arena has addresses.
    memory: memory of this rank's device.
    arena: the arena's bytes, of which the first `arena_units` units have memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        shape: BaseShape,
        settings: EngineSettings,
        device: torch.device,
        free: int,
        least: Callable[[int], int],
    ) -> None:
        """Allocate the arena.

        shape: part of the base model that this rank computes.
        free: bytes that are free on the device.
        least: returns the smallest of the numbers that the ranks pass to it.
        """
        unit = self.unit = border_unit(config, shape, settings)
        size = least(arena_bytes(config, shape, settings, free))
        self.arena_units = size // unit.bytes
        lent = resolve(settings.kv_bytes, max(0, free - size)) // unit.bytes
        self.most_units = self.arena_units + least(lent)
        self.memory: BorderMemory = border_memory(unit, device)
        self.arena = self.memory.allocate_arena(self.arena_units, self.most_units)
        self._shape = partial(kv_shape, config, shape, page_size=settings.page_size)
        self._settings = settings

    @property
    def most_bytes(self) -> int:
        """Largest size of the arena, in bytes."""
        return self.most_units * self.unit.bytes

    def allocate_kv(self, pages: int) -> torch.Tensor:
        """Allocate the tensor of KV pages, zero; `pages` must fill whole units."""
        units = pages // self.unit.pages
        memory = self.memory.allocate_kv(units, units)
        shape = self._shape(pages=pages, device=self._settings.device)
        return memory.flatten().view(self._settings.torch_kv_dtype).view(shape)


class Border:
    """Moves memory between arena and KV pages, in all ranks. For the engine's thread.

    At most one unit begins to move in each step.
    """

    def __init__(
        self,
        rank: RankBorder,
        pages: int,
        least_pages: int,
        tiers: Tiers,
        costs: StepCosts,
        followers: Followers | None,
        wake: Callable[[], None],
    ) -> None:
        """Begin with the division of the start.

        pages: number of KV pages; least_pages: number of them that are never lent.
        costs: predicts the seconds of a prompt token.
        followers: processes of the other ranks; None without tensor parallelism.
        wake: called on another thread when a unit has moved.
        """
        self._unit, self._memory, self._tiers = rank.unit, rank.memory, tiers
        self._costs, self._followers, self._wake = costs, followers, wake
        self._units = pages // rank.unit.pages
        self._least_units = least_units(self._units, least_pages, rank.unit)
        self._arena_units, self._most_units = rank.arena_units, rank.most_units
        self._in_kv = set(range(self._units))  # units whose pages sequences may get
        self._draining: list[int] = []  # units of KV pages that are withdrawn
        self._lent: list[int] = []  # units of the KV tensor without memory
        self._moves: dict[MoveUnit, Future[None]] = {}
        self._worker = Workers(1, "border")
        self._on_gpu = rank.arena.is_cuda
        self.policy = BorderPolicy(self._units + self._arena_units)
        self._wanted = 0
        self._numbers = self._to_adapters = self._to_pages = 0
        self._broken = False
        self._decided_s = self._seen_s = time.monotonic()
        self._adapters_s = self._pages_s = 0.0  # lost since the last decision
        self._pages_in_all = pages
        tiers.remember_evicted(self._units * rank.unit.bytes)

    @property
    def status(self) -> BorderUsage:
        """Division of the memory now, and the number of moves since the start."""
        return BorderUsage(
            self._unit.bytes,
            self._arena_units,
            self._units - len(self._lent),
            len(self._lent),
            self._units - self._least_units,
            len(self._moves) + len(self._draining),
            self._to_adapters,
            self._to_pages,
        )

    def reset(self, cache: KVCache) -> None:
        """Begin with a new, empty KV cache: it gets the pages that have memory."""
        cache.evicted = Evicted(self._pages_in_all)
        self._in_kv.update(self._draining)
        self._draining.clear()
        for unit in set(range(self._units)) - self._in_kv:
            cache.withdraw(self._pages(unit))

    def after_plan(self, cache: KVCache, lacks_pages: bool) -> None:
        """Move memory as far as it is wanted; to be called after a step is planned, and before
        pages that leave the cache are copied to the host.

        lacks_pages: whether a sequence waits only for KV pages.
        """
        self._take_moved(cache)
        if self._broken:
            return
        # withdrawn before an earlier step: copies of these pages to the host are launched by now
        for unit in [u for u in self._draining if not cache.referenced(self._pages(u))]:
            self._draining.remove(unit)
            self._lend(unit)
        self._decide(cache, lacks_pages)
        if self._wanted > 0:
            self._wanted -= self._withdraw(cache)
        elif self._wanted < 0:
            self._wanted += self._give_back(cache)

    def close(self) -> None:
        """Begin no more moves, and give the memory back: no step or copy may use it any more."""
        self._worker.close()
        self._memory.close()

    def _decide(self, cache: KVCache, lacks_pages: bool) -> None:
        now_s = time.monotonic()
        elapsed_s, self._seen_s = now_s - self._seen_s, now_s
        self._adapters_s += self._tiers.take_missed_s() + elapsed_s * self._tiers.waits_for_gpu
        self._pages_s += cache.missed_tokens * self._costs.prompt_token_s + elapsed_s * lacks_pages
        cache.missed_tokens = 0
        since_s = now_s - self._decided_s
        if since_s >= EVERY_S:
            self._wanted = self.policy.decide(self._adapters_s, self._pages_s, since_s)
            self._adapters_s = self._pages_s = 0.0
            self._decided_s = now_s

    def _withdraw(self, cache: KVCache) -> int:
        """Withdraw a unit of KV pages for the arena; return the number of units withdrawn."""
        most = self._arena_units + len(self._draining) >= self._most_units
        if most or len(self._in_kv) <= self._least_units or len(self._draining) >= _MOST_DRAINING:
            return 0
        pages = cache.least_recent(_CANDIDATES * self._unit.pages)
        units = Counter(page // self._unit.pages for page in pages)
        units.pop(0, None)  # stays: padding of steps may name its first page
        candidates = [unit for unit, _ in units.most_common(_CANDIDATES)]
        if not candidates:
            return 0
        unit = min(candidates, key=lambda unit: cache.referenced(self._pages(unit)))
        cache.withdraw(self._pages(unit))
        self._in_kv.remove(unit)
        self._draining.append(unit)
        return 1

    def _lend(self, unit: int) -> None:
        self._lent.append(unit)
        self._begin(to_kv=False, arena_unit=self._arena_units, kv_unit=unit)
        self._arena_units += 1

    def _give_back(self, cache: KVCache) -> int:
        """Give a unit back to the KV pages; return the number of units given back."""
        if self._draining:
            self._undo_withdrawal(cache)
            return 1
        arriving = any(not move.to_kv for move in self._moves)
        if not self._lent or arriving or not self._tiers.cut_arena(self._unit.bytes):
            return 0
        self._arena_units -= 1
        self._begin(to_kv=True, arena_unit=self._arena_units, kv_unit=self._lent.pop())
        return 1

    def _undo_withdrawal(self, cache: KVCache) -> None:
        """Let sequences get the pages of the unit that was withdrawn last."""
        unit = self._draining.pop()
        cache.restore(self._pages(unit))
        self._in_kv.add(unit)

    def _begin(self, *, to_kv: bool, arena_unit: int, kv_unit: int) -> None:
        self._numbers += 1
        move = MoveUnit(_FIRST_NUMBER + self._numbers, to_kv, arena_unit, kv_unit)
        others = None
        if self._followers is not None:
            others = self._followers.expect_copy(move.number)
            self._followers.send(move)
        own, future = self._memory.move(move), Future[None]()
        self._moves[move] = future

        def run() -> None:
            try:
                own()
                failed = others is not None and any(others.wait())
                if failed:
                    raise RuntimeError("the memory of another rank did not move")
                future.set_result(None)
            except Exception as error:
                future.set_exception(error)
            self._wake()

        if self._on_gpu or others is not None:
            self._worker.submit(run, urgent=True)
        else:
            run()

    def _take_moved(self, cache: KVCache) -> None:
        """Let each side use the memory that has arrived, in the order of the moves."""
        for move, future in list(self._moves.items()):
            if not future.done():
                return
            if (error := future.exception()) is not None:
                # the memory of this unit is lost, and that of later ones uncertain
                log.error("border_fixed", exc_info=error)
                self._broken = True
                self._moves.clear()
                while self._draining:
                    self._undo_withdrawal(cache)
                return
            del self._moves[move]
            if move.to_kv:
                cache.restore(self._pages(move.kv_unit))
                self._in_kv.add(move.kv_unit)
                self._to_pages += 1
            else:
                self._tiers.extend_arena(self._unit.bytes)
                self._to_adapters += 1

    def _pages(self, unit: int) -> range:
        return range(unit * self._unit.pages, (unit + 1) * self._unit.pages)
