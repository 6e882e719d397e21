"""Random adapters on every linear layer of a base model: as blobs, or straight in an engine.

Adapters of a set are made quickly, as they share their numbers, and are as different to an engine
as any two adapters.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import lru_cache, partial
from itertools import chain, product
from pathlib import Path

import torch
from safetensors.torch import save_file

from lorikeet_engine.adapter import AdapterRef, Head, Residency
from lorikeet_engine.adapter_format import BaseShape, Linear, write_blob
from lorikeet_engine.adapter_format.tensor_names import MAGNITUDE
from lorikeet_engine.adapter_format.vectors import check_has_place
from lorikeet_engine.errors import AdapterRejected
from lorikeet_engine.residency.checksums import layer_sums
from lorikeet_engine.residency.packed_image import PackedLayout
from lorikeet_engine.residency.tiers import Tiers

_TENANT = "benchmark"


class Targets(StrEnum):
    """Linears that random adapters of one kind change, in every layer."""

    LINEARS = "linears"  # including those of experts
    LINEARS_AND_HEAD = "linears and lm_head"
    ATTENTION = "attention"
    DORA = "linears, with DoRA where linears can have it"
    CLASSES = "linears, with a classification head of LABELS labels"
    SHARED_OUTER = "linears, with one A of gate and of up, and one B of down, for all experts"


LABELS = 8
# At rank 16 and inputs 4,096 wide, an adapter of such numbers adds a tenth to a linear's output.
_SIGMA = 0.02
_LOADED_WITHIN_S = 60.0


class RandomBlobs:
    """`AdapterSource` of `count` adapters of one rank in a folder, each with its own scaling.

    linears: names of the changed linears; None: all of the layers.
    dora: whether the adapters have DoRA's magnitudes, all 1, which all of the linears must allow.
    """

    def __init__(
        self,
        folder: Path,
        shape: BaseShape,
        count: int,
        rank: int,
        linears: Sequence[str] | None = None,
        *,
        dora: bool = False,
    ) -> None:
        self._folder, self._dora = folder, dora
        self._linears = linears or [linear.name for linear in shape.linears]
        tensors = random_tensors(shape, rank, self._linears) if count else {}
        if dora:
            tensors |= {
                name.replace("lora_B.weight", MAGNITUDE): torch.ones(len(b))
                for name, b in tensors.items()
                if "lora_B" in name
            }
        with ThreadPoolExecutor(8) as pool:
            self.refs = list(pool.map(partial(self._write, tensors, rank), range(count)))

    def fetch(self, ref: AdapterRef, path: Path) -> None:
        """Copy the blob to `path`."""
        shutil.copyfile(self._folder / ref.name, path)

    def _write(self, tensors: dict[str, torch.Tensor], rank: int, index: int) -> AdapterRef:
        name = f"random-{index}"
        folder = self._folder / f"{name}-peft"
        folder.mkdir(parents=True)
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank * random_scaling(index),
            "target_modules": self._linears,
            "use_dora": self._dora,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))
        digest = write_blob(folder, self._folder / name)
        shutil.rmtree(folder)
        return AdapterRef(_TENANT, name, 1, digest)


class EmptySource:
    """`AdapterSource` of an engine that never loads an adapter."""

    def fetch(self, ref: AdapterRef, _path: Path) -> None:
        """Raise LookupError."""
        raise LookupError(f"{ref} should have stayed in the engine")


def random_tensors(shape: BaseShape, rank: int, linears: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the tensors that all adapters of `RandomBlobs` share, by PEFT's names.

    shape: shapes of the base model.
    linears: names of the adapted linears.
    """
    random = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(shape.layers):
        for index, linear in enumerate(shape.linears):
            if linear.name not in linears or not shape.has(layer, index):
                continue
            d_in, d_out = shape.dims(index)
            path = f"base_model.model.{linear.path(layer)}"
            experts = (shape.experts,) if linear.of_experts else ()
            a = torch.randn(*experts, rank, d_in, generator=random) * d_in**-0.5
            b = torch.randn(*experts, d_out, rank, generator=random) * (0.1 * rank**-0.5)
            tensors[f"{path}.lora_A.weight"] = a.bfloat16()
            tensors[f"{path}.lora_B.weight"] = b.bfloat16()
    return tensors


def random_scaling(index: int) -> float:
    """Return the scaling of the adapter with this index in `RandomBlobs`."""
    return 1.0 + index / 1024


