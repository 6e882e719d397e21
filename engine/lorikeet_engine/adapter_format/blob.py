"""Makes a blob from a trainer's folder: one safetensors file, identical for identical adapters.

Can also write a folder in PEFT's format, as a target for converters of other formats.
"""

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lorikeet_engine.adapter_format.base_copies import copies_metadata, describe_copy
from lorikeet_engine.adapter_format.embedding_config import embedder_metadata, read_embedder
from lorikeet_engine.adapter_format.experts.forms import (
    Pair,
    name_parameters,
    stack_experts,
)
from lorikeet_engine.adapter_format.expressions import CONFIG_FILE
from lorikeet_engine.adapter_format.families import EMBEDDINGS, HEAD
from lorikeet_engine.adapter_format.header import (
    DTYPE_BYTES,
    header_bytes,
    parse_json_object,
    read_header,
)
from lorikeet_engine.adapter_format.joined import Written, join_parts
from lorikeet_engine.adapter_format.lora_config import LoraConfig, refuse_unsupported
from lorikeet_engine.adapter_format.mlx import is_mlx, mlx_tensors, peft_config
from lorikeet_engine.adapter_format.saved_weights import WEIGHTS_FILE, SavedTensor, saved_tensors
from lorikeet_engine.adapter_format.score_head import (
    head_metadata,
    head_part,
    head_tensor_name,
    trained_head,
)
from lorikeet_engine.adapter_format.spec import METADATA_KEY, pair_tensors
from lorikeet_engine.adapter_format.tensor_names import (
    canonical_module,
    copied_module,
    is_of_vision,
    is_training_state,
    split_saved_name,
    take_tensors,
    tensor_name,
    token_rows_module,
    token_rows_name,
    vector_name,
    whole_name,
    without_originals,
)
from lorikeet_engine.adapter_format.token_rows import (
    ReplacedRows,
    rows_metadata,
    trained_modules,
    trained_tokens,
)
from lorikeet_engine.adapter_format.vectors import check_vectors, take_vectors
from lorikeet_engine.errors import AdapterRejected

_MAX_CONFIG_BYTES = 4_000_000  # 36,096 names take 1.7 MB

Tensor = tuple[str, np.ndarray]
"""A tensor: its dtype in safetensors' naming, and an array of its shape that holds its bytes."""


Warn = Callable[[str], object]
"""Function that shows a warning of one sentence to the owner of a trainer's folder.

The folder can be served nevertheless.
"""


def write_blob(
    folder: Path,
    out: Path,
    warn: Warn = lambda _: None,
    most_copied: int | None = None,
) -> str:
    """Write the blob of a trainer's folder, in PEFT's or MLX's format; return its SHA-256.

    A blob is the one safetensors file that stores an adapter. Tensors keep their dtype, except that
    float64 becomes float32, and FP8 bfloat16. Tensors are sorted, and named as PEFT names them for
    an unwrapped base model; the config becomes one key of the header's metadata. Left out are
    copies of the base model's matrices beside LoRA of them (another key has the hashes of copies),
    and tensors that answers to texts do not depend on, such as those of a vision part.

    out: the file to write; removed if writing fails.
    warn: called with a sentence if the adapter is not served entirely as it was trained.
    most_copied: limit on the bytes of copies that a resized vocabulary may have changed; above it
        the blob has their hashes alone, which prove equal copies. None: no limit.

    Raises AdapterRejected for a folder without an adapter that engines can serve.
    """
    raw, mlx = _read_config(folder), is_mlx(folder)
    raw = peft_config(raw) if mlx else raw
    refuse_unsupported(raw)  # first, since the config explains more than tensor names
    tensors = mlx_tensors(folder) if mlx else saved_tensors(folder)
    tensors = without_originals(_of_the_decoder(tensors, warn))
    copied = {canonical_module(m): t for m, t in take_tensors(tensors, copied_module).items()}
    whole: dict[str, SavedTensor | ReplacedRows] = {
        module: copied.pop(module) for module in trained_modules(raw, copied)
    }
    copies = [describe_copy(m.rpartition(".")[2], tensor) for m, tensor in copied.items()]
    rows, of_head = (take_tensors(tensors, key) for key in (token_rows_module, head_part))
    head, embedder = trained_head(raw, of_head, folder), read_embedder(folder)
    tokens, vectors = {**trained_tokens(raw, rows)}, take_vectors(tensors)
    doubt: Warn = (lambda _: None) if mlx else warn  # MLX's format has one reading
    pairs, read_for = name_parameters(pair_tensors(tensors, split_saved_name), raw, doubt)
    are_kept = most_copied is None or sum(map(_blob_bytes, copied.values())) <= most_copied
    if are_kept and not {HEAD.module, EMBEDDINGS.module} & {*map(canonical_module, pairs)}:
        # PEFT saved them for a resized vocabulary, or since the trainer said so.
        for module, matrix in copied.items():
            ids, trained = tokens.pop(module, ()), rows.pop(module, None)
            whole[module] = matrix
            if trained is not None:
                whole[module] = ReplacedRows(module, matrix, trained, ids)
    config = replace(LoraConfig.from_peft(raw, pairs, doubt), experts_read_for=read_for)
    check_vectors(raw, vectors, [*map(canonical_module, pairs)])
    modules, config = join_parts(*stack_experts(_in_blobs(pairs), config))
    named: dict[str, Written | ReplacedRows] = {
        token_rows_name(m): tensor for m, tensor in rows.items()
    }
    named |= {whole_name(module): tensor for module, tensor in whole.items()}
    named |= {head_tensor_name(part): tensor for part, tensor in of_head.items()}
    for module, sides in modules.items():
        named |= {tensor_name(module, side): tensor for side, tensor in sides.items()}
    for module, kinds in vectors.items():
        named |= {vector_name(module, kind): tensor for kind, tensor in kinds.items()}
    named = dict(sorted(named.items()))
    try:
        with out.open("wb") as file:
            places = {name: (tensor.blob_dtype, tensor.shape) for name, tensor in named.items()}
            metadata = {METADATA_KEY: config.to_json()} | copies_metadata(copies)
            all_rows = {module: range(tensor.shape[0]) for module, tensor in whole.items()}
            metadata |= rows_metadata(tokens, all_rows) | head_metadata(head)
            metadata |= embedder_metadata(embedder)
            file.write(header_bytes(places, metadata))
            for tensor in named.values():
                file.writelines(tensor.pieces())
        return blob_digest(out)
    except BaseException:
        out.unlink(missing_ok=True)
        raise


