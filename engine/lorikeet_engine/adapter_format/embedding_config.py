"""The files in which sentence-transformers describes how a model embeds texts.

modules.json lists a pipeline: the decoder, pooling (with a config.json in a folder of its own) and
perhaps normalisation. A base model's folder may have these files, and so may an adapter's. The
model's config.json may restrict `dimensions`: is_matryoshka and matryoshka_dimensions, as vLLM
reads them.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lorikeet_engine.adapter import Embedder, Pooling
from lorikeet_engine.adapter_format.header import parse_json_object
from lorikeet_engine.errors import AdapterRejected

EMBEDDER_KEY = "lorikeet_embedder"
MODULES_FILE, POOLING_FILE = "modules.json", "1_Pooling/config.json"
EMBEDDING_FILES = (MODULES_FILE, POOLING_FILE)
"""Names of the files in a folder, as sentence-transformers writes them."""
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_PIPELINES = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
_MAX_DIMENSIONS = 64
_MAX_FILE_BYTES = 1_000_000


def read_embedder(folder: Path) -> Embedder | None:
    """Return the way in which a folder's model embeds texts; None without modules.json.

    folder: a base model's folder, or a trainer's of an adapter.

    Raises AdapterRejected, whose `field` is the file at fault, for files that are malformed or
    describe anything but a decoder, pooling of the last token or by the mean, and normalisation.
    """
    if not (folder / MODULES_FILE).is_file():
        return None
    modules = _read(folder / MODULES_FILE, MODULES_FILE)
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise _fault(MODULES_FILE, "want a list of modules, as sentence-transformers writes it")
    kinds = [str(each.get("type")).rpartition(".")[2] for each in modules]
    if kinds not in _PIPELINES:
        raise _fault(
            MODULES_FILE,
            f"{', '.join(kinds) or 'no modules'}: want Transformer, Pooling and perhaps Normalize; "
            f"without {MODULES_FILE}, the last token's normalised hidden state is the embedding",
        )
    dimensions = _dimensions(folder)
    return Embedder(_pooling(folder), normalizes=len(kinds) == 3, dimensions=dimensions)


def embedder_metadata(embedder: Embedder | None) -> dict[str, str]:
    """Return the metadata entries of an adapter's file that describe how it embeds texts; empty
    without a way of its own.
    """
    if embedder is None:
        return {}
    return {EMBEDDER_KEY: json.dumps(asdict(embedder), sort_keys=True, separators=(",", ":"))}


def parse_embedder(metadata: Mapping[str, str]) -> Embedder | None:
    """Parse from the metadata of an adapter's file how it embeds texts; None: as the base model.

    Raises AdapterRejected if it is malformed.
    """
    text = metadata.get(EMBEDDER_KEY)
    if text is None:
        return None
    raw = parse_json_object(text, f"__metadata__.{EMBEDDER_KEY}")
    pooling, normalizes, cuts = (raw.get(k) for k in ("pooling", "normalizes", "dimensions"))
    known = raw.keys() == {"pooling", "normalizes", "dimensions"} and pooling in [*Pooling]
    if not known or not isinstance(normalizes, bool) or not (cuts is None or _are_sizes(cuts)):
        raise _fault(EMBEDDER_KEY, "want pooling, normalizes and dimensions")
    return Embedder(Pooling(str(pooling)), normalizes, None if cuts is None else tuple(cuts))


def _pooling(folder: Path) -> Pooling:
    config = _object(folder / POOLING_FILE, POOLING_FILE)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _OLD_MODES.items() if config.get(key)]
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or modes[0] not in [*Pooling]:
        found = ", ".join(map(str, modes)) or "none"
        reason = ", and the first token of a causal model sees no other" if modes == ["cls"] else ""
        raise _fault(POOLING_FILE, f"pooling {found} is not served{reason}: want lasttoken or mean")
    return Pooling(modes[0])


def _dimensions(folder: Path) -> tuple[int, ...] | None:
    """Return the lengths to which a model's config.json allows to cut vectors.

    None: any length. (): none, vectors must not be cut.
    """
    file = folder / "config.json"
    config = _object(file, file.name) if file.is_file() else {}
    allowed = config.get("matryoshka_dimensions")
    if allowed is None:
        return () if config.get("is_matryoshka") is False else None
    if not _are_sizes(allowed):
        raise _fault(file.name, "matryoshka_dimensions: want a list of integers ≥ 1")
    return tuple(allowed)


def _are_sizes(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MAX_DIMENSIONS
        and all(type(each) is int and 1 <= each < 2**31 for each in value)
    )


def _object(path: Path, name: str) -> Mapping[str, Any]:
    if not path.is_file():
        raise _fault(name, f"missing, though {MODULES_FILE} has a module for it")
    read = _read(path, name)
    if not isinstance(read, dict):
        raise _fault(name, "want a JSON object")
    return read


def _read(path: Path, name: str) -> Any:
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise _fault(name, f"over {_MAX_FILE_BYTES} bytes")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _fault(name, f"no JSON: {error}") from error


def _fault(field: str, message: str) -> AdapterRejected:
    return AdapterRejected(f"{field}: {message}", field=field)
