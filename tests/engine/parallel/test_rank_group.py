"""Collectives arrive: sums everywhere, logits at the leader, the leader's tokens everywhere."""

import time
from datetime import timedelta

import pytest
import torch

from lorikeet_engine.parallel import sums
from lorikeet_engine.parallel.rank_group import RankGroup
from lorikeet_engine.parallel.sums import SymmetricSums
from tests.engine.ranks import run_ranks

VOCABULARY = 27  # of four ranks, 8 each: the last has three; of eight, four have none
LOGITS = torch.arange(3.0 * VOCABULARY).view(3, VOCABULARY)


def exchange(group: RankGroup) -> dict[str, torch.Tensor | tuple[int, ...]]:
    numbers = torch.full((2, 3), 10.0**group.rank, dtype=torch.float64)
    group.sums.all_reduce(numbers)
    tokens = torch.tensor([5, 7]) * (group.rank == 0)
    group.broadcast_tokens(tokens)
    kept = group.shard.vocabulary(VOCABULARY)
    part = LOGITS[:, kept.start : kept.stop].contiguous()
    return {
        "sum": numbers,
        "tokens": tokens,
        "logits": group.gather_logits(part, VOCABULARY),
        "no logits": group.gather_logits(part[:0], VOCABULARY),
        "minimum": group.minimum([10 - group.rank, 3 + group.rank]),
    }


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_exchange_sums_logits_tokens_and_the_least_of_numbers(tmp_path, world):
    results = run_ranks(world, exchange, tmp_path)
    for result in results:
        assert torch.equal(result["sum"], torch.full_like(result["sum"], (10**world - 1) // 9))
        assert result["tokens"].tolist() == [5, 7]
        assert result["no logits"].shape == (0, VOCABULARY)
        assert result["minimum"] == (11 - world, 3)
    leader, *followers = (result["logits"] for result in results)
    assert torch.equal(leader, LOGITS)
    assert leader.is_contiguous()
    assert all(logits.shape == (0, VOCABULARY) for logits in followers)


class BrokenMemory:
    """Memory that fails in rank 1: `while_allocating`, or in the exchange with the other ranks."""

    while_allocating = True

    def __init__(self, *_: object) -> None:
        if self.while_allocating and self.group.rank == 1:
            raise RuntimeError("no such memory")

    def map_peers(self) -> "BrokenMemory":
        if self.group.rank == 1:
            raise RuntimeError("cannot map it")
        self.group.sums._store.wait(["what rank 1 would have said"])
        return self


class BrokenInExchange(BrokenMemory):
    while_allocating = False


def sum_without_memory(group: RankGroup) -> list[tuple[bool, bool, float, float]]:
    sums.can_map_peers = lambda *_: True
    sums._MAP = timedelta(seconds=0.5)
    BrokenMemory.group = group
    found = []
    for broken in (BrokenMemory, BrokenInExchange):
        sums.SymmetricSums = sums.RowMemory = broken
        began_s = time.monotonic()
        group.sums._symmetric = SymmetricSums.__new__(SymmetricSums)
        group.sums.connect_rows(8)
        no_exchange = group.sums.exchange_for(torch.ones(1, 8)) is None
        group.sums._symmetric = group.sums._connect_symmetric(torch.device("cpu"))
        numbers = torch.ones(1)
        group.sums.all_reduce(numbers)
        took_s = time.monotonic() - began_s
        found.append((no_exchange, group.sums._symmetric is None, numbers.item(), took_s))
    return found


def test_all_ranks_go_on_without_symmetric_memory_soon_when_one_has_none(tmp_path):
    for found in run_ranks(2, sum_without_memory, tmp_path):
        for no_exchange, left_out, total, took_s in found:
            assert (no_exchange, left_out, total) == (True, True, 2.0)
            assert took_s < 10
