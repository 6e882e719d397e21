"""Ranking of replicas for a request by expected cost: pure functions for gateways and simulator.

`rank_by_cost` sorts replicas by `expected_cost`. CostCoefficients holds the times of steps and
loads (`lorikeet_engine/costs.py`) and the weights between them.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Generic, NamedTuple, TypeVar

from lorikeet.protocol.messages import Candidate, Cost, Work
from lorikeet.routing.locations import PrefixHashes
from lorikeet_engine.adapter import Adapter, Residency
from lorikeet_engine.costs import LoadCosts, StepCosts, seen_tokens

R = TypeVar("R", bound=Hashable)

MOST_ON_GPU = 2
"""Maximum number of replicas in a candidate sample that have the request's adapter on the GPU."""
MOST_OFF_GPU = 2
"""Maximum number of replicas in a candidate sample that have the request's adapter on host or disk
only.
"""


@dataclass(frozen=True, slots=True)
class CostCoefficients:
    """Coefficients of a replica's expected cost.

    steps: times of engine steps.
    loads: times of adapter loads.
    answer_tokens: assumed length of an answer, which is not known in advance.
    others_weight: cost of delaying another request's answer by a second, in seconds of delay to the
        routed request's own first token.
    copy_s: seconds that are worth waiting to avoid another copy of the adapter.
    evicted_use_s: seconds of cost per recent use of evicted adapters, about the time of a load from
        disk.

    docs/routing.md shows the effect of other values of the last three.
    """

    steps: StepCosts = field(default_factory=StepCosts)
    loads: LoadCosts = field(default_factory=LoadCosts)
    answer_tokens: float = 220.0  # mean of Azure's conversations
    others_weight: float = 0.1
    copy_s: float = 0.2
    evicted_use_s: float = 0.03


H200_LLAMA_8B = CostCoefficients()


def capacity_per_s(
    costs: CostCoefficients, prompt_tokens: float, answer_tokens: float, ranks: int
) -> float:
    """Return the requests per second that one replica can answer with its batch always full.

    costs: coefficients of the replica.
    prompt_tokens: mean length of a prompt.
    answer_tokens: mean length of an answer.
    ranks: sum of the ranks of a step's distinct adapters; 0 without adapters.
    """
    steps = costs.steps
    prompt_s = steps.prompts_s(prompt_tokens, prompt_tokens**2 / 2)
    prompt_s += prompt_tokens * steps.lora_token_s if ranks else 0.0
    context = steps.max_running * steps.decode_sees(prompt_tokens + answer_tokens / 2)
    token_s = steps.step_s(steps.max_running, ranks, context) / steps.max_running
    return 1.0 / (prompt_s + answer_tokens * token_s)


class RoutingRequest(NamedTuple):
    """Request as routing sees it.

    work: numbers of prompt tokens and sequences, and the adapter's rank and size.
    adapter: None for the base model.
    prefix_hashes: hashes of the prompt's blocks, from `prefix_hashes`; empty if unknown.
    tenant: None if the request has none.
    """

    work: Work
    adapter: Adapter | None = None
    prefix_hashes: PrefixHashes = ()
    tenant: str | None = None

    @property
    def digest(self) -> str | None:
        """Digest of the request's adapter; None for the base model."""
        return self.adapter.digest if self.adapter else None


@dataclass(slots=True)
class RoutingStatus:
    """Load of a replica at one moment.

    running: number of decoding sequences.
    ranks: sum of the LoRA ranks of the distinct adapters of decoding sequences.
    context: sum over decoding sequences of the tokens that one decode attends to, averaged over the
        model's layers.
    waiting: number of requests without a first token.
    waiting_tokens: number of these requests' prompt tokens.
    waiting_seen: number of pairs of a token of a waiting prompt and a token that it attends to.
    loading_bytes: bytes of the adapters being loaded to the GPU.
    room_bytes: bytes of the GPU's arena (its memory for adapters) that are free or can be evicted
        now; None: unknown, assumed to be enough.
    """

    running: int = 0
    ranks: int = 0
    context: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    waiting_seen: int = 0
    loading_bytes: int = 0
    room_bytes: int | None = None

    def add_waiting(self, prompt_tokens: int) -> None:
        """Add a waiting request, no part of whose prompt is cached."""
        self.waiting += 1
        self.waiting_tokens += prompt_tokens
        self.waiting_seen += seen_tokens(prompt_tokens)

    def remove_waiting(self, prompt_tokens: int) -> None:
        """Remove a waiting request that `add_waiting` added."""
        self.waiting -= 1
        self.waiting_tokens -= prompt_tokens
        self.waiting_seen -= seen_tokens(prompt_tokens)


