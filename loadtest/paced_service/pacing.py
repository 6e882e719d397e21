"""An engine that takes as long as given costs say: what runs in each engine's own process."""

import logging
import os
import threading
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from shutil import copyfile
from typing import TYPE_CHECKING, Any

from lorikeet.catalog.catalog import blob_key
from lorikeet.catalog.store.object_store import open_store
from lorikeet.logs import log_to_stderr
from lorikeet.replica.engine_process import CatalogAdapterSource
from lorikeet.settings import Settings
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.costs import LoadCosts, StepCosts, seen_tokens

if TYPE_CHECKING:
    import torch

    from lorikeet_engine.engine import Engine
    from lorikeet_engine.models.batch import Batch
    from lorikeet_engine.models.llama import LlamaModel

LETTER = 6 + ord("a")
"""The demo's token that every paced model draws: text, so that a client sees each token."""
_ONE_AFTER_THE_OTHER_S = 0.01
_NOTE_S = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """The pace of an engine: costs of steps and loads, disk, and eviction.

    sizes: image bytes by digest. disk_bytes: of each replica's disk cache, which begins full of
    some. lru: evict the least recently used instead of what the engine would. notes: a folder; in
    its file `loads` every load onto the GPU is noted, "<Unix time> <adapter's name> <whether a
    request asked for it>" a line, in `steps-*` what each engine's steps were to take so far and
    what they took, seconds.
    """

    steps: StepCosts
    loads: LoadCosts
    sizes: dict[str, int]
    disk_bytes: int
    lru: bool
    notes: Path


class PacedModel:
    """The model of another, whose forward passes take at least what the costs say."""

    def __init__(self, model: "LlamaModel", steps: StepCosts, notes: Path) -> None:
        """notes: the file where it says how it keeps pace."""
        self.config, self.device, self.dtype = model.config, model.device, model.dtype
        self.shape = model.shape
        self._model, self._steps, self._notes = model, steps, notes
        self._ended_s = self._noted_s = 0.0
        self._owed_s = self._took_s = 0.0

    def forward(self, batch: "Batch", kv: Any, lora: Any, attention: Any) -> "torch.Tensor":
        """LlamaModel.forward; a step right behind another begins when that ended, as on a GPU."""
        began_s = time.perf_counter()
        if began_s - self._ended_s < _ONE_AFTER_THE_OTHER_S:
            began_s = self._ended_s
        hidden = self._model.forward(batch, kv, lora, attention)
        owed_s = self._step_s(batch, lora)
        time.sleep(max(0.0, began_s + owed_s - time.perf_counter()))
        now_s = time.perf_counter()
        self._ended_s = max(began_s + owed_s, now_s - _ONE_AFTER_THE_OTHER_S)
        self._note(owed_s, now_s - began_s)
        return hidden

    def logits(self, hidden: "torch.Tensor", lora: Any, segments: Any) -> "torch.Tensor":
        """LlamaModel.logits, with LETTER far ahead."""
        logits = self._model.logits(hidden, lora, segments)
        logits[:, LETTER] += 1e6
        return logits

    def _note(self, owed_s: float, took_s: float) -> None:
        self._owed_s += owed_s
        self._took_s += took_s
        if time.perf_counter() - self._noted_s > _NOTE_S:
            self._noted_s = time.perf_counter()
            part = self._notes.with_name(f"part-{self._notes.name}")
            part.write_text(f"{self._owed_s} {self._took_s}")
            part.replace(self._notes)

    def _step_s(self, batch: "Batch", lora: Any) -> float:
        """The step's seconds by StepCosts: decodes pay for adapters' ranks, prompts for tokens."""
        chunks = list(
            zip(pairwise(batch.query_starts.tolist()), batch.kv_lengths.tolist(), strict=True)
        )
        decoding = {start: seen for (start, end), seen in chunks if end - start == 1 < seen}
        prompts = [(end - start, seen) for (start, end), seen in chunks if start not in decoding]
        ranks, adapted = 0, batch.segments is not None
        if batch.segments is not None:
            s = batch.segments
            rows = zip(s.slots.tolist(), s.starts.tolist(), s.lengths.tolist(), strict=True)
            for slot, start, length in rows:
                if not decoding.keys().isdisjoint(range(start, start + length)):
                    ranks += int(lora.table[slot, :, :-2, 2].max())
        return self._steps.step_s(
            len(batch.token_ids),
            ranks,
            sum(map(self._steps.decode_sees, decoding.values())),
            adapted=sum(tokens for tokens, _ in prompts) if adapted else 0,
            seen=sum(seen_tokens(tokens, seen - tokens) for tokens, seen in prompts),
        )


