"""Rows of embed_tokens or lm_head that an adapter replaces.

PEFT trains such rows in two ways. Of `trainable_token_indices`, a file holds a module's rows
[tokens, hidden], in the order of the config's list of tokens. Of `modules_to_save`, it holds the
whole module [vocabulary, hidden]; a blob may hold only the rows that differ from the base model's.
A blob lists the token ids of the rows under two metadata keys, one for each way, since they differ
if the base model ties both modules: trained tokens of embed_tokens then are lm_head's as well, and
a whole module stands for itself.
"""

import json
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lorikeet_engine.adapter_format.expressions import bad_config
from lorikeet_engine.adapter_format.families import EMBEDDING_ROWS, EMBEDDINGS, HEAD, HEAD_ROWS
from lorikeet_engine.adapter_format.header import TensorSpan, parse_json_object
from lorikeet_engine.adapter_format.saved_weights import SavedTensor
from lorikeet_engine.adapter_format.shape import BaseShape
from lorikeet_engine.adapter_format.tensor_names import is_outer
from lorikeet_engine.errors import AdapterRejected, AdapterTooLarge

TOKENS_KEY = "lorikeet_trained_tokens"
MODULES_KEY = "lorikeet_trained_modules"
MAX_LISTED = 65_536
"""Largest number of listed tokens; a header has room for their ids."""
_OPTION, _MODULES_OPTION = "trainable_token_indices", "modules_to_save"

_BFLOAT16 = "BF16"
_NUMPY = {"F32": "<f4", "F16": "<f2"}