class ReplicaOption(NamedTuple, Generic[R]):
    """Replica that could take a request.

    status: load of the replica.
    costs: coefficients of the replica.
    tier: nearest tier at which the replica has the request's adapter.
    running: whether a sequence with the adapter decodes on the replica.
    evicted_uses: estimated number of recent uses of the adapters that loading would evict; older
        uses count less.
    cached_tokens: prompt tokens that the replica has computed before.
    loading: whether the adapter is already being loaded to the GPU; `status` counts its bytes.
    queue_share: share of the waiting work that is served before the request, since the engine
        schedules tenants fairly.
    can_fetch: whether the replica can fetch adapters that it lacks.
    new_share: share of a composition's adapters that would be loaded, taken as equally large.
    host_tokens: those of the cached tokens whose KV pages only the replica's host has.
    host_bytes: bytes of these pages on one GPU.
    """

    replica: R
    status: RoutingStatus
    costs: CostCoefficients
    tier: Residency = Residency.GPU
    running: bool = False
    evicted_uses: float = 0.0
    cached_tokens: int = 0
    loading: bool = False
    queue_share: float = 1.0
    can_fetch: bool = True
    new_share: float = 1.0
    host_tokens: int = 0
    host_bytes: int = 0


class Holders(NamedTuple, Generic[R]):
    """Replicas that have a request's adapter.

    on_gpu: replicas with the adapter on the GPU or loading to it.
    off_gpu: replicas with the adapter on the host; if there are none, on the disk.
    rendezvous: returns the replicas that all gateways choose when no replica has the adapter.
    """

    on_gpu: Sequence[R]
    off_gpu: Sequence[R]
    rendezvous: Callable[[], Sequence[R]]


def candidate_sample(holders: Holders[R] | None, everyone: Sequence[R], rng: Random) -> list[R]:
    """Return a small sample of replicas to rank, so that the work does not grow with the fleet.

    The sample has up to MOST_ON_GPU replicas with the adapter on the GPU, up to MOST_OFF_GPU with
    it on host or disk (or, if no replica has it, rendezvous candidates), and up to two random
    replicas that do not have it on the GPU. The better of two random replicas is almost as good as
    the best of all (Mitzenmacher, "The power of two choices", 2001). A larger sample is worse:
    gateways learn late of each other's requests, and would all send to the same best replica.

    holders: replicas that have the request's adapter; None for the base model.
    everyone: all usable replicas, at least one.
    """
    few: list[R] = []
    on_gpu = holders.on_gpu if holders is not None else ()
    if holders is not None:
        off_gpu = holders.off_gpu if on_gpu or holders.off_gpu else holders.rendezvous()
        few = _some(on_gpu, MOST_ON_GPU, rng) + _some(off_gpu, MOST_OFF_GPU, rng)
    one = int(rng.random() * len(everyone))
    other = (one + 1 + int(rng.random() * (len(everyone) - 1))) % len(everyone)
    drawn = (each for each in (everyone[one], everyone[other]) if each not in on_gpu)
    return list(dict.fromkeys([*few, *drawn]))


def rank_by_cost(work: Work, options: Iterable[ReplicaOption[R]]) -> list[Candidate[R]]:
    """Return the replicas by ascending expected cost; equal costs keep their order.

    work: tokens and adapter of the request.
    options: replicas that could take the request. Those that lack the adapter and cannot fetch it
        come last.
    """
    costs = [(expected_cost(work, each), each) for each in options]
    costs.sort(key=lambda of: (_cannot_get_adapter(of[1]), of[0].total_s))
    return [Candidate(each.replica, each.tier, cost) for cost, each in costs]


