"""Messages about an engine's state: plain and picklable, read while the engine steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.costs import MeasuredCosts, StepCosts


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about a started engine that callers need; they never change.

    max_context: most tokens of prompt plus output.
    step_costs: costs measured at the start.
    quantization: number format, in words, that the base model's linears were rounded to; None
        without.
    fp8_kv: whether the KV cache is FP8 instead of the base model's dtype.
    tensor_parallel: EngineSettings.tensor_parallel.
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
    """Histogram of values: counts[i] values are above bounds[i − 1] and at most bounds[i].

    counts: one more entry than bounds, for values above all bounds.
    total: sum of all values.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class TierStatus:
    """Contents and capacity of one tier, and its counts since the start.

    Bytes of the GPU are of one of the GPUs that share the model; bytes of other tiers are of all.
    The disk's numbers cover all processes that share the folder, except evictions and
    checksum_failures, which are this process's own.

    adapters: number of adapters; an adapter counts in every tier that holds it.
    pinnable_bytes: most bytes that images of pinned adapters may take.
    evictions: adapters evicted since the start.
    checksum_failures: adapters found damaged since the start.
    """

    adapters: int
    used_bytes: int
    capacity_bytes: int
    pinnable_bytes: int
    evictions: int
    checksum_failures: int = 0


class EvictionCandidate(NamedTuple):
    """Adapter that the GPU would evict first.

    uses: recent uses, as the eviction policy counts them.
    """

    image_bytes: int
    uses: float


@dataclass(frozen=True)
class LiveStats:
    """State of an engine at one moment, as far as routing needs it, in a few bytes.

    running: sequences that take part in steps.
    decoding: running sequences that decode.
    prefilling: running sequences without a token yet, or preempted ones that compute theirs again.
    waiting: sequences that take part in no step.
    pending_tokens: tokens to compute of the waiting and prefilling sequences.
    pending_seen: Σ of seen_tokens over these sequences.
    ranks: Σ rank of the distinct adapters that decode.
    context: Σ of StepCosts.decode_sees over the decoding sequences.
    oldest_wait_s: longest wait of a sequence without a token.
    loading_bytes: bytes of images on their way to the GPU, in whatever tier.
    free_bytes: unused bytes of the arena.
    room_bytes: free_bytes plus bytes that could be evicted now.
    victim: first adapter to evict; None if none can be.
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
        """Number of sequences that wait or are prefilling."""
        return self.waiting + self.prefilling


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """State of an engine, contents of each tier, and counts since the start.

    costs: defaults where nothing was measured.
    lookups: accepted requests by the tier of their adapter.
    loads: seconds by the tier that an adapter was loaded from: from remote to the disk, from the
        disk to the host, from the host to the GPU. An adapter loaded from remote makes all three.
    load_failures: failed loads of any kind.
    prompt_tokens: prompt tokens of the choices that have begun.
    cached_tokens: part of prompt_tokens that was in the KV cache.
    step_s: seconds from a step's launch, or from the reading of the step before if later, to its
        reading.
    step_sequences: numbers of sequences in a step.
    step_adapters: numbers of distinct adapters in a step.
    inter_token_s: seconds between two tokens of a choice, by the tier of its adapter when the
        request came; None without an adapter.
    tensor_parallel: EngineInfo.tensor_parallel.
    moved: new tier, by digest, of adapters that have changed it since the status reported before.
        GPU means that requests can use the adapter now.
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
    """One adapter that an engine holds in a tier nearer than remote.

    image_bytes: bytes of the image on each GPU; None while this engine has not seen the image.
    uses: recent uses, as the eviction policy counts them.
    pinned: whether a pin names the adapter.

    The other fields are about the GPU's arena:

    rank: largest rank; None if not in the arena.
    leases: sequences that use the adapter now.
    kept: whether a pin keeps the adapter there.
    arriving: whether the copy is not finished, so that no request can use the adapter yet.
    pieces: (offset, bytes) of each piece of the image, in order.
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
        """Reference of the adapter."""
        return AdapterRef(self.tenant, self.name, self.version, self.digest)

    @property
    def gpu_bytes(self) -> int:
        """Bytes that the adapter takes in the arena."""
        return sum(size for _, size in self.pieces)


AdapterRows = tuple[tuple[object, ...], ...]
"""Fields of many AdapterStatus; plain tuples are pickled in a third of the time."""


@dataclass(slots=True)
class SlotUse:
    """Use of an adapter by a tenant since the last report.

    leased_s: time that the slot was leased for the tenant's requests. Time shared by several leases
        of a tenant counts once; tenants that lease at the same time bear equal parts.
    loads: loads to the GPU that a request of the tenant was the first to ask for.
    load_bytes: bytes of these loads.
    """

    tenant: str
    ref: AdapterRef
    leased_s: float = 0.0
    loads: int = 0
    load_bytes: int = 0
