"""Turns PEFT's folder into a blob: one safetensors file, the same for the same adapter."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from lorikeet_engine.adapter_format.config import LoraConfig, refuse_unsupported
from lorikeet_engine.adapter_format.expressions import CONFIG_FILE
from lorikeet_engine.adapter_format.header import (
    MAX_HEADER_BYTES,
    TensorSpan,
    header_bytes,
    parse_json_object,
    read_header,
)
from lorikeet_engine.adapter_format.spec import METADATA_KEY, check_rank, pair_tensors
from lorikeet_engine.adapter_format.tensor_names import tensor_name
from lorikeet_engine.errors import AdapterRejected

WEIGHTS_FILE = "adapter_model.safetensors"
_CHUNK_BYTES = 4 << 20


def write_blob(peft_folder: Path, out: Path) -> str:
    """Write the blob of what PEFT's save_pretrained left in a folder; returns its digest.

    The tensors' bytes stay as they are, sorted by name; the config becomes one key of the
    header's metadata. Raises AdapterRejected, and then leaves no file behind.
    """
    weights, raw = _weights_file(peft_folder), _read_config(peft_folder)
    refuse_unsupported(raw)  # first: the config has better names for it than the tensors
    pairs = pair_tensors(read_header(weights))
    config = LoraConfig.from_peft(raw, pairs)
    for module, sides in pairs.items():
        check_rank(module, sides, want=config.rank(module))
    named = sorted(
        (tensor_name(module, side), span)
        for module, sides in pairs.items()
        for side, span in sides.items()
    )
    try:
        with out.open("wb") as file:
            places = {name: (span.dtype, span.shape) for name, span in named}
            file.write(header_bytes(places, {METADATA_KEY: config.to_json()}))
            for piece in _tensor_bytes(weights, named):
                file.write(piece)
        return blob_digest(out)
    except BaseException:
        out.unlink(missing_ok=True)
        raise


def blob_digest(blob: Path) -> str:
    """SHA-256 of the file's bytes, 64 lower-case hex digits."""
    with blob.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _weights_file(folder: Path) -> Path:
    weights = folder / WEIGHTS_FILE
    if weights.is_file():
        return weights
    pickles = [p.name for ending in ("bin", "pt", "pth", "pkl") for p in folder.glob(f"*.{ending}")]
    if pickles:
        raise AdapterRejected(
            f"{pickles[0]} is a pickle, which can run code when it is opened: save the adapter as "
            "safetensors with save_pretrained(..., safe_serialization=True), or let `lorikeet "
            "convert` make safetensors of it",
            field=pickles[0],
        )
    raise AdapterRejected(
        f"{folder} has no {WEIGHTS_FILE}: give the folder that save_pretrained wrote, or that "
        "`lorikeet convert` made of TensorRT-LLM's tensors",
        field=WEIGHTS_FILE,
    )


def _read_config(folder: Path) -> dict[str, object]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise AdapterRejected(
            f"{folder} has no {CONFIG_FILE}: give the folder that save_pretrained wrote",
            field=CONFIG_FILE,
        )
    if path.stat().st_size > MAX_HEADER_BYTES:
        raise AdapterRejected(f"{CONFIG_FILE} is over {MAX_HEADER_BYTES} bytes", field=CONFIG_FILE)
    return parse_json_object(path.read_bytes(), CONFIG_FILE)


def _tensor_bytes(weights: Path, named: list[tuple[str, TensorSpan]]) -> Iterator[bytes]:
    with weights.open("rb") as file:
        for name, span in named:
            file.seek(span.begin)
            for begin in range(span.begin, span.end, _CHUNK_BYTES):
                want = min(_CHUNK_BYTES, span.end - begin)
                piece = file.read(want)
                if len(piece) != want:
                    raise AdapterRejected(f"{weights.name} changed while it was read", field=name)
                yield piece
