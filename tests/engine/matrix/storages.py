"""How engines can hold a base model and its KV cache, and where: the matrix's first columns."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from lorikeet_engine.models.weight_formats.nf4 import round_to_nf4
from tests.engine.models.fp8_models import round_linears
from tests.engine.models.test_fp8_checkpoints import BLOCK, written


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far log probabilities of a request may be off, as shares of the largest logit.

    beyond: how many tokens of an answer may be off by more than `worst`.
    """

    worst: float
    median: float
    beyond: int = 0


# 40 sums over 64 and more terms, each off by some roundings of its own.
EXACT = Tolerance(*[100 * torch.finfo(torch.float32).eps] * 2)
# Where a number lies between two of FP8's, the last digit of what went before decides which it
# becomes, and these differ by a 16th. That is seldom; in a prompt, all tokens behind it read it:
# medians of 3.5e-3 were seen. Weights that are rounded otherwise make 8e-3 and more. And where two
# experts were as likely, by 1e-4, a token was computed by the other one: off by a quarter.
ROUNDED = Tolerance(worst=1 / 16, median=5e-3, beyond=1)


@dataclass(frozen=True, slots=True)
class Storage:
    """A column. settings: EngineSettings'. imitate: makes transformers' model compute as these do.

    tolerance: against that model. rounds_kv: whether its keys and values are rounded, too. stored:
    makes the checkpoint that is served, in a folder, of one of floats.
    """

    settings: Mapping[str, Any]
    imitate: Callable[[torch.nn.Module], None]
    tolerance: Tolerance
    rounds_kv: bool = False
    stored: Callable[[Path, Path], Path] = lambda checkpoint, _: checkpoint


class RoundedCache(transformers.DynamicCache):
    """Keeps what E4M3 makes of keys and values; of keys once these are multiplied by key_gain."""

    def __init__(self, key_gain: float) -> None:
        super().__init__()
        self._key_gain = key_gain

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = _rounded(keys * self._key_gain) / self._key_gain, _rounded(values)
        return super().update(keys, values, layer, *args, **kwargs)


def key_gain(config: Any) -> float:
    """What an engine multiplies keys by: half of what a family's scores have instead of 1/√d."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    usual = 1 / math.sqrt(head_dim)
    of_gemma = 1 / math.sqrt(getattr(config, "query_pre_attn_scalar", head_dim))
    return math.sqrt(getattr(config, "attention_multiplier", of_gemma) / usual)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _leave(model: torch.nn.Module) -> None:
    """Weights of floats are what they are."""


def _round_to_nf4(model: torch.nn.Module) -> None:
    for name, linear in model.named_modules():
        if name.endswith("_proj"):
            linear.weight.data = round_to_nf4(linear.weight.data)


def _in_blocks(checkpoint: Path, folder: Path) -> Path:
    return written(checkpoint, folder, "blocks")[0]


STORAGES = {
    "floats": Storage({}, _leave, EXACT),
    "fp8_weights": Storage({"weight_dtype": "fp8"}, round_linears, ROUNDED),
    "nf4_weights": Storage({"weight_dtype": "nf4"}, _round_to_nf4, EXACT),
    "fp8_kv": Storage({"kv_dtype": "fp8"}, _leave, ROUNDED, rounds_kv=True),
    "two_ranks": Storage({"tensor_parallel": 2}, _leave, EXACT),
    "fp8_of_two_ranks": Storage(
        {"tensor_parallel": 2, "weight_dtype": "fp8"}, partial(round_linears, ranks=2), ROUNDED
    ),
    "fp8_blocks": Storage({}, partial(round_linears, block=BLOCK), ROUNDED, stored=_in_blocks),
    "fp8_blocks_of_two_ranks": Storage(
        {"tensor_parallel": 2},
        partial(round_linears, ranks=2, block=BLOCK),
        ROUNDED,
        stored=_in_blocks,
    ),
    "fp8_kv_of_two_ranks": Storage(
        {"tensor_parallel": 2, "kv_dtype": "fp8"}, _leave, ROUNDED, rounds_kv=True
    ),
}