def _blob_bytes(tensor: SavedTensor) -> int:
    return math.prod(tensor.shape) * DTYPE_BYTES[tensor.blob_dtype]


def write_peft_folder(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> None:
    """Write a new folder in PEFT's format, which write_blob accepts.

    tensors: tensors by PEFT's names.
    config: content of adapter_config.json.

    Raises AdapterRejected for content that write_blob refuses, and then leaves no folder behind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2))
        with (folder / WEIGHTS_FILE).open("wb") as file:
            places = {name: (dtype, array.shape) for name, (dtype, array) in tensors.items()}
            file.write(header_bytes(places, {"format": "pt"}))
            for _, array in tensors.values():
                file.write(array.tobytes())
        with tempfile.TemporaryDirectory() as scratch:
            write_blob(folder, Path(scratch) / "blob")
    except BaseException:
        shutil.rmtree(folder)
        raise


def trained_on(blob: Path) -> str | None:
    """Return the name of the base model that the adapter in a blob, its file, was trained on.

    Returns "" if the blob's config names none, and None if the file is not a blob. Raises
    AdapterRejected if the header or the config is malformed.
    """
    config = read_header(blob).metadata.get(METADATA_KEY)
    return None if config is None else LoraConfig.from_json(config).base_model_name_or_path


def blob_digest(blob: Path) -> str:
    """Return the SHA-256 of an adapter's file, 64 lower-case hex digits."""
    with blob.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _in_blobs(pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """Rename modules from the trainer's names to the names in blobs (stored adapters).

    pairs: A and B of each module.

    Raises AdapterRejected if two modules get the same name.
    """
    modules: dict[str, Pair] = {}
    for saved, sides in pairs.items():
        module = canonical_module(saved)
        if module in modules:
            raise AdapterRejected(f"two modules of the file are {module}", field=saved)
        modules[module] = sides
    return modules


def _of_the_decoder(tensors: Mapping[str, SavedTensor], warn: Warn) -> dict[str, SavedTensor]:
    """Return the tensors that are neither training state nor of a vision part.

    Warns of tensors of a vision part. Raises AdapterRejected if no tensors remain.
    """
    kept = {name: tensor for name, tensor in tensors.items() if not is_training_state(name)}
    vision = [name for name in kept if is_of_vision(name)]
    if vision and len(vision) == len(kept):
        raise AdapterRejected(
            "it changes the vision part of the base model alone, and only text is served: train "
            "linears of the language model",
            field=vision[0],
        )
    if vision:
        warn(
            f"{len(vision)} tensors of the vision part are left out, such as {vision[0]}: only "
            "text is served, and answers to texts do not depend on that part"
        )
    return {name: tensor for name, tensor in kept.items() if not is_of_vision(name)}


def _read_config(folder: Path) -> dict[str, object]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise AdapterRejected(
            f"{folder} has no {CONFIG_FILE}: {_instead_of(folder)}", field=CONFIG_FILE
        )
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise AdapterRejected(f"{CONFIG_FILE} is over {_MAX_CONFIG_BYTES} bytes", field=CONFIG_FILE)
    return parse_json_object(path.read_bytes(), CONFIG_FILE)


def _instead_of(folder: Path) -> str:
    """Return a suggestion for the user of a folder that contains no adapter."""
    inside = sorted(str(path.parent) for path in folder.glob(f"*/{CONFIG_FILE}"))
    if inside:
        return f"give a folder in it that has one: {', '.join(inside[:3])}"
    if (folder / "config.json").is_file():
        return "it holds a whole model; give the adapter as it was before it was merged"
    return "give the folder that save_pretrained wrote"
