"""Engine whose adapters lie on its GPU, on its host and on its disk."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from loadtest.engine import plain
from loadtest.engine.offline import Work, generate
from loadtest.engine.random_adapters import (
    RandomBlobs,
    fill_device,
    fill_host,
    random_layout,
    random_refs,
)
from loadtest.engine.random_engine import RANK, SETTINGS, roomy_engine
from loadtest.engine.random_model import LLAMA_3_1_8B, shape_of
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.engine import Engine, EngineSettings
from lorikeet_engine.residency.disk.cache import DiskCache
from lorikeet_engine.residency.eviction_score import LeastRecentlyUsed

_CHECKED = 4  # checked adapters of the GPU, and of the disk
_WRITTEN_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Number of adapters in each tier, and spare room.

    gpu, host, disk: adapters that lie in the tier.
    gpu_spare, host_spare: further adapters that the tier has room for.

    Used in turn, adapters of host and disk push one another out of the nearer tiers: they are at
    least twice as many as there is spare room, and the GPU evicts the least recently used.
    """

    gpu: int = 64
    host: int = 16
    disk: int = 20
    gpu_spare: int = 8
    host_spare: int = 6

    def refs(self, blobs: RandomBlobs) -> dict[Residency, list[AdapterRef]]:
        """Return the adapters by the tier in which a request finds them.

        blobs: adapters of the disk.
        """
        kept = random_refs(self.gpu + self.host)
        return {
            Residency.GPU: kept[: self.gpu],
            Residency.HOST: kept[self.gpu :],
            Residency.DISK: blobs.refs,
        }


FEW = TierCounts(gpu=8, host=6, disk=0, gpu_spare=3, host_spare=1)
"""Counts for large adapters; none on the disk, as their blobs take longest to make."""
_LARGE_BYTES = 256 << 20


def image_bytes(config: Mapping[str, Any], settings: EngineSettings, rank: int = RANK) -> int:
    """Return the bytes that the image of an adapter on all linears takes on the host."""
    shape = shape_of(config)
    layout = random_layout(shape, rank, world=settings.tensor_parallel)
    return layout.image_elements * settings.torch_adapter_dtype.itemsize


def counts_of(image: int) -> TierCounts:
    """Return the number of adapters to put into each tier.

    image: bytes of each adapter's image.
    """
    return FEW if image > _LARGE_BYTES else TierCounts()


def write_random_blobs(
    folder: Path,
    counts: TierCounts,
    config: Mapping[str, Any] = LLAMA_3_1_8B,
    rank: int = RANK,
) -> RandomBlobs:
    """Write blobs of the adapters that the engine's disk will hold."""
    return RandomBlobs(folder, shape_of(config), counts.disk, rank)


def tiered_engine(
    folder: Path,
    blobs: RandomBlobs,
    counts: TierCounts,
    config: Mapping[str, Any] = LLAMA_3_1_8B,
    settings: EngineSettings = SETTINGS,
    rank: int = RANK,
) -> Engine:
    """Build an engine with all adapters in their tiers; those of host and disk have each been used
    once, in order.

    folder: folder for the engine's files.
    blobs: adapters of the disk.
    counts: number of adapters in each tier.
    settings: all settings except folders and memory for adapters.
    rank: rank of the adapters.
    Raises AssertionError if tokens made with the adapters are wrong.
    """
    on_gpu, on_host = counts.gpu + counts.gpu_spare, counts.host + counts.host_spare
    settings = replace(settings, max_rank=max(rank, settings.max_rank))
    engine, layout = roomy_engine(folder, blobs, on_gpu, on_host, config, settings, rank=rank)
    engine._tiers._gpu._policy = LeastRecentlyUsed()
    refs = counts.refs(blobs)
    fill_device(engine._tiers, layout, refs[Residency.GPU])
    fill_host(engine._tiers, layout, refs[Residency.HOST])
    for tier in (Residency.GPU, Residency.HOST):
        for ref in refs[tier]:
            engine.pin(ref, tier)
    used = [refs[Residency.GPU][:_CHECKED], refs[Residency.HOST], refs[Residency.DISK]]
    _check(engine, list(chain(*used)), min(_CHECKED, counts.gpu_spare))
    return engine


def _check(engine: Engine, refs: Sequence[AdapterRef], last: int) -> None:
    """Send a request to each adapter, one after another, and check the tokens of the first few and
    of the last.

    last: number of last adapters to check: those that are still on the GPU, so that the checks load
        nothing.
    """
    drawn = Work("check", 64, 4, requests=len(refs)).draw(engine.info.vocab_size, 0)
    answers: list[plain.Answer] = []
    for request, ref in zip(drawn, refs, strict=True):
        answers += generate(engine, [replace(request, adapter=ref)]).answers
        _await_image(engine._tiers._disk, ref.digest)
    plain.check(engine, answers[:_CHECKED] + answers[-last:])


def _await_image(disk: DiskCache, digest: str) -> None:
    """Wait until the disk tier has written the image of an adapter whose blob it holds."""
    end_s = time.monotonic() + _WRITTEN_WITHIN_S
    while disk.holds(digest) and not disk.has_image(digest):
        assert time.monotonic() < end_s, "an image was not written to the disk"
        time.sleep(0.001)
