"""Names, shapes and file positions of a Hugging Face checkpoint's tensors, from file headers."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from lorikeet_engine.adapter_format.base_config import (
    is_vision_language,
    read_json,
    refusal,
)
from lorikeet_engine.errors import ModelError
from lorikeet_engine.kernels import fp8
from lorikeet_engine.models.staging import STAGING_BYTES, read_bytes

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PART_DTYPES = {
    **DTYPES,
    "F8_E4M3": fp8.DTYPE,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Decoders within vision-language models: model.language_model.layers…,
# language_model.model.layers…, or named as alone; and lm_head or language_model.lm_head.
_DECODER = re.compile(
    r"(?:(?:language_)?model\.){1,2}((?:layers|embed_tokens(?:_per_layer)?|norm"
    r"|per_layer_model_projection|per_layer_projection_norm)\..+)"
)
_HEAD = re.compile(r"(?:language_model\.)?((?:lm_head|mtp)\..+)")
# As AutoModel saves a decoder alone, for embeddings.
_BARE = "embed_tokens.weight"
# Mixtral's checkpoints have their own names for the linears of other mixtures of experts.
_MIXTRAL = re.compile(r"\.block_sparse_moe\.(gate|experts\.\d+)(?:\.(w[123]))?\.")
# Granite 4's checkpoints have names of their own, too.
_GRANITE = {
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
    "router.layer.": "router.",
}
# Nemotron's, for "model.", and its names outside the layers.
_NEMOTRON = "backbone."
_OUTSIDE = {"model.embeddings.": "model.embed_tokens.", "model.norm_f.": "model.norm."}
_PROJECTIONS = {"w1": ".gate_proj", "w2": ".down_proj", "w3": ".up_proj", None: ""}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor of a safetensors file, as the file's header describes it.

    name: the tensor's name in the file.
    begin: byte of the file at which the values begin.
    dtype: safetensors' name of the dtype.
    """

    name: str
    file: Path
    begin: int
    dtype: str
    shape: tuple[int, ...]

    def values(self) -> torch.Tensor:
        """Read the tensor's values in their stored dtype, one of PART_DTYPES.

        Raises ModelError if the file ends early.
        """
        # not by safe_open, which parses the whole header: 4 ms if it has 5,000 experts' tensors
        values = torch.empty(self.shape, dtype=PART_DTYPES[self.dtype])
        read_bytes(self.file, self.begin, values.view(-1).view(torch.uint8))
        return values


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Find the tensors of the decoder in a checkpoint folder, by name.

    The decoder tensors of a vision-language model get the names that they have in a checkpoint of a
    decoder alone, and so do those of a checkpoint that AutoModel saved, without "model.".
    Raises ModelError, whose `field` is the file or the key of config.json at fault.
    """
    stored, config = _stored_tensors(folder), folder / "config.json"
    if not config.exists() or not is_vision_language(read_json(config)):
        return _with_prefix(stored) if _BARE in stored else stored
    return _decoder_tensors(stored)


def has_head(stored: Mapping[str, StoredTensor]) -> bool:
    """Whether a checkpoint has lm_head, or embeddings that take its place.

    stored: the decoder's tensors by name. Models for embeddings, which AutoModel saved, and those
        for sequence classification have none.
    """
    embeddings = stored.get(f"model.{_BARE}")
    return "score.weight" not in stored and (embeddings is None or embeddings.name != _BARE)


def check_tied_head(folder: Path) -> None:
    """Raise ModelError if config.json ties lm_head to embeddings, but a different lm_head is
    stored.

    transformers 5 does not tie such a checkpoint's lm_head; transformers 4 ignored the stored one.
    """
    stored = find_tensors(folder)
    head, embeddings = stored.get("lm_head.weight"), stored.get("model.embed_tokens.weight")
    if head is not None and embeddings is not None and not _are_equal(head, embeddings):
        raise refusal("tie_word_embeddings", True, "false, as the checkpoint has a trained lm_head")


def instead_of(weight: str, stored: Iterable[str]) -> str:
    """Return a clause for an error: which tensors are stored instead of a linear's weight.

    The clause is empty if no such tensors are stored.

    weight: name of the missing weight.
    stored: names of all tensors.
    """
    path = weight.removesuffix("weight")
    others = sorted(name for name in stored if name.startswith(path)) if path != weight else []
    if not others:
        return ""
    return (
        f", and there are {', '.join(others)}: want config.json to say how they are quantised, as "
        "the tool that made them wrote it; or take a copy that is not quantised"
    )


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX
    if not index.exists():
        return _tensors_of(folder / SINGLE)
    try:
        file_of = dict(json.loads(index.read_bytes())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{index}: no weight_map: {error!r}", field=INDEX) from error
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(file_of.values())):
        found |= _tensors_of(folder / file)
    return {name: found[name] for name in map(_renamed, file_of) if name in found}


def _with_prefix(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    return {f"model.{name}": tensor for name, tensor in stored.items()}


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    nbytes = math.prod(one.shape) * PART_DTYPES[one.dtype].itemsize
    pieces = torch.empty(2, STAGING_BYTES, dtype=torch.uint8)
    for at in range(0, nbytes, STAGING_BYTES):
        ours, theirs = pieces[:, : nbytes - at]
        read_bytes(one.file, one.begin + at, ours)
        read_bytes(other.file, other.begin + at, theirs)
        if not torch.equal(ours, theirs):
            return False
    return True


def _decoder_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Select a vision-language model's decoder tensors, and name them as for a decoder alone.

    stored: all tensors by name.
    """
    found = {}
    for name, tensor in stored.items():
        if match := _DECODER.fullmatch(name):
            found[f"model.{match[1]}"] = tensor
        elif match := _HEAD.fullmatch(name):
            found[match[1]] = tensor
    return found


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    if not path.exists():
        raise ModelError(
            f"{path} does not exist: want {SINGLE}, or {INDEX} with the files it names",
            field=path.name,
        )
    try:
        with safe_open(path, framework="pt"):  # checks the header against the file's size
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is no whole safetensors file: {error}", field=path.name
        ) from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    begin = 8 + length
    return {
        _renamed(name): StoredTensor(
            name, path, begin + tensor["data_offsets"][0], tensor["dtype"], tuple(tensor["shape"])
        )
        for name, tensor in header.items()
    }


def _renamed(name: str) -> str:
    for theirs, ours in _GRANITE.items():
        name = name.replace(f".block_sparse_moe.{theirs}", f".mlp.{ours}")
    if name.startswith(_NEMOTRON):
        name = f"model.{name.removeprefix(_NEMOTRON)}"
        for theirs, ours in _OUTSIDE.items():
            name = name.replace(theirs, ours, 1)
    return _MIXTRAL.sub(lambda match: f".mlp.{match[1]}{_PROJECTIONS[match[2]]}.", name)
