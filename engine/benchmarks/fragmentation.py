"""How full an arena of adapters stays, and what moves in it, over 100,000 random loads.

python -m engine.benchmarks.fragmentation --json fragmentation.json

No GPU: the product's Residents and SlotPool at true sizes of Llama-3.1-8B, on an arena that has no
memory. Adapters leave in random order. Beside it the same loads in an arena whose images are never
cut, where all slide together whenever no hole takes the next; and slots of the largest rank.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import mean
from typing import Protocol

import torch

from engine.benchmarks import results
from engine.benchmarks.adapter_traffic import ELEMENT_BYTES, SHAPE, without_memory
from engine.benchmarks.random_adapters import random_layout
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import LINEARS
from lorikeet_engine.residency.blocks import FreeList
from lorikeet_engine.residency.eviction import Use
from lorikeet_engine.residency.packing import PackedLayout
from lorikeet_engine.residency.residents import Residents
from lorikeet_engine.residency.slots import SlotPool

ARENA_BYTES = 40 * 10**9
COPY_BYTES_PER_S = 4.3e12  # of an H200, read plus written
SLOTS = 2048
LOADS, SAMPLES = 100_000, 200
Q_AND_V = (LINEARS.index("q_proj"), LINEARS.index("v_proj"))


@dataclass(frozen=True, slots=True)
class Mix:
    """Adapters of these ranks, a share of them on q and v alone, the others on all linears."""

    name: str
    ranks: tuple[int, ...]
    q_and_v: float

    def draw(self, loads: int, seed: int = 1) -> list[PackedLayout]:
        """Each rank is as likely as the others."""
        chance = random.Random(seed)
        layouts = {
            (rank, narrow): random_layout(SHAPE, rank, Q_AND_V if narrow else range(len(LINEARS)))
            for rank in self.ranks
            for narrow in (False, True)
        }
        return [
            layouts[chance.choice(self.ranks), chance.random() < self.q_and_v] for _ in range(loads)
        ]


MIXES = (
    Mix("ranks 8 to 64", (8, 16, 32, 64), 0.0),
    Mix("ranks 4 to 256, a quarter on q and v", (4, 8, 16, 32, 64, 128, 256), 0.25),
)


class Arena(Protocol):
    """What takes adapters in and lets others go for them."""

    def load(self, layout: PackedLayout) -> int:
        """Returns in how many pieces the image lies."""

    @property
    def used_elements(self) -> int:
        """What images occupy."""

    @property
    def images(self) -> int:
        """How many there are."""

    @property
    def moved_elements(self) -> int:
        """How much has been moved to close holes."""


class Ours:
    """The product's, with a policy by which everybody is as likely to go as anybody."""

    def __init__(self, elements: int) -> None:
        self._pool = SlotPool(without_memory(elements, SLOTS))
        self._chance, self._now = random.Random(2), 0
        self._residents = Residents(self._pool, self, self, lambda: float(self._now))

    def load(self, layout: PackedLayout) -> int:
        """See Arena."""
        self._now += 1
        ref = AdapterRef("t", "", 1, str(self._now))
        assert self._residents.make_room(layout.elements, insist=False)
        self._residents.place(ref, layout, torch.empty(0), wanted=False)
        return self._pieces

    @property
    def used_elements(self) -> int:
        """See Arena."""
        return self._pool.used_elements

    @property
    def images(self) -> int:
        """See Arena."""
        return len(self._residents.snapshot())

    @property
    def moved_elements(self) -> int:
        """See Arena."""
        return self._pool.moved_elements

    def worth(self, use: Use) -> float:
        """As an EvictionPolicy: lives of exponential length."""
        return use.at_s + self._chance.expovariate(1 / LOADS)

    def copy(self, image: torch.Tensor, blocks: Sequence[torch.Tensor]) -> None:  # noqa: ARG002
        """As a Transfer."""
        self._pieces = len(blocks)

    def wait_for(self, _reads: None) -> None:
        """As a Transfer."""

    def moving(self) -> AbstractContextManager[None]:
        """As a Transfer."""
        return nullcontext()


