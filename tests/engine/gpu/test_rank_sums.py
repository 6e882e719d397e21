"""Sums over several GPUs are right at every size, in graphs as well, and alike in all."""

import pytest
import torch

from lorikeet_engine.parallel.rank_group import RankGroup
from lorikeet_engine.parallel.symmetric_sums import LARGEST_BYTES, ONE_SHOT_BYTES
from tests.engine.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
WORLDS = [gpus for gpus in (2, 4, 8) if gpus <= max(2, torch.cuda.device_count())]
# below, at and above the largest sums of one shot and of two, and some that neither can take
ONE, TWO = ONE_SHOT_BYTES // 2, LARGEST_BYTES // 2
COUNTS = (8, 4096, ONE, ONE + 8, ONE + 16, TWO, TWO + 16, 4093)


def summed(group: RankGroup) -> list[torch.Tensor]:
    """Each count's sums: of one launch, then of two replays of a graph of two sums."""
    device, results = torch.device("cuda", group.rank), []
    for count in COUNTS:
        # of 8 ranks', too, every part of a sum of sums is exact in bfloat16; no two are alike
        each = torch.arange(count, device=device)
        own = (each % 3 + (each % group.world == group.rank)).bfloat16()
        tensor = own.clone()
        group.sum_(tensor)
        results.append(tensor.cpu())
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            group.sum_(tensor)
            group.sum_(tensor)
        for _ in range(2):
            tensor.copy_(own)
            graph.replay()
            results.append(tensor.cpu())
    return results


@pytest.mark.parametrize("world", WORLDS)
def test_sums_are_right_at_every_size_in_graphs_too(tmp_path, world):
    in_each = run_ranks(world, summed, tmp_path, device="cuda")
    for n, (one, *others) in enumerate(zip(*in_each, strict=True)):
        want = world * (torch.arange(len(one)) % 3) + 1
        assert all(torch.equal(one, other) for other in others)
        assert torch.equal(one.float(), want.float() * (1 if n % 3 == 0 else world))
