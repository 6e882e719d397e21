"""What ranks say to one another arrives: sums everywhere, logits at the leader, its tokens."""

import pytest
import torch

from lorikeet_engine.parallel.rank_group import RankGroup
from tests.engine.ranks import run_ranks

VOCABULARY = 27  # of four ranks, 8 each: the last has three
LOGITS = torch.arange(3.0 * VOCABULARY).view(3, VOCABULARY)


def exchange(group: RankGroup) -> dict[str, torch.Tensor | tuple[int, ...]]:
    numbers = torch.full((2, 3), 10.0**group.rank)
    group.sum_(numbers)
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


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_exchange_sums_logits_tokens_and_the_least_of_numbers(tmp_path, world):
    results = run_ranks(world, exchange, tmp_path)
    for result in results:
        assert torch.equal(result["sum"], torch.full((2, 3), (10.0**world - 1) / 9))
        assert result["tokens"].tolist() == [5, 7]
        assert result["no logits"].shape == (0, VOCABULARY)
        assert result["minimum"] == (11 - world, 3)
    leader, *followers = (result["logits"] for result in results)
    assert torch.equal(leader, LOGITS)
    assert leader.is_contiguous()
    assert all(logits.shape == (0, VOCABULARY) for logits in followers)
