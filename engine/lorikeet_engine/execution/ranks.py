"""Ranks of one engine: this process alone, or this process and its followers.

A follower (follower.py) allocates memory and captures graphs when the leader tells it to, because
all ranks then take part in collective operations. A part of memory, such as the KV pages, has the
same size in all ranks: the largest for which every rank has room.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lorikeet_engine.errors import DeviceLost, SettingsError
from lorikeet_engine.execution.leading_runner import LeadingRunner
from lorikeet_engine.execution.page_copies import AllocateHostPages
from lorikeet_engine.execution.steps import ModelRunner
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.parallel.followers import Followers
from lorikeet_engine.parallel.rank_group import RankGroup
from lorikeet_engine.parallel.ring import SharedMemory
from lorikeet_engine.parallel.shard import Shard
from lorikeet_engine.settings import EngineSettings

_MESSAGES_BYTES = 32 << 20  # enough for a few messages without long page tables


@dataclass(frozen=True, slots=True)
class StartFollower:
    """Command to join the other ranks, load the rank's part of the model, and allocate its arena,
    the memory of adapters on its GPU.

    load: picklable function that reads the base model from its folder.
    rendezvous: file through which the ranks find one another (RankGroup).
    """

    settings: EngineSettings
    load: Any
    rendezvous: Path


@dataclass(frozen=True, slots=True)
class BuildRunner:
    """Command to allocate KV pages and states and capture a rank's graphs, in place of the rank's
    earlier pages, states and graphs.

    pages: number of KV pages.
    slots: number of slots for states of delta nets; 0 for a model without delta nets.
    trial: whether another runner replaces this one before the engine starts.
    """

    pages: int
    slots: int
    trial: bool = False


@dataclass(frozen=True, slots=True)
class CountPages:
    """Command to count the states and KV pages that fit each rank's memory, and find the smallest
    counts.
    """


class OneRank:
    """The only rank of an engine without tensor parallelism: this process.

    group: collective operations over the ranks; None without other ranks.
    followers: processes of the other ranks; None without other ranks.
    """

    group: RankGroup | None = None
    followers: Followers | None = None

    def least(self, number: int) -> int:
        """Return the smallest number that any rank passes to this method."""
        return number

    def announce(self, message: BuildRunner | CountPages | AllocateHostPages) -> None:
        """Do nothing: there are no other ranks. LeadingRank has them carry out the command."""

    def runner(self, *parts: Any) -> ModelRunner:
        """Make a runner of steps, in all ranks if there are others.

        parts: arguments of ModelRunner: model, attention, weights, KV pages, graphs, states.
        """
        return ModelRunner(*parts)

    def close(self) -> None:
        """Do nothing: there are no processes of other ranks to end."""


class LeadingRank(OneRank):
    """Leader of a tensor parallel engine: starts and commands the other ranks' processes."""

    group: RankGroup
    followers: Followers

    def __init__(self, settings: EngineSettings, load: Any) -> None:
        """Start the other ranks and connect to them.

        load: picklable function that reads the base model from its folder.

        Raises SettingsError if there are too few GPUs or the model cannot be divided among the
        ranks, ModelError if config.json cannot be served, and DeviceLost if a rank does not
        connect.
        """
        # NCCL would wait for ranks that have ended; on CUDA the group ends with this process.
        self._leaves = settings.device == "cpu"
        world, device = settings.tensor_parallel, torch.device(settings.device)
        _check_gpus(device, world)
        config = ModelConfig.from_folder(settings.model, settings.max_context)
        Shard(0, world).ranges(config.shape)  # raises before any process is started
        # A file without a name leaves nothing behind, whichever process is killed. It stays open
        # until this process ends: torch's store writes to its number even then, and must not hit
        # another file.
        rendezvous_fd = os.memfd_create("lorikeet-rendezvous")
        rendezvous = Path(f"/proc/self/fd/{rendezvous_fd}")
        start = StartFollower(settings, load, rendezvous)
        memory = SharedMemory(settings.adapter_host_bytes)
        size = ring_bytes(config, settings)
        self.followers = Followers(world, start, memory, size, (rendezvous_fd,))
        try:
            own = rank_device(device, Shard(0, world))
            with _in_reach():
                self.group = RankGroup(Shard(0, world), rendezvous, own)
        except BaseException:
            self.followers.close()
            raise

    def least(self, number: int) -> int:
        """Wait until each rank has given a number; return the smallest.

        Raises DeviceLost if a rank is gone.
        """
        with _in_reach():
            return self.group.minimum((number,))[0]

    def announce(self, message: BuildRunner | CountPages | AllocateHostPages) -> None:
        """Have the other ranks carry out a command; the caller carries it out in this rank."""
        self.followers.send(message)

    def runner(self, *parts: Any) -> ModelRunner:
        """Make a runner whose steps run in all ranks.

        parts: arguments of ModelRunner: model, attention, weights, KV pages, graphs, states.
        """
        return LeadingRunner(self.group, self.followers, *parts)

    def close(self) -> None:
        """End the processes of the other ranks."""
        self.followers.close()
        if self._leaves:
            self.group.close()


def _check_gpus(device: torch.device, world: int) -> None:
    """Raise SettingsError, with tensor_parallel as `field`, if there are more ranks than GPUs."""
    if device.type == "cuda" and (there := torch.cuda.device_count()) < world:
        raise SettingsError(
            f"tensor_parallel={world}: more than the GPUs that this process sees, {there}: lower "
            "it, or let it see more (CUDA_VISIBLE_DEVICES)",
            field="tensor_parallel",
        )


def ring_bytes(config: ModelConfig, settings: EngineSettings) -> int:
    """Return the bytes of the buffer through which the leader sends any step to its followers."""
    pages = -(-config.max_context // settings.page_size)
    tables = settings.max_running * len(config.kv_groups.windows)
    return _MESSAGES_BYTES + tables * pages * 4  # int32


@contextmanager
def _in_reach() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:  # a RuntimeError that says nothing about other ranks
        raise
    except RuntimeError as error:
        raise DeviceLost(f"this replica's processes do not reach one another: {error}") from error


def start_ranks(settings: EngineSettings, load: Any) -> OneRank:
    """Start the processes of an engine's other GPUs, if it has several.

    load: picklable function that reads the base model from its folder.

    Raises SettingsError if there are too few GPUs or the model cannot be divided among them,
    ModelError if config.json cannot be served, and DeviceLost if a process does not connect.
    """
    return LeadingRank(settings, load) if settings.tensor_parallel > 1 else OneRank()


def rank_device(device: torch.device, shard: Shard) -> torch.device:
    """Return the device that a rank computes on, and prepare the process for it.

    On CUDA, the device becomes the process's current one. On a CPU, all ranks share the cores, so
    each rank limits its threads to its share.
    """
    if device.type != "cuda":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // shard.world))
        return device
    own = torch.device("cuda", shard.index)
    torch.cuda.set_device(own)
    return own
