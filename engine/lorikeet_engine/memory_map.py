"""What lies where in an engine's memory at one moment: plain, picklable, cheap to make."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lorikeet_engine.adapter import Residency
from lorikeet_engine.counts import TierCounts


class Block(NamedTuple):
    """One adapter in the GPU's arena.

    rank: its largest. leases: sequences that use it now. pinned: it may not be evicted. arriving:
    its copy is not over, nobody can use it yet. pieces: (offset, size) of each, bytes of the arena,
    in the image's order.
    """

    tenant: str
    name: str
    version: int
    digest: str
    rank: int
    leases: int
    pinned: bool
    arriving: bool
    pieces: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """An engine's memory and the sequences that use it.

    oldest_wait_s: how long the first without a token has waited. rows: the fields of Blocks, which
    do not overlap; plain tuples, since there may be thousands and Blocks take three times as long
    to pickle.
    """

    running: int
    waiting: int
    oldest_wait_s: float
    kv_pages_used: int
    kv_pages_total: int
    tiers: Mapping[Residency, TierCounts]
    rows: tuple[tuple[object, ...], ...] = ()

    @property
    def blocks(self) -> list[Block]:
        """Who lies in the arena."""
        return [Block(*row) for row in self.rows]  # type: ignore[arg-type]
