"""Good adapters, and builders of bad ones from them; every run makes the same ones."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lorikeet_engine.adapter_format import AdapterLimits, BaseShape

SHAPE = BaseShape("llama", 1, 8, 16, 2, 1, 4, vocabulary=24)
LIMITS = AdapterLimits(max_rank=4, max_bytes=100_000)
BLOB, CONFIG, WEIGHTS = "blob", "adapter_config.json", "adapter_model.safetensors"
Q = "model.layers.0.self_attn.q_proj"

Files = dict[str, bytes]
Tensors = dict[str, Any]  # an array, or (dtype, shape, bytes) for dtypes that numpy lacks
Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A bad adapter: a blob, or the two files of a PEFT folder.

    says: regular expression for the refusal.
    """

    name: str
    says: str
    make: Callable[[random.Random], Files]

    def files(self) -> Files:
        return self.make(random.Random(self.name))


def tensor(side: str, module: str = Q) -> str:
    return f"base_model.model.{module}.lora_{side}.weight"


def tensors(draw: random.Random) -> Tensors:
    """Tensors of all seven linears at rank 2."""
    numbers = np.random.default_rng(draw.randrange(2**32))
    found: Tensors = {}
    for index, linear in enumerate(SHAPE.linears):
        module = linear.path(0)
        d_in, d_out = SHAPE.dims(index)
        found[tensor("A", module)] = numbers.standard_normal((2, d_in), dtype=np.float32)
        found[tensor("B", module)] = numbers.standard_normal((d_out, 2), dtype=np.float32)
    return dict(sorted(found.items()))


def blob_config() -> Json:
    return {
        "base_model_name_or_path": "tiny",
        "r": 2,
        "lora_alpha": 4.0,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "peft_type": "LORA",
    }


def peft_config() -> Json:
    return blob_config() | {"target_modules": [linear.name for linear in SHAPE.linears]}


def header_and_data(given: Tensors, metadata: Any = None) -> tuple[Json, bytes]:
    header: Json = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, value in given.items():
        if isinstance(value, np.ndarray):
            value = {"<f4": "F32", "<f2": "F16"}[value.dtype.str], value.shape, value.tobytes()
        dtype, shape, piece = value
        offsets = [len(data), len(data) + len(piece)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += piece
    return header, data


def good_blob(draw: random.Random, **config: Any) -> tuple[Json, bytes]:
    metadata = {"lorikeet": json.dumps(blob_config() | config)}
    return header_and_data(tensors(draw), metadata)


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


# Builders of cases.


def raw(name: str, says: str, spoil: Callable[[bytes, random.Random], bytes]) -> Case:
    """Case with changed bytes of the blob."""
    return Case(name, says, lambda draw: {BLOB: spoil(file_of(*good_blob(draw)), draw)})


def header(name: str, says: str, spoil: Callable[[Json, random.Random], Any]) -> Case:
    """Case with the blob's header changed in place or replaced; the data stays."""

    def make(draw: random.Random) -> Files:
        made, data = good_blob(draw)
        replaced = spoil(made, draw)
        return {BLOB: file_of(made if replaced is None else replaced, data)}

    return Case(name, says, make)


def entry(name: str, says: str, change: Mapping[str, Any], drop: str = "") -> Case:
    """Case with one tensor's entry in the header changed."""

    def spoil(made: Json, draw: random.Random) -> None:
        victim = draw.choice([key for key in made if key != "__metadata__"])
        made[victim] = {k: v for k, v in (made[victim] | change).items() if k != drop}

    return header(name, says, spoil)


def weights(
    name: str, says: str, spoil: Callable[[Tensors, random.Random], object], **config: Any
) -> Case:
    """Case with tensors changed before they are written."""

    def make(draw: random.Random) -> Files:
        given = tensors(draw)
        spoil(given, draw)
        metadata = {"lorikeet": json.dumps(blob_config() | config)}
        return {BLOB: file_of(*header_and_data(given, metadata))}

    return Case(name, says, make)


def renamed(name: str, says: str, old: str, new: str) -> Case:
    """Case with a part of every tensor's name changed."""

    def spoil(given: Tensors, draw: random.Random) -> None:
        for key in list(given):
            given[key.replace(old, new)] = given.pop(key)

    return weights(name, says, spoil)


def metadata(name: str, says: str, made: Callable[[Json], Any]) -> Case:
    """Case with the blob's config changed, or replaced by a text."""

    def make(draw: random.Random) -> Files:
        config = made(blob_config())
        text = config if isinstance(config, str) else json.dumps(config)
        return {BLOB: file_of(*header_and_data(tensors(draw), {"lorikeet": text}))}

    return Case(name, says, make)


def folder(
    name: str,
    says: str,
    config: Mapping[str, Any] | None = None,
    spoil: Callable[[Files], object] | None = None,
) -> Case:
    """Case of a PEFT folder with other keys in its config, or other files."""

    def make(draw: random.Random) -> Files:
        files = {
            CONFIG: json.dumps(peft_config() | dict(config or {})).encode(),
            WEIGHTS: file_of(*header_and_data(tensors(draw), {"format": "pt"})),
        }
        if spoil:
            spoil(files)
        return files

    return Case(name, says, make)
