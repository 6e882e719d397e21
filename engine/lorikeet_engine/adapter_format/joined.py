"""Joins adapters on parts of a linear, such as in_proj_q, k and v, to one on the whole linear.

Tinker trains the three matrices that in_proj_qkv stacks apart. Joined, their ranks follow one
another: A is stacked, and B is block-diagonal.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from lorikeet_engine.adapter_format.experts.forms import Stored
from lorikeet_engine.adapter_format.header import DTYPE_BYTES
from lorikeet_engine.adapter_format.lora_config import LoraConfig
from lorikeet_engine.adapter_format.tensor_names import PARTS, part_of, parts_of
from lorikeet_engine.errors import AdapterRejected

Pair = Mapping[str, Stored]


@dataclass(frozen=True, slots=True)
class _Joined:
    """A or B of a whole linear, such as in_proj_qkv, made of those of its parts (q, k and v).

    sources: the parts' matrices.
    diagonal: whether they are the blocks of a block-diagonal matrix; else they are stacked.
    """

    sources: tuple[Stored, ...]
    diagonal: bool

    @property
    def blob_dtype(self) -> str:
        """Dtype that the matrix has in a stored adapter (blob), in safetensors' naming."""
        return self.sources[0].blob_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Return [rows, columns]."""
        rows, columns = zip(*(source.shape for source in self.sources), strict=True)
        return sum(rows), sum(columns) if self.diagonal else columns[0]

    def pieces(self) -> Iterator[bytes]:
        """Yield the matrix's bytes in blob_dtype, one source at a time.

        Raises AdapterRejected if a file ends early, or if float32 cannot hold a float64 value.
        """
        begin, width = 0, self.shape[1]
        for source in self.sources:
            if not self.diagonal:
                yield from source.pieces()
                continue
            words = np.frombuffer(b"".join(source.pieces()), f"<u{DTYPE_BYTES[self.blob_dtype]}")
            rows, columns = source.shape
            padded = np.zeros((rows, width), words.dtype)
            padded[:, begin : begin + columns] = words.reshape(rows, columns)
            begin += columns
            yield padded.tobytes()


Written = Stored | _Joined
"""A tensor that can be written to a blob."""


def join_parts(
    modules: Mapping[str, Pair], config: LoraConfig
) -> tuple[dict[str, Mapping[str, Written]], LoraConfig]:
    """Join the pairs on parts of one linear, such as in_proj_q, in_proj_k and in_proj_v of
    in_proj_qkv; return all pairs by module, and their config.

    modules: A and B by module, named as in blobs (stored adapters); pairs of modules that are no
        parts are returned unchanged.
    config: config for these modules. The returned config is for the returned modules.

    Raises AdapterRejected if only some of a linear's parts have weights, if the whole linear has
    weights too, or if the parts differ in dtype, width or scaling.
    """
    wholes = {part[0]: None for part in map(part_of, modules) if part}
    joined: dict[str, Mapping[str, Written]] = {
        module: pair for module, pair in modules.items() if not part_of(module)
    }
    ranks = {m: rank for m, rank in config.rank_pattern.items() if m in joined}
    alphas = {m: alpha for m, alpha in config.alpha_pattern.items() if m in joined}
    for whole in wholes:
        if whole in joined:
            raise AdapterRejected(f"{whole} is in the file in two forms", field=whole)
        parts = parts_of(whole)
        _check_alike(parts, modules, config)
        pair = {
            side: _Joined(tuple(modules[part][side] for part in parts), diagonal=side == "B")
            for side in "AB"
        }
        rank = pair["B"].shape[1]
        divisor = math.sqrt(rank) if config.use_rslora else rank
        joined[whole] = pair
        ranks[whole], alphas[whole] = rank, config.scaling(parts[0]) * divisor
    return joined, replace(config, rank_pattern=ranks, alpha_pattern=alphas)


def _check_alike(parts: tuple[str, ...], modules: Mapping[str, Pair], config: LoraConfig) -> None:
    """Raise AdapterRejected if parts cannot be joined.

    parts: names of all parts of a linear.
    config: tells the scaling of each module.
    """
    first, *others = sorted(parts, key=lambda part: part not in modules)
    for part in others:
        if part not in modules:
            raise AdapterRejected(
                f"{part} has no weights and {first} has: {', '.join(PARTS)} of one delta net are "
                "served together; train all three, or in_proj_qkv",
                field=part,
            )
        one, other = modules[first], modules[part]
        if any(one[side].blob_dtype != other[side].blob_dtype for side in "AB"):
            raise _differ(part, first, "dtype")
        if one["A"].shape[1] != other["A"].shape[1]:
            raise _differ(part, first, "width of inputs")
        if config.scaling(part) != config.scaling(first):
            raise _differ(part, first, "scaling")


def _differ(part: str, first: str, what: str) -> AdapterRejected:
    return AdapterRejected(
        f"{part} has another {what} than {first}: the parts of one linear are served together; "
        "train them with one rank, alpha and dtype",
        field=part,
    )
