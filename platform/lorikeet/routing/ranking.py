"""Which replica a request should go to: pure functions, which gateways and the simulator call.

`rank_by_cost` sorts replicas by what the request is expected to cost there; CostCoefficients says
what a step and a load take, and how one is weighed against the other.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Generic, NamedTuple, TypeVar

from lorikeet.protocol.messages import Candidate, Cost, Work
from lorikeet.routing.locations import PrefixHashes
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.costs import LoadCosts, StepCosts, seen_tokens

R = TypeVar("R", bound=Hashable)

MOST_ON_GPU = 2
MOST_OFF_GPU = 2
"""Replicas of a sample that have the adapter on the GPU, and that have it on host or disk."""


@dataclass(frozen=True, slots=True)
class CostCoefficients:
    """All coefficients of a replica's expected cost.

    others_weight: what a second costs by which a request delays another's answer, in seconds of its
    own first token. copy_s: what it is worth not to load an adapter. evicted_use_s: for each recent
    use of what is evicted for it, about a load from the disk. answer_tokens: an answer's length,
    not known ahead. docs/routing.md has what other values of the three did.
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
    """Requests that one replica could answer each second with its batch always full.

    prompt_tokens, answer_tokens: means. ranks: Σ rank of a step.
    """
    steps = costs.steps
    prompt_s = steps.prompts_s(prompt_tokens, prompt_tokens**2 / 2)
    prompt_s += prompt_tokens * steps.lora_token_s if ranks else 0.0
    context = steps.max_running * steps.decode_sees(prompt_tokens + answer_tokens / 2)
    token_s = steps.step_s(steps.max_running, ranks, context) / steps.max_running
    return 1.0 / (prompt_s + answer_tokens * token_s)


class RoutingRequest(NamedTuple):
    """A request as routing sees it.

    prefix_hashes: of its prompt, by the function of that name; empty if unknown. tenant: None if it
    has none.
    """

    work: Work
    adapter: AdapterRef | None = None
    prefix_hashes: PrefixHashes = ()
    tenant: str | None = None

    @property
    def digest(self) -> str | None:
        """Its adapter's digest; None for the base model."""
        return self.adapter.digest if self.adapter else None


@dataclass(slots=True)
class RoutingStatus:
    """What a replica does at one moment, as far as routing weighs it.

    running: sequences that decode. ranks: Σ rank of their distinct adapters. context: Σ of what
    they see, StepCosts.decode_sees. waiting, waiting_tokens: requests that have no token yet, and
    their prompts; waiting_seen: Σ of seen_tokens over these. loading_bytes: adapters on their way
    to its GPU. room_bytes: what of the arena is free or could be evicted now; None if unknown,
    which is taken for room enough.
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
        """Count a request that waits, of whose prompt nothing is cached."""
        self.waiting += 1
        self.waiting_tokens += prompt_tokens
        self.waiting_seen += seen_tokens(prompt_tokens)

    def remove_waiting(self, prompt_tokens: int) -> None:
        """Count that request no more."""
        self.waiting -= 1
        self.waiting_tokens -= prompt_tokens
        self.waiting_seen -= seen_tokens(prompt_tokens)


class ReplicaOption(NamedTuple, Generic[R]):
    """A replica that could take the request, and what is known of it.

    costs: of steps and loads there. tier: where it has the adapter. running: whether a sequence of
    that adapter decodes there. evicted_uses: see the function of that name. cached_tokens: how many
    of the prompt's it has computed before. loading: whether the adapter is on its way to its GPU
    already, its bytes among those of `status`. queue_share: what share of all that waits there
    comes before the request, since tenants take turns. can_fetch: whether it can fetch adapters.
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


class Holders(NamedTuple, Generic[R]):
    """The replicas that have a request's adapter.

    on_gpu: those with it on the GPU or on its way there. off_gpu: with it on the host; where there
    are none, on the disk. rendezvous: asked where no replica has it, for the replicas to which all
    gateways then send it.
    """

    on_gpu: Sequence[R]
    off_gpu: Sequence[R]
    rendezvous: Callable[[], Sequence[R]]


def candidate_sample(holders: Holders[R] | None, everyone: Sequence[R], rng: Random) -> list[R]:
    """The few replicas to look at, each once: however many there are, a request costs the same.

    Two with the adapter on the GPU, two with it on host or disk, and those without it on the GPU of
    two at random: the better of two is almost as good as the best of all (Mitzenmacher, "The power
    of two choices", 2001). Of more it is worse: gateways learn late what others send, and all would
    send to the one that was the best. holders: None for the base model.
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
    """The replicas by expected cost, the least first; equals keep their order.

    Those that lack the adapter and cannot fetch it come last.
    """
    costs = [(expected_cost(work, each), each) for each in options]
    costs.sort(key=lambda of: (_cannot_get_adapter(of[1]), of[0].total_s))
    return [Candidate(each.replica, each.tier, cost) for cost, each in costs]


def _cannot_get_adapter(option: ReplicaOption[R]) -> bool:
    return option.tier is Residency.REMOTE and not option.can_fetch


def expected_cost(work: Work, option: ReplicaOption[R]) -> Cost:
    """The cost of the request at a replica, in seconds to its first token.

    The wait for the prompts before it and the load overlap. Others pay in three ways: while this
    prompt is computed they decode slowly; with it each of their steps is longer, by what it sees
    and by its rank if its adapter is not in the batch yet; what is evicted for it will be missed.
    """
    costs, status = option.costs, option.status
    steps = costs.steps
    step_s = steps.step_s(status.running, status.ranks, status.context)
    tokens = max(1, work.prompt_tokens - option.cached_tokens)
    prefill_s = steps.prefill_s(
        tokens,
        work.rank,
        work.prompt_tokens - tokens,
        sequences=status.running,
        ranks=status.ranks,
        context=status.context,
    )
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
    new_bytes = 0 if option.loading else work.adapter_bytes
    load_s, copy_s = costs.loads.load_s(option.tier, status.loading_bytes + new_bytes), 0.0
    if option.tier is not Residency.GPU and not option.loading:
        if status.room_bytes is not None and status.room_bytes < work.adapter_bytes:
            load_s += costs.answer_tokens * step_s / max(1, status.running)  # an answer must end
        copy_s = costs.copy_s + costs.evicted_use_s * option.evicted_uses
    return Cost(prefill_s, wait_s, load_s, costs.others_weight * delay_s, copy_s)


def evicted_uses(new_bytes: int, free_bytes: int, victim_bytes: int, victim_uses: float) -> float:
    """Recent uses of what an arena would evict for new_bytes.

    An estimate, from the adapter that would be evicted first.
    """
    missing = new_bytes - free_bytes
    return victim_uses * max(1.0, missing / victim_bytes) if missing > 0 else 0.0


def _some(of: Sequence[R], most: int, rng: Random) -> list[R]:
    return list(of) if len(of) <= most else rng.sample(of, most)