def random_refs(count: int, on: Targets = Targets.LINEARS) -> list[AdapterRef]:
    """Return adapters without blobs, for `fill_host` and `fill_device`.

    on: part of the adapters' names, so that sets of adapters with other targets are distinct.
    """
    names = [f"random-{on.name.lower()}-{index}" for index in range(count)]
    digests = [hashlib.sha256(name.encode()).hexdigest() for name in names]
    head = Head(tuple(map(str, range(LABELS)))) if on is Targets.CLASSES else None
    return [
        AdapterRef(_TENANT, name, 1, digest, head=head)
        for name, digest in zip(names, digests, strict=True)
    ]


def fill_host(tiers: Tiers, layout: PackedLayout, refs: Sequence[AdapterRef]) -> None:
    """Put adapters of one layout on the host, as loads would have done.

    Nothing is read or packed: a thousand adapters take seconds. Each holds the same numbers rotated
    by some elements. Adapters that were on the host may be evicted. Raises AssertionError if the
    host's arena is too small.
    """
    elements = layout.image_elements
    image = _image(elements, tiers.weights.arena.dtype)
    for index, ref in enumerate(refs):
        out = tiers._host.reserve(ref.digest, layout, for_request=False)
        assert out is not None, f"the host has room for {index} adapters: want {len(refs)}"
        turn = int(ref.digest, 16) % elements
        torch.cat(image.split([elements - turn, turn])[::-1], out=out)
        spans = out.split(layout.elements)
        sums = chain.from_iterable(layer_sums(span, layout.layers) for span in spans)
        tiers._host.commit(ref.digest, tuple(sums))
        tiers._host.release(ref.digest)


def fill_device(tiers: Tiers, layout: PackedLayout, refs: Sequence[AdapterRef]) -> None:
    """Load adapters of one layout to the device, as many at a time as the host has room for.

    The host keeps none of them afterwards. No request may run meanwhile.
    """
    at_once = tiers._host.elements // layout.image_elements
    for first in range(0, len(refs), at_once):
        some = refs[first : first + at_once]
        fill_host(tiers, layout, some)
        began_s = time.perf_counter()
        for ref in some:
            tiers.request(ref)
        while any(tiers.residency(ref) is not Residency.GPU for ref in some):
            assert time.perf_counter() - began_s < _LOADED_WITHIN_S, "no room on the device"
            tiers.advance()
            time.sleep(0.001)
        for ref in some:  # leftovers would take the room of the last adapters
            tiers._host.abandon(ref.digest)


def empty_device(tiers: Tiers) -> None:
    """Evict every adapter from the device; the host keeps them. No request may run."""
    evicted = tiers._gpu.evict_for(tiers._pool.elements, for_request=False)
    assert evicted, "some adapter is still in use"


def random_layout(
    shape: BaseShape, rank: int, on: Targets = Targets.LINEARS, world: int = 1
) -> PackedLayout:
    """Return the image layout of an adapter with this rank on all its targets.

    world: GPUs that share the base model.
    """
    linears = [i for i, linear in enumerate(shape.linears) if _has(on, linear.name)]
    places = [place for place in product(range(shape.layers), linears) if shape.has(*place)]
    if on is Targets.LINEARS_AND_HEAD:
        places.append((shape.outer_layer, shape.index("lm_head")))
    shared_outer = frozenset[tuple[int, int, int]]()
    if on is Targets.SHARED_OUTER:
        shared_outer = frozenset(
            (layer, n, int(shape.linears[n].name == "down_proj"))
            for layer, n in places
            if shape.linears[n].of_experts
        )
    vectors = frozenset[tuple[int, int]]()
    if on is Targets.DORA:
        vectors = frozenset(p for p in places if _can_have_vectors(shape.linears[p[1]]))
    ranks = dict.fromkeys(places, rank)
    if on is Targets.CLASSES:
        ranks[shape.outer_layer, shape.index("score")] = LABELS
    return PackedLayout.of_ranks(ranks, shape, world, shared_outer=shared_outer, vectors=vectors)


def _can_have_vectors(linear: Linear) -> bool:
    try:
        check_has_place(linear.path(0), (MAGNITUDE,))
    except AdapterRejected:
        return False
    return True


def _has(on: Targets, linear: str) -> bool:
    return on is not Targets.ATTENTION or linear in ("q_proj", "k_proj", "v_proj", "o_proj")


@lru_cache(1)
def _image(elements: int, dtype: torch.dtype) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.empty(elements, dtype=dtype).normal_(0.0, _SIGMA, generator=random)
