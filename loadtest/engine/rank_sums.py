"""Sums over the GPUs of one host, by size: NCCL, and torch's symmetric memory without multicast.

python -m loadtest.engine.rank_sums --json rank_sums.json [--gpus 2]

Each sum is checked, then captured many times in a CUDA graph, as a model's layers capture it. The
one- and two-shot sums of symmetric memory are timed with the copy to the shared buffer; the
two-shot sum also with the copy back. A replica of several GPUs sums twice a layer; the norm after
each sum is timed behind the sum and, for few rows, in one launch with the sum. Prints a row for
each size.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from loadtest.engine import harness
from loadtest.engine.gpu_time import medians_ms
from lorikeet_engine.kernels.pointwise import add_rms_norm, add_rms_norm_fp8
from lorikeet_engine.parallel.rank_group import RankGroup
from lorikeet_engine.parallel.shard import Shard
from lorikeet_engine.parallel.sums import RowExchange, SymmetricSums, can_map_peers

SIZES = tuple(16 << 10 << step for step in range(12))  # 16 KiB to 32 MiB
WIDTHS, ROWS = (4096, 8192), (1, 2, 4, 8, 16, 32, 64)
_EPS = 1e-5
_SUMS = 32  # sums in a graph
_TIMES = 20

Sum = Callable[[torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds of one bfloat16 sum in a graph, by method; None if this machine does not support
    the method.
    """

    kib: int
    nccl_us: float
    one_shot_us: float | None
    two_shot_us: float | None


@dataclass(frozen=True, slots=True)
class NormRow:
    """Microseconds of a sum of bfloat16 rows and their norm in a graph.

    fp8: whether the norm also rounds to FP8.
    apart_us: sum and norm in separate launches.
    together_us: sum and norm in one launch.
    """

    width: int
    rows: int
    fp8: bool
    apart_us: float
    together_us: float


def measure(group: RankGroup, device: torch.device) -> list[Row]:
    """Measure sums of all sizes. Every rank of the group calls this at the same time."""
    sums: dict[str, Sum] = {"nccl": dist.all_reduce}
    if can_map_peers(device, group.world):
        symmetric = SymmetricSums(device, SIZES[-1]).map_peers()
        sums |= {"one_shot": symmetric.sum_in_one_shot, "two_shot": symmetric.sum_in_two_shots}
    rows = []
    for size in SIZES:
        tensor = torch.empty(size // 2, dtype=torch.bfloat16, device=device)
        took_us = {}
        for name, sum_ in sums.items():
            check(group, sum_, tensor, name)
            took_us[name] = time_us(sum_, tensor)
        rows.append(
            Row(size >> 10, took_us["nccl"], took_us.get("one_shot"), took_us.get("two_shot"))
        )
    return rows


def measure_norms(group: RankGroup, device: torch.device) -> list[NormRow]:
    """Measure sum and norm for all numbers of rows that one launch can do. Every rank of the group
    calls this at the same time.
    """
    found = []
    for width in WIDTHS:
        group.sums.connect_rows(width)
        parts = [torch.zeros(rows, width, dtype=torch.bfloat16, device=device) for rows in ROWS]
        for part, fp8 in product(parts, (False, True)):
            exchange = group.sums.exchange_for(part)
            if exchange is not None:
                found.append(_time_norm(group, part, exchange, fp8=fp8))
    return found


def _time_norm(
    group: RankGroup, part: torch.Tensor, exchange: RowExchange, *, fp8: bool
) -> NormRow:
    norm = add_rms_norm_fp8 if fp8 else add_rms_norm
    x, weight = torch.zeros_like(part), torch.ones_like(part[0])

    def apart(part: torch.Tensor) -> None:
        group.sums.all_reduce(part)
        norm(x, part, weight, _EPS)

    def together(part: torch.Tensor) -> None:
        norm(x, part, weight, _EPS, exchange=exchange)

    rows, width = part.shape
    return NormRow(width, rows, fp8, time_us(apart, part), time_us(together, part))


def check(group: RankGroup, sum_: Sum, tensor: torch.Tensor, name: str) -> None:
    """Raise AssertionError unless a sum over the ranks is right at every element, several times in
    a row.

    sum_: the sum, which replaces each rank's `tensor` by the total.
    name: name of the sum, for the error.
    """
    # even with 8 ranks, every partial sum is exact in bfloat16
    each = torch.arange(tensor.numel(), device=tensor.device) % 7
    for turn in range(1, 4):
        tensor.copy_(each * turn + group.rank)
        sum_(tensor)
        want = each * turn * group.world + sum(range(group.world))
        assert torch.equal(tensor.float(), want.float()), f"{name}: {tensor.nbytes} bytes"


def time_us(sum_: Sum, tensor: torch.Tensor) -> float:
    """Return the time of one sum of many in a graph; `tensor` is overwritten."""
    tensor.zero_()
    sum_(tensor)  # compiles its kernels
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(_SUMS):
            sum_(tensor)
    return 1e3 * medians_ms([graph.replay], _TIMES)[0] / _SUMS


def _run(rank: int, world: int, folder: Path) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = RankGroup(Shard(rank, world), folder / "rendezvous", device)
    sums, norms = measure(group, device), measure_norms(group, device)
    if group.leads:  # ranks wait for one another, so their times are equal
        harness.write(folder / "rows.json", {}, sums=sums, norms=norms)
    group.close()


def main() -> None:
    """Start a process for each GPU, print the tables and write the rows."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--gpus", type=int, default=2, help="number of GPUs; default 2")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spawn = torch.multiprocessing.spawn  # type: ignore[attr-defined]
        spawn(_run, (options.gpus, folder), nprocs=options.gpus)
        found = json.loads((folder / "rows.json").read_text())
    facts, gpus = harness.facts(options.commit), options.gpus
    sums = harness.show(Row(**row) for row in found["sums"])
    norms = harness.show(NormRow(**row) for row in found["norms"])
    harness.write(options.json, facts, gpus=gpus, rank_sums=sums, norms_over_ranks=norms)


if __name__ == "__main__":
    main()
