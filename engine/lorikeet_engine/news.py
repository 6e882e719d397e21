"""What an engine tells those who send it requests, whenever it has changed: plain, picklable."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import LoadCosts


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine does at one moment.

    running: sequences that decode. ranks: Σ rank of their distinct adapters. waiting,
    waiting_tokens: sequences that have no token yet or were preempted, and what of their tokens is
    not computed. oldest_wait_s: how long the first without a token has waited. loading_bytes:
    images on their way to the GPU, wherever they are. free_bytes, room_bytes: of the arena, what
    nobody uses; that and what could be evicted now. victim_bytes, victim_uses: of the adapter that
    would be evicted first, 0 if there is none; uses as the eviction policy counts them, to a tenth.
    kv_used: share of the KV pages in use.
    """

    running: int = 0
    ranks: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    oldest_wait_s: float = 0.0
    loading_bytes: int = 0
    free_bytes: int = 0
    room_bytes: int = 0
    victim_bytes: int = 0
    victim_uses: float = 0.0
    kv_used: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineNews:
    """An engine's load, and what has moved since the news before.

    moved: where adapters are now, by digest; on the GPU means that requests can use it now.
    loads: what loads take here, as far as it was measured.
    """

    load: EngineLoad
    moved: Mapping[str, Residency] = field(default_factory=dict)
    loads: LoadCosts = field(default_factory=LoadCosts)
