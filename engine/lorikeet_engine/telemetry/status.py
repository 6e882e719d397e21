"""What an engine reports of itself: plain and picklable, read while it steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.costs import MeasuredCosts, StepCosts


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What callers must know of a started engine; never changes.

    max_context: tokens of prompt plus output. step_costs: as measured at start. quantization: what
    the base model's linears were rounded to, in words; None: to nothing. fp8_kv: whether the KV
    cache is FP8, and not of the base model's dtype. tensor_parallel: EngineSettings'.
    """

    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    step_costs: StepCosts
    quantization: str | None = None
    fp8_kv: bool = False
    tensor_parallel: int = 1


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram of values: counts[i] of them are above bounds[i − 1] and at most bounds[i].

    counts has one more entry than bounds, for what is above all of them. total: their sum.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class TierStatus:
    """What one tier holds now, its capacity, and how many adapters it has evicted so far.

    An adapter counts in every tier that holds it. Bytes of the GPU are of one of those that share
    the model, elsewhere of all. pinnable_bytes: the most that images of pinned adapters can take.
    checksum_failures: how many were found damaged. The disk's numbers are of all processes that
    share the folder, but for these and the evictions, which are this process's.
    """

    adapters: int
    used_bytes: int
    capacity_bytes: int
    pinnable_bytes: int
    evictions: int
    checksum_failures: int = 0


class EvictionCandidate(NamedTuple):
    """The adapter that the GPU would evict first. uses: as the eviction policy counts them."""

    image_bytes: int
    uses: float


@dataclass(frozen=True)
class LiveStats:
    """What an engine does at one moment, as far as routing needs it, in a few bytes.

    running: sequences that take part in steps, of which some are decoding and some prefilling: the
    latter have no token yet, or were preempted. waiting: sequences that take part in none.
    pending_tokens: tokens to compute of those that wait or are prefilling; pending_seen: Σ of their
    seen_tokens. ranks: Σ rank of the distinct adapters that decode; context: Σ of what
    decoding sequences see, by StepCosts.decode_sees. oldest_wait_s: the longest wait of a sequence
    without a token. loading_bytes: images that are loading to the GPU, in whatever tier.
    free_bytes: unused bytes of the arena; room_bytes: those and what could be evicted now. victim:
    None if nothing could.
    """

    running: int = 0
    decoding: int = 0
    prefilling: int = 0
    waiting: int = 0
    pending_tokens: int = 0
    pending_seen: int = 0
    ranks: int = 0
    context: int = 0
    oldest_wait_s: float = 0.0
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    loading_bytes: int = 0
    free_bytes: int = 0
    room_bytes: int = 0
    victim: EvictionCandidate | None = None

    @property
    def pending(self) -> int:
        """How many sequences wait or are prefilling."""
        return self.waiting + self.prefilling


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine does now, what each tier holds, and what was counted since the start.

    costs: as far as they were measured. lookups: accepted requests by where their adapter was.
    loads: seconds by where an adapter was loaded from: from remote to the disk, from the disk to
    the host, from the host to the GPU, so that one that was remote makes all three. load_failures:
    of any kind. prompt_tokens: of the choices that have begun; cached_tokens of them were in the KV
    cache. step_s: from a step's launch, or from when the one before it was read, until it was read.
    step_sequences, step_adapters: how many sequences and distinct adapters a step had.
    inter_token_s: between two tokens of a choice, by where its adapter was when the request came;
    None without one.
    tensor_parallel: EngineInfo's.
    moved: where adapters are now that were elsewhere in the status reported before, by digest; GPU
    means that requests can use them now.
    """

    live: LiveStats = field(default_factory=LiveStats)
    tiers: Mapping[Residency, TierStatus] = field(default_factory=dict)
    costs: MeasuredCosts = field(default_factory=MeasuredCosts)
    lookups: Mapping[Residency, int] = field(default_factory=dict)
    loads: Mapping[Residency, Distribution] = field(default_factory=dict)
    load_failures: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    step_s: Distribution = field(default_factory=Distribution)
    step_sequences: Distribution = field(default_factory=Distribution)
    step_adapters: Distribution = field(default_factory=Distribution)
    inter_token_s: Mapping[Residency | None, Distribution] = field(default_factory=dict)
    tensor_parallel: int = 1
    moved: Mapping[str, Residency] = field(default_factory=dict)


class AdapterStatus(NamedTuple):
    """One adapter that an engine holds somewhere nearer than remote.

    image_bytes: what it takes on each GPU, there or not; None while this engine has not seen its
    image. uses: its recent uses, as the eviction policy counts them. pinned: whether a pin names
    it. The rest is about the GPU's arena. rank: its largest, None if it does not lie there. leases:
    sequences that use it now. kept: whether a pin keeps it there. arriving: whether its copy is not
    over, so that no request can use it yet. pieces: (offset, size) of each, bytes, in the image's
    order.
    """

    tenant: str
    name: str
    version: int
    digest: str
    residency: Residency
    image_bytes: int | None
    uses: float
    pinned: bool
    rank: int | None = None
    leases: int = 0
    kept: bool = False
    arriving: bool = False
    pieces: tuple[tuple[int, int], ...] = ()

    @property
    def ref(self) -> AdapterRef:
        """The adapter's reference."""
        return AdapterRef(self.tenant, self.name, self.version, self.digest)

    @property
    def gpu_bytes(self) -> int:
        """The bytes that it takes of the arena."""
        return sum(size for _, size in self.pieces)


AdapterRows = tuple[tuple[object, ...], ...]
"""AdapterStatus's fields: of thousands, plain tuples are pickled in a third of the time."""


@dataclass(slots=True)
class SlotUse:
    """A tenant's use of an adapter since the last report.

    leased_s: how long its slot was leased for the tenant's requests; time that several leases share
    counts once, and at each moment the tenants that lease it bear equal parts. loads, load_bytes:
    onto the GPU, because a request of the tenant asked for it before any other's did.
    """

    tenant: str
    ref: AdapterRef
    leased_s: float = 0.0
    loads: int = 0
    load_bytes: int = 0
