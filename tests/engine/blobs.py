"""Small adapters made without PEFT, a source to fetch them from, and their expected weights."""

import functools
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import BaseShape, write_blob
from lorikeet_engine.adapter_format.tensor_names import tensor_name
from lorikeet_engine.kernels.lora.types import LoraWeights

SHAPE = BaseShape(
    "llama", layers=2, hidden=16, intermediate=32, heads=2, kv_heads=1, head_dim=8, vocabulary=40
)
Ranks = Mapping[tuple[int, int], int]
Deltas = Mapping[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]


class Shelf:
    """AdapterSource of adapters that it made itself; fetches can be delayed, broken and inspected.

    gates: event that the fetch of an adapter, by name, waits for.
    spoil: names of adapters that are fetched with wrong bytes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, Deltas] = {}
        self._blobs: dict[str, Path] = {}
        self.gates: dict[str, threading.Event] = {}
        self.spoil: set[str] = set()
        self.errors: dict[str, Exception] = {}
        self.fetched: list[str] = []

    def make(
        self,
        name: str,
        ranks: Ranks,
        *,
        alpha: float = 8.0,
        dtype: torch.dtype = torch.float32,
        shape: BaseShape = SHAPE,
    ) -> AdapterRef:
        """Make an adapter with these ranks by (layer, linear); its numbers follow from its name."""
        made = _make(name, tuple(ranks.items()), alpha, dtype, shape)
        self._folder.mkdir(parents=True, exist_ok=True)
        self.blob(name).write_bytes(made.blob)
        self._tensors[made.digest], self._blobs[made.digest] = made.deltas, self.blob(name)
        return AdapterRef("acme", name, 1, made.digest)

    def blob(self, name: str) -> Path:
        return self._folder / name

    def tensors(self, ref: AdapterRef) -> Deltas:
        """Return A and scaled B of an adapter by (layer, linear), in float32; experts are
        stacked.
        """
        return self._tensors[ref.digest]

    def fetch(self, ref: AdapterRef, path: Path) -> None:
        self.fetched.append(ref.name)
        path.write_bytes(b"half of it")
        if ref.name in self.gates:
            self.gates[ref.name].wait(30)
        if ref.name in self.errors:
            raise self.errors[ref.name]
        shutil.copy(self._blobs[ref.digest], path)
        if ref.name in self.spoil:
            path.write_bytes(path.read_bytes()[:-1] + b"\x55")

    def check(self, ref: AdapterRef, weights: LoraWeights, slot: int) -> None:
        """Check that the slot holds exactly this adapter's A and scaled B in every linear."""
        deltas = self._tensors[ref.digest]
        layers, linears, _ = weights.table.shape[1:]
        for layer in range(layers):
            for linear in range(linears):
                a_at, b_at, rank = weights.table[slot, layer, linear].tolist()
                if (layer, linear) not in deltas:
                    assert rank == 0
                    continue
                a, b = deltas[layer, linear]
                a = a.T if linear == SHAPE.index("embed_tokens") else a
                for at, want in ((a_at, a), (b_at, b.T)):
                    got = weights.arena[at : at + want.numel()].view(want.shape).cpu()
                    assert torch.equal(got, want.to(got.dtype)), f"{ref} in slot {slot}"
                assert rank == b.shape[1]


class _Made(NamedTuple):
    """Blob of a Shelf's adapter, and the adapter's weights."""

    digest: str
    blob: bytes
    deltas: Deltas


@functools.cache  # tests build hundreds of engines with the same few adapters
def _make(
    name: str,
    ranks: tuple[tuple[tuple[int, int], int], ...],
    alpha: float,
    dtype: torch.dtype,
    shape: BaseShape,
) -> _Made:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        deltas = save_peft_folder(folder, name, dict(ranks), alpha, dtype, shape)
        digest = write_blob(folder, folder / "blob")
        return _Made(digest, (folder / "blob").read_bytes(), deltas)


def save_peft_folder(
    folder: Path,
    name: str,
    ranks: Ranks,
    alpha: float = 8.0,
    dtype: torch.dtype = torch.float32,
    shape: BaseShape = SHAPE,
) -> Deltas:
    """Save the PEFT folder of an adapter; return A and scaled B by (layer, linear), in float32."""
    generator = torch.Generator().manual_seed(int.from_bytes(name.encode(), "big") % 2**31)
    tensors, deltas = {}, {}
    for (layer, linear), rank in ranks.items():
        d_in, d_out = shape.dims(linear)
        experts = (shape.experts,) if shape.modules[linear].of_experts else ()
        a = torch.randn(*experts, rank, d_in, generator=generator).to(dtype)
        b = torch.randn(*experts, d_out, rank, generator=generator).to(dtype)
        module = _module(shape, layer, linear)
        tensors[tensor_name(module, "A")], tensors[tensor_name(module, "B")] = a, b
        deltas[layer, linear] = a.float(), b.float() * (alpha / rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    common = next(iter(ranks.values()))  # a rank in the pattern would start a process
    others = {place: rank for place, rank in ranks.items() if rank != common}
    config = {
        "peft_type": "LORA",
        "r": common,
        "lora_alpha": alpha,
        "rank_pattern": {_module(shape, *place): rank for place, rank in others.items()},
        "target_modules": [_module(shape, *place) for place in ranks],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return deltas


def _module(shape: BaseShape, layer: int, linear: int) -> str:
    found = shape.modules[linear]
    return found.module if layer == shape.outer_layer else found.path(layer)


def everywhere(rank: int) -> Ranks:
    return {(layer, linear): rank for layer in range(SHAPE.layers) for linear in range(7)}


def elements(ranks: Ranks) -> int:
    """Return the elements of an image; SHAPE's widths need no padding for alignment."""
    return sum(rank * sum(SHAPE.dims(linear)) for (_, linear), rank in ranks.items())


def until(holds: Callable[[], bool], wake: threading.Event, timeout_s: float = 10.0) -> None:
    """Wait until the condition holds; test it whenever `wake` is set, as an engine's loop does."""
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert wake.wait(end_s - time.monotonic()), "nothing woke the engine in time"
        wake.clear()