TokensByModule = Mapping[str, Sequence[int]]
"""Token id of each row, by the module of the rows: "lm_head" or "model.embed_tokens"."""


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Trained rows of the embeddings or the output head, one for each changed token.

    linear: index in BaseShape.modules of HEAD_ROWS or EMBEDDING_ROWS, entries for such rows of the
        head and of the embeddings.
    name: the module's name, for error messages.
    ids: the token id of each row.
    rows: place of the tensor [tokens, hidden] in the adapter's file.
    """

    linear: int
    name: str
    ids: Sequence[int]
    rows: TensorSpan

    def matrix(self) -> str:
        """Name of these rows, for error messages."""
        return f"{self.name}.weight"


@dataclass(frozen=True, slots=True)
class ReplacedRows:
    """Whole matrix in a trainer's folder, in which trained rows replace some others.

    module: module of the matrix, for error messages.
    matrix: the matrix [vocabulary, hidden] as it was before the training.
    rows: the trained rows [tokens, hidden], which take the matrix's dtype, as in PEFT.
    ids: the token id of each row.
    """

    module: str
    matrix: SavedTensor
    rows: SavedTensor
    ids: Sequence[int]

    def __post_init__(self) -> None:
        """Raise AdapterRejected if the rows do not fit the matrix."""
        want, whole = (len(self.ids), *self.shape[1:]), self.shape
        good = len(whole) == 2 and self.rows.shape == want
        found = f"its rows are {list(self.rows.shape)} beside {list(whole)}, not {list(want)}"
        _require(good, self.module, found)
        _require(
            max(self.ids) < whole[0],
            self.module,
            f"token {max(self.ids)} has no row in the file's matrix of {whole[0]}: save the "
            "adapter again",
        )

    @property
    def blob_dtype(self) -> str:
        """Dtype of the matrix in a blob."""
        return self.matrix.blob_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Return [vocabulary, hidden]."""
        return self.matrix.shape

    def pieces(self) -> Iterator[bytes]:
        """Yield the matrix's bytes with the trained rows, a few MiB at once.

        Raises AdapterRejected if a file ends early, or if float32 cannot hold a float64 value.
        """
        trained = _cast(b"".join(self.rows.pieces()), self.rows.blob_dtype, self.blob_dtype)
        row = len(trained) // len(self.ids)
        order = sorted(range(len(self.ids)), key=self.ids.__getitem__)
        ids, begin = [self.ids[at] for at in order], 0
        for piece in self.matrix.pieces():
            changed = bytearray(piece)
            for at in range(bisect_left(ids, begin // row), len(ids)):
                place = ids[at] * row - begin
                if place >= len(piece):
                    break
                first, end = max(place, 0), min(place + row, len(piece))
                source = order[at] * row - place
                changed[first:end] = trained[source + first : source + end]
            yield bytes(changed)
            begin += len(piece)


def trained_tokens(raw: Mapping[str, Any], saved: Collection[str]) -> TokensByModule:
    """Return the ids of trained tokens in PEFT's config, checked against the saved rows.

    PEFT saves no rows for an lm_head that is tied to the embeddings, except of a resized
    vocabulary, and lists the embeddings' tokens for it or none.

    raw: PEFT's config.
    saved: modules whose trained rows the trainer has saved, named as in blobs (stored adapters).

    Raises AdapterRejected for malformed lists and if rows or their ids are missing, and
    AdapterTooLarge for more than MAX_LISTED tokens of a module.
    """
    option = raw.get(_OPTION) or {}
    tokens = {}
    for name, ids in (option if isinstance(option, Mapping) else {"embed_tokens": option}).items():
        module = next((each.module for each in (HEAD, EMBEDDINGS) if is_outer(name, each)), None)
        if module is None or module in tokens:
            raise bad_config(f"{name!r}: want tokens of embed_tokens or of lm_head", _OPTION)
        tokens[module] = _checked(ids, _OPTION)
    if HEAD.module in saved and EMBEDDINGS.module in tokens:  # saved of a tied lm_head, too
        tokens.setdefault(HEAD.module, tokens[EMBEDDINGS.module])
    for module in saved:
        if module not in tokens:
            raise bad_config(
                f"it names no trained tokens of {module}, whose rows are in the file", _OPTION
            )
    for module, ids in tokens.items():
        tied = module == HEAD.module and ids == tokens.get(EMBEDDINGS.module)
        if module not in saved and not tied:
            raise bad_config(
                f"the rows of {module} are not in the file: save the adapter again", _OPTION
            )
    return tokens


def trained_modules(raw: Mapping[str, Any], saved: Collection[str]) -> tuple[str, ...]:
    """Return which of lm_head and embed_tokens PEFT has trained whole, named as in blobs.

    With ensure_weight_tying, PEFT saves an lm_head that is tied to whole embeddings, too.

    raw: PEFT's config.
    saved: modules whose whole matrices are in the file, named as in blobs (stored adapters).

    Raises AdapterRejected if a matrix is missing.
    """
    names = [str(name) for name in raw.get(_MODULES_OPTION) or ()]
    found = [m.module for m in (HEAD, EMBEDDINGS) if any(is_outer(name, m) for name in names)]
    for module in found:
        if module not in saved:
            raise bad_config(
                f"the weights of {module} are not in the file: save the adapter again, or train "
                "without modules_to_save",
                _MODULES_OPTION,
            )
    if found == [EMBEDDINGS.module] and raw.get("ensure_weight_tying") and HEAD.module in saved:
        found.append(HEAD.module)
    return tuple(found)


def rows_metadata(tokens: TokensByModule, modules: TokensByModule) -> dict[str, str]:
    """Return the metadata entries of an adapter's file that list replaced rows; empty if none.

    tokens: by module, ids of rows trained one by one (PEFT's trainable_token_indices).
    modules: by module, ids of the rows that the file has of a module trained in full (PEFT's
        modules_to_save): range(vocabulary) if it has all rows.
    """
    return {
        key: json.dumps(
            {m: len(ids) if isinstance(ids, range) else [*ids] for m, ids in rows.items()},
            sort_keys=True,
            separators=(",", ":"),
        )
        for key, rows in ((TOKENS_KEY, tokens), (MODULES_KEY, modules))
        if rows
    }


def parse_rows(metadata: Mapping[str, str], key: str) -> TokensByModule:
    """Parse the ids of replaced rows from the metadata of an adapter's file.

    key: TOKENS_KEY or MODULES_KEY.

    Raises AdapterRejected for malformed lists, and AdapterTooLarge for more than MAX_LISTED tokens
    of a module.
    """
    text = metadata.get(key)
    if text is None:
        return {}
    listed = parse_json_object(text, f"__metadata__.{key}")
    if not listed.keys() <= {HEAD.module, EMBEDDINGS.module}:
        raise AdapterRejected("trained tokens of an unknown module", field=key)
    return {
        module: range(ids)
        if key == MODULES_KEY and type(ids) is int and 0 < ids < 2**24
        else _checked(ids, key)
        for module, ids in listed.items()
    }


def read_token_rows(
    tokens: TokensByModule,
    saved: Mapping[str, TensorSpan],
    modules: TokensByModule,
    whole: Mapping[str, TensorSpan],
    adapted: Collection[str],
    shape: BaseShape,
    max_added: int = 0,
) -> tuple[TokenRows, ...]:
    """Return the replaced rows in an adapter's file.

    If the base model ties lm_head to the embeddings, trained tokens of the embeddings are returned
    for both, with the same place in the file.

    tokens, modules: ids of trained tokens, and of the rows of modules that were trained whole, from
        the metadata.
    saved, whole: the tensors of the blob that hold rows of either, by module.
    adapted: modules that have LoRA, named as in blobs.
    shape: sizes of the base model.
    max_added: number of tokens behind the base model's vocabulary that adapters may have.

    Raises AdapterRejected for rows that do not fit the base model, for a module that is changed in
    two ways, and for more than `max_added` tokens behind the base model's vocabulary.
    """
    if saved.keys() - tokens.keys() or whole.keys() != modules.keys():
        raise AdapterRejected("there are rows of tokens that are not listed", field=TOKENS_KEY)
    rows = {EMBEDDINGS.module: EMBEDDING_ROWS, HEAD.module: HEAD_ROWS}
    names = {EMBEDDINGS.module: EMBEDDINGS.name, HEAD.module: HEAD.name}
    found = []
    listed = [(module, ids, saved.get(module), shape.tied) for module, ids in tokens.items()]
    listed += [(module, ids, whole[module], False) for module, ids in modules.items()]
    for module, ids, span, both in listed:
        if span is None:
            _require(shape.tied and module == HEAD.module, module, "its rows are not in the file")
            continue
        want = (len(ids), shape.hidden)
        _require(span.shape == want, module, f"its rows are {list(span.shape)}, not {list(want)}")
        added = max(ids) + 1 - shape.vocabulary
        _require(
            added <= max_added,
            module,
            f"token {max(ids)} is not in the base model's vocabulary of {shape.vocabulary}: set "
            f"LORIKEET_MAX_ADDED_TOKENS, now {max_added}, to at least {added}, or train tokens "
            "that it has",
        )
        _require(
            not (both and module == HEAD.module and EMBEDDINGS.module in tokens),
            module,
            "it has the embeddings' weights: train tokens of embed_tokens alone",
        )
        both = both and module == EMBEDDINGS.module
        for each in (EMBEDDINGS.module, HEAD.module) if both else (module,):
            _require(each not in adapted, each, "it has LoRA, too; train one of them")
            found.append(TokenRows(shape.index(rows[each].name), names[each], ids, span))
    linears = [part.linear for part in found]
    _require(len({*linears}) == len(linears), HEAD.module, "they are trained in two ways")
    return tuple(found)


def added_vocabulary(rows: Collection[TokenRows], shape: BaseShape, *, generates: bool) -> int:
    """Return the number of tokens of an adapter that has more than its base model; 0 for others.

    rows: the adapter's replaced rows.
    generates: whether the adapter generates, so that each token needs a row of lm_head, too.

    Raises AdapterRejected for added tokens that have a row of one module alone.
    """
    ids = {part.name: {i for i in part.ids if i >= shape.vocabulary} for part in rows}
    of_embeddings, of_head = ids.get(EMBEDDINGS.name, set()), ids.get(HEAD.name, set())
    for module, missing in (
        (EMBEDDINGS.module, of_head - of_embeddings),
        (HEAD.module, of_embeddings - of_head if generates else ()),
    ):
        _require(
            not missing,
            module,
            f"the row of token {min(missing, default=0)}, which the base model lacks, is not in "
            "the file: save the adapter with save_embedding_layers=True",
        )
    return max(of_embeddings, default=-1) + 1


def _cast(values: bytes, dtype: str, target: str) -> bytes:
    """Return floats in another dtype, rounded to the nearest: F32, F16 or BF16."""
    if dtype == target:
        return values
    if dtype == _BFLOAT16:
        wide = (np.frombuffer(values, "<u2").astype("<u4") << 16).view("<f4")
    else:
        wide = np.frombuffer(values, _NUMPY[dtype]).astype("<f4")
    if target != _BFLOAT16:
        return bytes(wide.astype(_NUMPY[target]).data)
    bits = wide.view("<u4")
    return bytes(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").data)


def _require(good: bool, module: str, fault: str) -> None:
    if not good:
        raise AdapterRejected(f"trained tokens of {module}: {fault}", field=module)


def _checked(ids: Any, field: str) -> tuple[int, ...]:
    good = isinstance(ids, list) and all(type(each) is int and 0 <= each < 2**24 for each in ids)
    if not good or not ids or len(set(ids)) < len(ids):
        raise AdapterRejected(
            f"{field} wants a list of different token ids for each module", field=field
        )
    if len(ids) > MAX_LISTED:
        raise AdapterTooLarge(
            f"{len(ids)} trained tokens in one module: the limit is {MAX_LISTED}",
            field=field,
            tokens=len(ids),
            max_tokens=MAX_LISTED,
        )
    return tuple(ids)
