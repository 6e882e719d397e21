"""Real processes that form a rank group, as the GPUs of one replica do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lorikeet_engine.parallel.rank_group import RankGroup
from lorikeet_engine.parallel.shard import Shard
from tests.engine.forkserver import preload

CPU = torch.device("cpu")
# Modules that the ranks' work would import in each process, in 5 s.
preload("transformers", "peft")


def run_ranks(
    world: int, work: Callable[..., Any], folder: Path, *arguments: Any, device: str = "cpu"
) -> list[Any]:
    """Run `work` in `world` processes that form a rank group; return their results by rank.

    work: module-level function, called as work(group, *arguments); other processes import it.
    device: if "cuda", each process has its own GPU.
    """
    torch.multiprocessing.start_processes(
        _run, (world, work, folder, arguments, device), nprocs=world, start_method="forkserver"
    )
    return [torch.load(folder / f"result-{rank}", weights_only=False) for rank in range(world)]


def _run(
    rank: int,
    world: int,
    work: Callable[..., Any],
    folder: Path,
    arguments: tuple[Any, ...],
    device: str,
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    own = torch.device(device, rank) if device == "cuda" else CPU
    group = RankGroup(Shard(rank, world), folder / "rendezvous", own)
    torch.save(work(group, *arguments), folder / f"result-{rank}")
    group.close()