class OnePiece:
    """Images that are never cut; all slide to the front when no hole takes the next."""

    def __init__(self, elements: int) -> None:
        self._blocks = FreeList(elements)
        self._chance = random.Random(2)
        self._placed: list[tuple[int, int]] = []  # offset and elements
        self.moved_elements = 0

    def load(self, layout: PackedLayout) -> int:
        """See Arena."""
        while self._blocks.free < layout.elements:
            at = self._chance.randrange(len(self._placed))
            self._placed[at], self._placed[-1] = self._placed[-1], self._placed[at]
            self._blocks.release(*self._placed.pop())
        offset = self._blocks.allocate(layout.elements)
        if offset is None:
            self._slide()
            offset = self._blocks.allocate(layout.elements)
        assert offset is not None
        self._placed.append((offset, layout.elements))
        return 1

    @property
    def used_elements(self) -> int:
        """See Arena."""
        return self._blocks.total - self._blocks.free

    @property
    def images(self) -> int:
        """See Arena."""
        return len(self._placed)

    def _slide(self) -> None:
        slid, end = [], 0
        for offset, elements in sorted(self._placed):
            self.moved_elements += elements if offset != end else 0
            slid.append((end, elements))
            end += elements
        self._placed = slid
        self._blocks.close_holes(0, self._blocks.total)


@dataclass(frozen=True, slots=True)
class Sample:
    """What some hundreds of loads were like, on average.

    used: the share of the arena that images occupy. images: how many. moved: bytes moved to close
    holes, for each that was loaded. pause_ms: the longest that a load's moves would take at the
    speed of a device copy. pieces: of an image.
    """

    used: float
    images: float
    moved: float
    pause_ms: float
    pieces: float


def sample(arena: Arena, layouts: Sequence[PackedLayout]) -> Sample:
    """Load these."""
    used, images, pieces, moves = [], [], [], [arena.moved_elements]
    for layout in layouts:
        pieces.append(arena.load(layout))
        used.append(arena.used_elements)
        images.append(arena.images)
        moves.append(arena.moved_elements)
    longest = max(after - before for before, after in pairwise(moves))
    loaded = sum(layout.elements for layout in layouts)
    return Sample(
        used=mean(used) * ELEMENT_BYTES / ARENA_BYTES,
        images=mean(images),
        moved=(moves[-1] - moves[0]) / loaded,
        pause_ms=2 * longest * ELEMENT_BYTES / COPY_BYTES_PER_S * 1e3,
        pieces=mean(pieces),
    )


def measure(mix: Mix, arena: Callable[[int], Arena], loads: int = LOADS) -> list[Sample]:
    """The samples in their order; the first are those of an arena that fills."""
    layouts, size = mix.draw(loads), max(1, loads // SAMPLES)
    one = arena(ARENA_BYTES // ELEMENT_BYTES)
    return [sample(one, layouts[at : at + size]) for at in range(0, loads, size)]


def steady(samples: Sequence[Sample]) -> dict[str, float]:
    """The means once the arena is full, and the longest pause of all."""
    full = samples[len(samples) // 10 :]
    means = {name: mean([getattr(one, name) for one in full]) for name in Sample.__slots__}
    return means | {"pause_ms": max(one.pause_ms for one in samples)}


def main() -> None:
    """Print what a full arena is like; write every sample."""
    parser = results.arguments(__doc__)
    parser.add_argument("--loads", type=int, default=LOADS)
    options = parser.parse_args()
    mixes = {}
    for mix in MIXES:
        runs = {arena.__name__: measure(mix, arena, options.loads) for arena in (Ours, OnePiece)}
        for name, samples in runs.items():
            print(f"{mix.name}, {name}: {steady(samples)}")
        slot = random_layout(SHAPE, max(mix.ranks)).elements
        true = mean([layout.elements for layout in mix.draw(options.loads)])
        fixed = {"images": ARENA_BYTES // (slot * ELEMENT_BYTES), "used": true / slot}
        print(f"{mix.name}, slots of the largest rank: {fixed}")
        arenas = {name: [asdict(one) for one in samples] for name, samples in runs.items()}
        mixes[mix.name] = {"loads": options.loads, "fixed": fixed, **arenas}
    results.write(options.json, {"commit": options.commit}, mixes=mixes)


if __name__ == "__main__":
    main()
