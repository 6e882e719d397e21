"""Messages about an engine's state: plain and picklable."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.costs import MeasuredCosts, StepCosts
from lorikeet_engine.request import DraftCounts, DraftSums


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about a started engine that callers need; they never change.

    max_context: maximum number of tokens of prompt plus output.
    step_costs: costs of steps, measured at the start.
    quantization: format to which the base model's linears were rounded, in words; None if they were
        not.
    fp8_kv: whether the KV cache is FP8 instead of the base model's dtype.
    tensor_parallel: number of GPUs, or processes on a CPU, among which the base model is divided.
    dtype: data type of activations, such as bfloat16.
    generates: whether the base model has lm_head; without it, it only pools prompts.
    kv_tokens: number of tokens that the KV pages on the GPUs hold; 0: unknown.
    """

    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    step_costs: StepCosts
    quantization: str | None = None
    fp8_kv: bool = False
    tensor_parallel: int = 1
    dtype: str = "float32"
    generates: bool = True
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Distribution:
    """Histogram of values: counts[i] values are above bounds[i − 1] and at most bounds[i].

    counts: has one more entry than bounds, for values above all bounds.
    total: sum of all values.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class TierStatus:
    """Contents and capacity of one tier of adapter memory, and its counts since the start.

    Bytes of the GPU tier are those on one GPU; bytes of the other tiers are for all GPUs that share
    the model together. The disk's numbers cover all processes that share the folder, except
    evictions and checksum_failures, which are this process's own.

    adapters: number of adapters; an adapter counts in every tier that holds it.
    pinnable_bytes: limit on the bytes that images of pinned adapters may take.
    evictions: adapters evicted since the start.
    checksum_failures: adapters found damaged since the start.
    """

    adapters: int
    used_bytes: int
    capacity_bytes: int
    pinnable_bytes: int
    evictions: int
    checksum_failures: int = 0


class StateUsage(NamedTuple):
    """Slots for states of delta nets (linear attention), and counts since the start.

    running: number of slots of running sequences, and of states that are being copied to the cache.
    cached: number of cached states.
    slots: number of all slots.
    slot_bytes: bytes of a slot on each GPU.
    restored: number of sequences that began with a cached state.
    saved: number of states that were cached.
    evicted: number of cached states that were evicted.
    """

    running: int
    cached: int
    slots: int
    slot_bytes: int
    restored: int
    saved: int
    evicted: int


class HostPageUsage(NamedTuple):
    """KV pages in host memory, and counts since the start.

    used: number of pages in host memory.
    pages: number of pages for which host memory has room.
    page_bytes: bytes of a page on each GPU.
    stored: number of pages copied to the host.
    fetched: number of pages copied back to the GPU.
    evicted: number of pages replaced by others.
    damaged: number of pages dropped because the checksum of their fetch was wrong.
    tokens: number of prompt tokens whose pages came from the host.
    of_prompts: number of the pages in host memory that are kept for pinned prompts.
    states, state_slots: number of states of delta nets in host memory, and of those for which it
        has room.
    on_disk, disk_pages: number of pages in the file on the disk, and of those for which it has
        room.
    written, read: number of pages and states written to the file, and read from it.
    """

    used: int
    pages: int
    page_bytes: int
    stored: int
    fetched: int
    evicted: int
    damaged: int
    tokens: int
    of_prompts: int = 0
    states: int = 0
    state_slots: int = 0
    on_disk: int = 0
    disk_pages: int = 0
    written: int = 0
    read: int = 0


class EvictionCandidate(NamedTuple):
    """Adapter that would be evicted first from the GPU.

    uses: recent uses of the adapter: a count of requests that halves every 45 s.
    """

    image_bytes: int
    uses: float


@dataclass(frozen=True)
class LiveStats:
    """State of an engine at one moment, as far as routing needs it, in a few bytes.

    running: number of sequences that take part in steps.
    decoding: number of running sequences that decode.
    prefilling: number of running sequences that compute their prompt or, after a preemption, their
        earlier tokens again.
    waiting: number of sequences that take part in no step.
    pending_tokens: tokens that the waiting and prefilling sequences have yet to compute.
    pending_seen: number of (pending token, token that it attends to) pairs (costs.seen_tokens).
    ranks: sum of the ranks of the decoding sequences' distinct adapters.
    context: number of tokens that the decoding sequences attend to together, averaged over the
        layers (StepCosts.decode_sees).
    oldest_wait_s: longest time that a sequence without an output token has waited, of those that
        are not in the background.
    background: number of running and waiting sequences in the background.
    background_pages: number of KV pages that these hold, each counted for each of its sequences.
    loading_bytes: bytes of adapter images on their way to the GPU, whatever tier they are in now.
    free_bytes: unused bytes of the GPU's adapter memory.
    room_bytes: free_bytes plus the bytes that evictions could free now.
    victim: adapter that would be evicted first; None if no adapter can be evicted.
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
    background: int = 0
    background_pages: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    loading_bytes: int = 0
    free_bytes: int = 0
    room_bytes: int = 0
    victim: EvictionCandidate | None = None

    @property
    def pending(self) -> int:
        """Number of sequences that are waiting or prefilling."""
        return self.waiting + self.prefilling