class PacedSource:
    """A source whose downloads take what LoadCosts say: bytes one after another, latency beside."""

    def __init__(
        self, source: CatalogAdapterSource, loads: LoadCosts, sizes: dict[str, int]
    ) -> None:
        self._source, self._loads, self._sizes = source, loads, sizes
        self._link, self._free_at_s = threading.Lock(), 0.0

    def fetch(self, ref: AdapterRef, path: Path) -> str:
        """Fetch a blob, as AdapterSource.fetch, at the pace of LoadCosts."""
        with self._link:
            carried_s = self._sizes[ref.digest] / self._loads.remote_bytes_per_s
            self._free_at_s = max(self._free_at_s, time.perf_counter()) + carried_s
            through_s = self._free_at_s + self._loads.remote_latency_s
        digest = self._source.fetch(ref, path)
        time.sleep(max(0.0, through_s - time.perf_counter()))
        return digest


def paced_engine(pace: Pace, settings: Settings, base_model: str) -> "Engine":
    """build_engine's, paced, with a disk cache of its own."""
    import torch

    from lorikeet.replica.engine_settings import engine_settings
    from lorikeet_engine.engine import Engine
    from lorikeet_engine.models.llama import load_model
    from lorikeet_engine.residency.eviction_score import LeastRecentlyUsed

    log_to_stderr()
    torch.set_num_threads(1)  # the cores are for all replicas

    def load(*arguments: Any) -> Any:
        notes = pace.notes / f"steps-{os.getpid()}"
        return PacedModel(load_model(*arguments), pace.steps, notes)

    cache = settings.cache_dir / str(os.getpid())
    _fill_disk(cache, Path(settings.catalog), pace)
    paced_settings = replace(
        engine_settings(settings, base_model),
        cache_dir=cache,
        adapter_disk_bytes=pace.disk_bytes,
        overlap=False,  # launching a paced step takes as long as the step: read it before the next
    )
    source = PacedSource(CatalogAdapterSource(open_store(settings.catalog)), pace.loads, pace.sizes)
    engine = Engine(paced_settings, source, load)
    # What it measured, all replicas at once on a few cores, says little of its paced steps.
    engine.info = replace(engine.info, step_costs=pace.steps)
    if pace.lru:
        engine._tiers._gpu._policy = LeastRecentlyUsed()
    logger = logging.getLogger("lorikeet_engine.residency.gpu.adapters")
    logger.addHandler(_LoadsFile(pace.notes / "loads"))
    return engine


class _LoadsFile(logging.FileHandler):
    """Notes the adapters that come onto the GPU; several engines append to one file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, mode="a")

    def emit(self, record: logging.LogRecord) -> None:
        """Handle a record, as logging.Handler does."""
        if record.msg == "adapter_admitted":
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """Handle a record, as logging.Handler does."""
        facts = record.__dict__
        return f"{record.created} {facts['adapter']} {facts['requested']}"


def _fill_disk(cache: Path, catalog: Path, pace: Pace) -> None:
    """Put some blobs on the disk, as if they had been downloaded."""
    cache.mkdir(parents=True)
    digests, left = list(pace.sizes), pace.disk_bytes
    Random(os.getpid()).shuffle(digests)
    for digest in digests:
        left -= pace.sizes[digest]
        if left < 0:
            return
        copyfile(catalog / blob_key(digest), cache / digest)
