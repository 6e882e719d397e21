"""Trained tokens: rows of embed_tokens or lm_head that an adapter replaces.

PEFT's `trainable_token_indices`. A file holds a module's rows [tokens, hidden], in the order of the
config's list of tokens; a blob has that list under a metadata key of its own.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lorikeet_engine.adapter_format.expressions import bad_config
from lorikeet_engine.adapter_format.families import EMBEDDING_ROWS, EMBEDDINGS, HEAD, HEAD_ROWS
from lorikeet_engine.adapter_format.header import TensorSpan, parse_json_object
from lorikeet_engine.adapter_format.shape import BaseShape
from lorikeet_engine.adapter_format.tensor_names import is_outer
from lorikeet_engine.errors import AdapterRejected, AdapterTooLarge

TOKENS_KEY = "lorikeet_trained_tokens"
MAX_TOKENS = 256
_OPTION = "trainable_token_indices"

TokensByModule = Mapping[str, tuple[int, ...]]
"""Token id of each trained row, by the module of the rows: "lm_head" or "model.embed_tokens"."""


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
    ids: tuple[int, ...]
    rows: TensorSpan

    def matrix(self) -> str:
        """Name of these rows, for error messages."""
        return f"{self.name}.trainable_tokens_delta"


def trained_tokens(raw: Mapping[str, Any], saved: Collection[str]) -> TokensByModule:
    """Return the ids of trained tokens in PEFT's config, checked against the saved rows.

    PEFT saves no rows for an lm_head that is tied to the embeddings; the config may list it with
    the embeddings' tokens.

    raw: PEFT's config.
    saved: modules whose trained rows the trainer has saved, named as in blobs (stored adapters).

    Raises AdapterRejected for malformed lists and if rows or their ids are missing, and
    AdapterTooLarge for more than MAX_TOKENS tokens of a module.
    """
    option = raw.get(_OPTION) or {}
    tokens = {}
    for name, ids in (option if isinstance(option, Mapping) else {"embed_tokens": option}).items():
        module = next((each.module for each in (HEAD, EMBEDDINGS) if is_outer(name, each)), None)
        if module is None or module in tokens:
            raise bad_config(f"{name!r}: want tokens of embed_tokens or of lm_head", _OPTION)
        tokens[module] = _checked(ids, _OPTION)
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


def tokens_metadata(tokens: TokensByModule) -> dict[str, str]:
    """Return the metadata entries of an adapter's file that list trained tokens; empty if none."""
    if not tokens:
        return {}
    return {TOKENS_KEY: json.dumps(tokens, sort_keys=True, separators=(",", ":"))}


def parse_tokens(metadata: Mapping[str, str]) -> TokensByModule:
    """Parse the ids of trained tokens from the metadata of an adapter's file.

    Raises AdapterRejected for malformed lists, and AdapterTooLarge for more than MAX_TOKENS tokens
    of a module.
    """
    text = metadata.get(TOKENS_KEY)
    if text is None:
        return {}
    listed = parse_json_object(text, f"__metadata__.{TOKENS_KEY}")
    if not listed.keys() <= {HEAD.module, EMBEDDINGS.module}:
        raise AdapterRejected("trained tokens of an unknown module", field=TOKENS_KEY)
    return {module: _checked(ids, TOKENS_KEY) for module, ids in listed.items()}


def read_token_rows(
    tokens: TokensByModule,
    saved: Mapping[str, TensorSpan],
    adapted: Collection[str],
    shape: BaseShape,
) -> tuple[TokenRows, ...]:
    """Return the trained rows in an adapter's file, in the order of the modules in its metadata.

    tokens: ids of trained tokens, from the metadata.
    saved: the tensors of the blob that hold rows, by module.
    adapted: modules that have LoRA, named as in blobs.
    shape: sizes of the base model.

    Raises AdapterRejected for rows that do not fit the base model, and for a module that both LoRA
    and rows change.
    """
    if saved.keys() - tokens.keys():
        raise AdapterRejected("there are rows of tokens that are not listed", field=TOKENS_KEY)
    found = []
    for module, ids in tokens.items():
        span = saved.get(module)
        if span is None:
            _require(shape.tied and module == HEAD.module, module, "its rows are not in the file")
            continue
        name = EMBEDDINGS.name if module == EMBEDDINGS.module else HEAD.name
        want = (len(ids), shape.hidden)
        _require(span.shape == want, module, f"its rows are {list(span.shape)}, not {list(want)}")
        _require(
            max(ids) < shape.vocabulary,
            module,
            f"token {max(ids)} is not in the base model's vocabulary of {shape.vocabulary}, and "
            "resized vocabularies cannot be served; train tokens that it has",
        )
        rows = EMBEDDING_ROWS if module == EMBEDDINGS.module else HEAD_ROWS
        found.append(TokenRows(shape.index(rows.name), name, ids, span))
    _require(
        not (shape.tied and len(found) > 1),
        HEAD.module,
        "it has the embeddings' weights: train tokens of embed_tokens alone",
    )
    changed = set(tokens) | ({HEAD.module} if shape.tied and found else set())
    for module in changed & set(adapted):
        _require(False, module, "it has LoRA, too, and both cannot be served; train one of them")
    return tuple(found)


def _require(good: bool, module: str, fault: str) -> None:
    if not good:
        raise AdapterRejected(f"trained tokens of {module}: {fault}", field=module)


def digits(ids: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield the three base-256 digits of each token id, lowest first."""
    return ((each & 255, each >> 8 & 255, each >> 16) for each in ids)


def _checked(ids: Any, field: str) -> tuple[int, ...]:
    good = isinstance(ids, list) and all(type(each) is int and 0 <= each < 2**24 for each in ids)
    if not good or not ids or len(set(ids)) < len(ids):
        raise AdapterRejected(
            f"{field} wants a list of different token ids for each module", field=field
        )
    if len(ids) > MAX_TOKENS:
        raise AdapterTooLarge(
            f"{len(ids)} trained tokens in one module: the limit is {MAX_TOKENS}",
            field=field,
            tokens=len(ids),
            max_tokens=MAX_TOKENS,
        )
    return tuple(ids)