class BorderUsage(NamedTuple):
    """Memory that adapters and KV pages share, in units, and moves since the start.

    unit_bytes: bytes of a unit on each GPU.
    arena_units, kv_units: units of each side now, with those that are about to arrive.
    lent_units: units that the adapters have borrowed.
    lendable_units: units of KV pages that the adapters may borrow at most.
    moving: units that are moving or wait for sequences to end.
    to_adapters, to_pages: units that have moved since the start.
    """

    unit_bytes: int
    arena_units: int
    kv_units: int
    lent_units: int
    lendable_units: int
    moving: int
    to_adapters: int
    to_pages: int


@dataclass(frozen=True, slots=True)
class EngineStatus(DraftSums):
    """State of an engine, contents of each tier, and counts since the start.

    costs: costs of steps and loads; defaults where nothing was measured.
    lookups: tier → number of accepted requests whose adapter that tier held when they came.
    loads: histograms of the seconds of loads, by the tier that an adapter was loaded from: from
        remote to the disk, from the disk to the host, from the host to the GPU. An adapter loaded
        from remote makes all three loads.
    load_failures: number of failed loads of any kind.
    preemptions: number of times that a sequence was preempted, without those in the background,
        which give way to all others.
    prompt_tokens: number of prompt tokens of the choices that have begun.
    cached_tokens: number of these prompt tokens that were in the KV cache.
    output_tokens: number of tokens delivered to requests.
    drafts: numbers of verified and of accepted drafted tokens (speculative decoding), by the text
        in which they were found: the sequence itself or recent answers.
    step_s: histogram of the seconds from a step's launch to the reading of its tokens. If the
        previous step was read after the launch, the time starts when that step was read.
    step_sequences: histogram of the number of sequences in a step.
    step_adapters: histogram of the number of distinct adapters in a step.
    inter_token_s: histograms of the seconds between two outputs of a choice, by the tier that held
        its adapter when the request came; None without an adapter.
    tensor_parallel: number of GPUs, or processes on a CPU, among which the base model is divided.
    states: states of delta nets; None for a model without delta nets.
    moved: by digest, the new tier of each adapter whose tier has changed since the previous report.
        GPU means that requests can use the adapter now.
    host_pages: KV pages in host memory; None without memory for them.
    border: memory that adapters and KV pages share; None with a fixed border.
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
    drafts: tuple[DraftCounts, ...] = ()
    step_s: Distribution = field(default_factory=Distribution)
    step_sequences: Distribution = field(default_factory=Distribution)
    step_adapters: Distribution = field(default_factory=Distribution)
    inter_token_s: Mapping[Residency | None, Distribution] = field(default_factory=dict)
    tensor_parallel: int = 1
    states: StateUsage | None = None
    moved: Mapping[str, Residency] = field(default_factory=dict)
    host_pages: HostPageUsage | None = None
    border: BorderUsage | None = None


class AdapterStatus(NamedTuple):
    """Adapter that an engine holds in a tier nearer than remote.

    image_bytes: bytes of the adapter's image on each GPU; None if this engine has not loaded the
        adapter and does not know its size.
    uses: recent uses: a count of requests that halves every 45 s.
    pinned: whether there is a pin of the adapter, to any tier.

    The other fields are about the GPU's adapter memory:

    rank: largest LoRA rank of the adapter; None if the adapter is not on the GPU.
    leases: number of sequences that use the adapter now.
    kept: whether a pin keeps the adapter on the GPU.
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
        """AdapterRef that names this adapter."""
        return AdapterRef(self.tenant, self.name, self.version, self.digest)

    @property
    def gpu_bytes(self) -> int:
        """Bytes that the adapter takes in the GPU's adapter memory; 0 if the adapter is not on the
        GPU.
        """
        return sum(size for _, size in self.pieces)


AdapterRows = tuple[tuple[object, ...], ...]
"""Fields of many AdapterStatus; plain tuples are pickled in a third of the time."""


@dataclass(slots=True)
class SlotUse:
    """Use of an adapter's slot on the GPU by a tenant since the last report.

    leased_s: seconds for which the slot was leased for the tenant's requests. Time in which several
        requests of the tenant lease the slot counts once; time in which several tenants lease it is
        divided equally among them.
    loads: number of loads to the GPU that a request of this tenant was the first to ask for.
    load_bytes: bytes of these loads.
    """

    tenant: str
    ref: AdapterRef
    leased_s: float = 0.0
    loads: int = 0
    load_bytes: int = 0