def _cannot_get_adapter(option: ReplicaOption[R]) -> bool:
    return option.tier is Residency.REMOTE and not option.can_fetch


def expected_cost(work: Work, option: ReplicaOption[R]) -> Cost:
    """Return the cost of a request at a replica, in seconds to its first token.

    The wait for earlier prompts and the adapter load overlap. Other requests pay in three ways:

    - they decode slowly while this prompt is computed;
    - each of their steps takes longer, by the time to read the tokens that this request attends to,
      and the adapter's weights if no request in the batch uses the adapter yet;
    - adapters that are evicted for this request must be loaded again.
    """
    costs, status = option.costs, option.status
    steps = costs.steps
    step_s = steps.step_s(status.running, status.ranks, status.context)
    prefill_s = _prefill_s(work, option, option.cached_tokens)
    if option.host_tokens:  # the engine fetches pages if that takes less time than computing them
        fetch_s = costs.loads.load_s(Residency.HOST, option.host_bytes)
        computed_s = _prefill_s(work, option, option.cached_tokens - option.host_tokens)
        prefill_s = min(prefill_s + fetch_s, computed_s)
    ahead = option.queue_share * status.waiting
    wait_s = option.queue_share * steps.prompts_s(status.waiting_tokens, status.waiting_seen)
    wait_s += ahead * (step_s - steps.step_s(0, 0))
    missing = work.sequences - (steps.max_running - status.running - ahead)
    if missing > 0:  # a sequence ends every answer_tokens / max_running steps
        wait_s += missing * step_s * costs.answer_tokens / steps.max_running
    new_ranks = 0 if option.running else work.rank
    longer_s = steps.rows_s(status.running + work.sequences) - steps.rows_s(status.running)
    longer_s += steps.rank_s * new_ranks
    sees = steps.decode_sees(work.prompt_tokens + costs.answer_tokens / 2)
    longer_s += steps.seen_token_s * work.sequences * sees
    delay_s = status.running * (prefill_s + costs.answer_tokens * longer_s)
    delay_s += status.waiting * costs.answer_tokens * longer_s
    adapter_bytes = round(option.new_share * work.adapter_bytes)
    new_bytes = 0 if option.loading else adapter_bytes
    load_s, copy_s = costs.loads.load_s(option.tier, status.loading_bytes + new_bytes), 0.0
    if option.tier is not Residency.GPU and not option.loading:
        if status.room_bytes is not None and status.room_bytes < adapter_bytes:
            load_s += costs.answer_tokens * step_s / max(1, status.running)  # an answer must end
        copy_s = costs.copy_s + costs.evicted_use_s * option.evicted_uses
    return Cost(prefill_s, wait_s, load_s, costs.others_weight * delay_s, copy_s)


def _prefill_s(work: Work, option: ReplicaOption[R], cached_tokens: int) -> float:
    """Return the seconds to compute a request's prompt, of which so many tokens are on the GPU."""
    status, tokens = option.status, max(1, work.prompt_tokens - cached_tokens)
    return option.costs.steps.prefill_s(
        tokens,
        work.rank,
        work.prompt_tokens - tokens,
        sequences=status.running,
        ranks=status.ranks,
        context=status.context,
    )


def evicted_uses(new_bytes: int, free_bytes: int, victim_bytes: int, victim_uses: float) -> float:
    """Estimate how often the adapters were used lately that a new adapter would evict from a GPU.

    new_bytes: size of the new adapter.
    free_bytes: free bytes of the GPU's memory for adapters.
    victim_bytes: size of the adapter that would be evicted first.
    victim_uses: number of that adapter's recent uses; older uses count less.
    """
    missing = new_bytes - free_bytes
    return victim_uses * max(1.0, missing / victim_bytes) if missing > 0 else 0.0


def _some(of: Sequence[R], most: int, rng: Random) -> list[R]:
    return list(of) if len(of) <= most else rng.sample(of, most)
