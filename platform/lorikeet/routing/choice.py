"""Which replica a request should go to: a pure function of what the router knows of a handful."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from lorikeet.routing.costs import Costs
from lorikeet_engine.adapter import Residency

R = TypeVar("R", bound=Hashable)


class Work(NamedTuple):
    """What a request asks of a replica. rank and adapter_bytes: 0 for the base model.

    sequences: how many will decode for it, which share what of the prompts they can.
    """

    prompt_tokens: int
    rank: int = 0
    adapter_bytes: int = 0
    sequences: int = 1


@dataclass(slots=True)
class Load:
    """What a replica does at one moment.

    running: sequences that decode. ranks: Σ rank of their distinct adapters. waiting,
    waiting_tokens: requests that have no token yet, and their prompts. loading_bytes: adapters on
    their way to its GPU. room_bytes: what of the arena is free or could be evicted now.
    """

    running: int = 0
    ranks: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    loading_bytes: int = 0
    room_bytes: int = 0


class Option(NamedTuple, Generic[R]):
    """A replica that could take the request.

    tier: where it has the adapter. running: whether a sequence of that adapter decodes there.
    lost_uses: how often, of late, was used what it would evict for the adapter. cached_tokens: how
    many of the prompt's it has computed before. arriving: whether the adapter is on its way to its
    GPU already, its bytes among those of `load`. turn: what share of all that waits there comes
    before the request, since tenants take turns.
    """

    replica: R
    load: Load
    tier: Residency = Residency.GPU
    running: bool = False
    lost_uses: float = 0.0
    cached_tokens: int = 0
    arriving: bool = False
    turn: float = 1.0


class Cost(NamedTuple):
    """What a request is expected to cost at a replica, part by part, seconds.

    prefill_s: of its own prompt. queue_s: the prompts before it, and a place in the batch. load_s:
    of its adapter from its tier; it overlaps with the queue. others_s: what other requests lose by
    it. copy_s: what it is worth not to make one more copy of the adapter, and of what goes for it.
    """

    prefill_s: float
    queue_s: float
    load_s: float
    others_s: float
    copy_s: float

    @property
    def total_s(self) -> float:
        """What replicas are compared by."""
        return self.prefill_s + self.others_s + max(self.queue_s, self.load_s) + self.copy_s


class Candidate(NamedTuple, Generic[R]):
    """A replica that was considered, where it had the adapter, and what was expected of it."""

    replica: R
    tier: Residency
    cost: Cost


def choose(work: Work, options: Iterable[Option[R]], costs: Costs) -> R:
    """The replica with the least expected cost; among equals the first. Wants at least one."""
    return min(options, key=lambda option: expected_cost_s(work, option, costs)).replica


def expected_cost_s(work: Work, option: Option[R], costs: Costs) -> float:
    """Seconds to the first token, and what the request costs others, in such seconds."""
    return expected_cost(work, option, costs).total_s


def expected_cost(work: Work, option: Option[R], costs: Costs) -> Cost:
    """The same, part by part.

    The wait for the prompts before it and the load overlap. Others pay in three ways: while this
    prompt is computed they decode slowly; with it each of their steps is longer, by its rank if its
    adapter is not in the batch yet; and what is evicted for it will be missed.
    """
    steps, load = costs.steps, option.load
    step_s = steps.decode_s(load.running, load.ranks)
    tokens = max(1, work.prompt_tokens - option.cached_tokens)
    prefill_s = steps.prefill_s(tokens, work.rank, load.running, load.ranks)
    ahead = option.turn * load.waiting
    wait_s = option.turn * load.waiting_tokens * steps.prompt_token_s
    wait_s += ahead * (step_s - steps.base_s)
    seats = steps.max_running - load.running - ahead
    missing = work.sequences - seats
    if missing > 0:  # a sequence ends every answer_tokens / max_running steps
        wait_s += missing * step_s * costs.answer_tokens / steps.max_running
    new_ranks = 0 if option.running else work.rank
    longer_s = steps.sequence_s * work.sequences + steps.rank_s * new_ranks
    delay_s = load.running * (prefill_s + costs.answer_tokens * longer_s)
    delay_s += load.waiting * costs.answer_tokens * longer_s
    others_s = costs.others * delay_s
    if option.tier is Residency.GPU:
        return Cost(prefill_s, wait_s, 0.0, others_s, 0.0)
    if option.arriving:
        load_s = costs.loads.load_s(option.tier, load.loading_bytes)
        return Cost(prefill_s, wait_s, load_s, others_s, 0.0)
    load_s = costs.loads.load_s(option.tier, load.loading_bytes + work.adapter_bytes)
    if load.room_bytes < work.adapter_bytes:  # until some answer ends
        load_s += costs.answer_tokens * step_s / max(1, load.running)
    copy_s = costs.copy_s + costs.lost_use_s * option.lost_uses
    return Cost(prefill_s, wait_s, load_s, others_s, copy_s)
