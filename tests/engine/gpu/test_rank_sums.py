"""Sums over several GPUs are right at every size, also in graphs, and equal on all ranks."""

import random

import pytest
import torch
import torch.distributed as dist

from lorikeet_engine.kernels.fp8 import Activations
from lorikeet_engine.kernels.pointwise import add_rms_norm
from lorikeet_engine.parallel.rank_group import RankGroup
from lorikeet_engine.parallel.sums import LARGEST_BYTES, ONE_SHOT_BYTES, most_rows
from tests.engine.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
WORLDS = [gpus for gpus in (2, 4, 8) if gpus <= max(2, torch.cuda.device_count())]
# below, at and above the largest one-shot and two-shot sums, and some that neither can take
ONE, TWO = ONE_SHOT_BYTES // 2, LARGEST_BYTES // 2
COUNTS = (8, 4096, ONE, ONE + 8, ONE + 16, TWO, TWO + 16, 4093)
WIDTHS = (4096, 3000)
STEPS, REPLAYS = 24, 40


def summed(group: RankGroup) -> list[torch.Tensor]:
    """Return the sums of each count: of one launch, then of two replays of a graph of two sums."""
    device, results = torch.device("cuda", group.rank), []
    for count in COUNTS:
        # all partial sums, of 8 ranks too, are exact in bfloat16; no two values are alike
        each = torch.arange(count, device=device)
        own = (each % 3 + (each % group.world == group.rank)).bfloat16()
        tensor = own.clone()
        group.sums.all_reduce(tensor)
        results.append(tensor.cpu())
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            group.sums.all_reduce(tensor)
            group.sums.all_reduce(tensor)
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


class Normed:
    """Norms that include the sum over ranks, run repeatedly in steps of changing sizes."""

    def __init__(self, group: RankGroup, width: int) -> None:
        self._group, self._chance = group, random.Random(group.rank)
        self._device = torch.device("cuda", group.rank)
        most = most_rows(width, group.world)
        sizes = [(1, most, 3, most - 1)[n % 4] for n in range(STEPS)]
        self.xs = [self._empty(rows, width) for rows in sizes]
        self.parts = [self._empty(rows, width) for rows in sizes]
        self._weight = torch.rand(width, device=self._device).bfloat16()
        self._other = torch.ones(8, device=self._device)
        self.ys: list[torch.Tensor] = []

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self._device)

    def run(self) -> None:
        """Launch the norms; ranks take turns being late, and other sums lie between."""
        self.ys.clear()
        for n, (x, part) in enumerate(zip(self.xs, self.parts, strict=True)):
            if self._chance.random() < 0.3:
                torch.cuda._sleep(self._chance.randrange(100_000))
            exchange = self._group.sums.exchange_for(part)
            assert exchange is not None
            given = x, part, self._weight, 1e-5, None, 1.0, None, exchange
            self.ys.append(bits(add_rms_norm(*given, fp8=n % 2 == 1)))
            if n % 5 == 0:
                self._group.sums.all_reduce(self._other)

    def fill(self) -> None:
        """Write new numbers, with x equal on all ranks."""
        for n, (x, part) in enumerate(zip(self.xs, self.parts, strict=True)):
            x.fill_(n)
            part.normal_()

    def wrong(self) -> int:
        """Count results that differ in any bit from a gathered sum followed by a norm."""
        wrong = 0
        for n, (x, part, y) in enumerate(zip(self.xs, self.parts, self.ys, strict=True)):
            parts = [torch.empty_like(part) for _ in range(self._group.world)]
            dist.all_gather(parts, part)
            total = torch.zeros_like(part, dtype=torch.float32)
            for each in parts:
                total += each.float()
            alone = torch.full_like(x, n)
            given = alone, total.bfloat16(), self._weight, 1e-5
            want = bits(add_rms_norm(*given, fp8=n % 2 == 1))
            wrong += int((alone != x).sum() + (want != y).sum())
        return wrong


def bits(normed: torch.Tensor | Activations) -> torch.Tensor:
    """Bytes of a norm's result; may be captured in a graph."""
    if isinstance(normed, torch.Tensor):
        return normed.view(torch.uint8).flatten()
    parts = normed.rows, normed.fp8.rows, normed.fp8.scales
    return torch.cat([part.view(torch.uint8).flatten() for part in parts])


def wrong_norms(group: RankGroup) -> list[int]:
    """Count wrong results of each width, in launches and in replays of a graph."""
    wrong = []
    for width in WIDTHS:
        group.sums.connect_rows(width)
        torch.manual_seed(group.rank)
        normed = Normed(group, width)
        for _ in range(REPLAYS):
            normed.fill()
            normed.run()
            wrong.append(normed.wrong())
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            normed.run()
        for _ in range(REPLAYS):
            normed.fill()
            graph.replay()
            wrong.append(normed.wrong())
    return wrong


@pytest.mark.parametrize("world", WORLDS)
def test_norms_that_sum_over_ranks_equal_a_sum_followed_by_a_norm(tmp_path, world):
    for wrong in run_ranks(world, wrong_norms, tmp_path, device="cuda"):
        assert wrong == [0] * (2 * REPLAYS * len(WIDTHS))
