"""Ways in which engines store a base model and its KV cache: one dimension of the matrix."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from lorikeet_engine.models.weight_formats.nf4 import round_to_nf4
from tests.engine.models.fp8_models import round_linears
from tests.engine.models.mxfp4_checkpoints import round_experts, write_mxfp4
from tests.engine.models.quantized_checkpoints import (
    BLOCK,
    INT4,
    write_fp8,
    write_int4_values,
)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest errors of an answer's log probabilities, as shares of the largest logit.

    worst: error of a token.
    median: median of the errors of all tokens.
    beyond: tokens of the answer whose errors may exceed `worst`.
    """

    worst: float
    median: float
    beyond: int = 0


# 40 sums over 64 and more terms, each off by some roundings of its own. Random weights amplify
# them: in a mixture with delta nets 243 roundings were seen on one processor, 95 on another.
EXACT = Tolerance(*[400 * torch.finfo(torch.float32).eps] * 2)
# A number halfway between two FP8 numbers becomes one or the other by the last digit of the sums
# before it, and the two differ by a 16th. Such numbers are rare, but all tokens behind one in a
# prompt read it: medians of 7.2e-3 were seen. Weights that are rounded differently give 8e-3 and
# more. Where the probabilities of two experts differed by 1e-4, a token was computed by the other
# expert: an error of a quarter.
ROUNDED = Tolerance(worst=1 / 16, median=7.5e-3, beyond=1)


@dataclass(frozen=True, slots=True)
class Storage:
    """A way to store a base model and its KV cache, and a model of transformers that imitates it.

    settings: EngineSettings' arguments.
    imitate: changes transformers' model of floats so that it computes as the engine should.
    tolerance: errors of the engine against that model.
    rounds_kv: whether keys and values are rounded to FP8.
    kind: kind of checkpoint that the engine serves: of FP8 in quantized_checkpoints.CONFIGS, of
        4 bits in INT4, or "mxfp4"; None: the checkpoint of floats.
    """

    settings: Mapping[str, Any]
    imitate: Callable[[torch.nn.Module], None]
    tolerance: Tolerance
    rounds_kv: bool = False
    kind: str | None = None

    def stored(self, floats: Path, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        """Return the checkpoint to serve and the floats that its weights stand for, by name.

        floats: checkpoint of floats.
        folder: folder that a quantised checkpoint is written to.
        """
        if self.kind == "mxfp4":
            return write_mxfp4(floats, folder / "mxfp4")[0], {}
        if self.kind in INT4:
            return write_int4_values(floats, folder, self.kind)
        return (floats, {}) if self.kind is None else write_fp8(floats, folder, self.kind)


class RoundedCache(transformers.DynamicCache):
    """KV cache that rounds values, and keys multiplied by `key_gain`, to E4M3."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self._key_gain = key_gain(config)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = _rounded(keys * self._key_gain) / self._key_gain, _rounded(values)
        return super().update(keys, values, layer, *args, **kwargs)


def key_gain(config: Any) -> float:
    """Return what an engine multiplies keys by: √(a family's scale of scores / (1/√d))."""
    of_attention = config.model_type == "granitemoehybrid" or "gemma4" in config.model_type
    if of_attention:  # which itself applies the factor
        return 1.0
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    usual = 1 / math.sqrt(head_dim)
    of_gemma = 1 / math.sqrt(getattr(config, "query_pre_attn_scalar", head_dim))
    return math.sqrt(getattr(config, "attention_multiplier", of_gemma) / usual)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _leave(model: torch.nn.Module) -> None:
    """Do nothing: floats are served unchanged."""


def _round_to_nf4(model: torch.nn.Module) -> None:
    for name, linear in model.named_modules():
        if re.search(r"_proj(_\w+)?$|per_layer_(?:input_gate|(?:model_)?projection)$", name):
            linear.weight.data = round_to_nf4(linear.weight.data)


STORAGES = {
    "floats": Storage({}, _leave, EXACT),
    "fp8_weights": Storage({"weight_dtype": "fp8"}, round_linears, ROUNDED),
    "nf4_weights": Storage({"weight_dtype": "nf4"}, _round_to_nf4, EXACT),
    "fp8_kv": Storage({"kv_dtype": "fp8"}, _leave, ROUNDED, rounds_kv=True),
    "two_ranks": Storage({"tensor_parallel": 2}, _leave, EXACT),
    "fp8_of_two_ranks": Storage(
        {"tensor_parallel": 2, "weight_dtype": "fp8"}, partial(round_linears, ranks=2), ROUNDED
    ),
    "fp8_channels": Storage({}, round_linears, ROUNDED, kind="dynamic"),
    "fp8_matrices": Storage({}, round_linears, ROUNDED, kind="autofp8"),
    "fp8_blocks": Storage({}, round_linears, ROUNDED, kind="blocks"),
    "fp8_blocks_of_two_ranks": Storage(
        {"tensor_parallel": 2},
        partial(round_linears, ranks=2, block=BLOCK),
        ROUNDED,
        kind="blocks",
    ),
    "packed_awq": Storage({"weight_dtype": "packed"}, _leave, EXACT, kind="awq"),
    "packed_act_order": Storage({"weight_dtype": "packed"}, _leave, EXACT, kind="gptq"),
    "packed_mxfp4": Storage({"weight_dtype": "packed"}, round_experts, EXACT, kind="mxfp4"),
    "packed_mxfp4_of_two_ranks": Storage(
        {"tensor_parallel": 2, "weight_dtype": "packed"}, round_experts, EXACT, kind="mxfp4"
    ),
    "fp8_kv_of_two_ranks": Storage(
        {"tensor_parallel": 2, "kv_dtype": "fp8"}, _leave, ROUNDED, rounds_kv=True
    ),
}
