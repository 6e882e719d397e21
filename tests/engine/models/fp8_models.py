"""Models of transformers that compute as FP8 linears do: rounded weights, and rounded inputs."""

import re
from collections.abc import Mapping
from math import gcd
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from lorikeet_engine.kernels.fp8 import BLOCK_WIDTHS, DTYPE, LARGEST, Fp8Rows, quantize_rows

# A layer, an expert's number, and its linear, as checkpoints of Qwen 3 MoE and of Mixtral name it.
EXPERT = re.compile(r"((?:model|backbone)\.layers\.\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")


_BY_INPUT = (".o_proj", ".out_proj", ".down_proj", ".output_linear")  # divided so among ranks


class RoundedLinear(torch.nn.Linear):
    """Linear whose input is rounded to FP8, token by token; its weight is not changed.

    PEFT may add an adapter to the weight, as a parameter; it reads the input unrounded.

    parts: parts of a token's input, each rounded with a scale of its own.
    """

    parts = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_parametrized(self, "weight"):
            return F.linear(rounded(x, self.parts), self.weight, self.bias)
        adapted, base = self.weight, self.parametrizations.weight.original
        y = F.linear(rounded(x, self.parts), base, self.bias)
        return y + F.linear(x, adapted - base)


class RoundedExperts(torch.nn.Module):
    """Experts whose inputs are rounded to FP8, row by row; adapters read the inputs unrounded.

    PEFT adds an adapter to the parameters during a forward pass; the difference is the adapter.

    first: parameter of the first products.
    rounds: products whose inputs are rounded.
    down_parts: parts of down's input, each rounded with a scale of its own.
    """

    first = "gate_up_proj"
    rounds = ("gate_up_proj", "up_proj", "down_proj")
    down_parts = 1

    def forward(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in experts.unique():
            token, place = torch.where(experts == expert)
            y = self._gated(self._product(x[token], self.first, expert), expert)
            y = self._product(y, "down_proj", expert) + self._bias_of("down_proj", expert)
            out.index_add_(0, token, y * weights[token, place, None])
        return out

    def _product(self, x: torch.Tensor, name: str, expert: torch.Tensor) -> torch.Tensor:
        adapted = base = getattr(self, name)
        if is_parametrized(self, name):
            base = self.parametrizations[name].original
        parts = self.down_parts if name == "down_proj" else 1
        y = F.linear(rounded(x, parts) if name in self.rounds else x, self._matrix(base[expert]))
        return y + F.linear(x, self._matrix(adapted[expert] - base[expert]))

    def _gated(self, y: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        gate, up = y.chunk(2, -1)
        return self.act_fn(gate) * up

    def _bias_of(self, name: str, expert: torch.Tensor) -> torch.Tensor | float:
        return 0.0

    def _matrix(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


class RoundedUngatedExperts(RoundedExperts):
    """Nemotron's experts as RoundedExperts: without gate."""

    first = "up_proj"

    def _gated(self, y: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        activated: torch.Tensor = self.act_fn(y)
        return activated


class RoundedClampedExperts(RoundedExperts, GptOssExperts):
    """gpt-oss's experts as RoundedExperts: with biases, and parameters [experts, d_in, d_out]."""

    def _gated(self, y: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = self._apply_gate(y + self._bias_of("gate_up_proj", expert))
        return gated

    def _bias_of(self, name: str, expert: torch.Tensor) -> torch.Tensor | float:
        bias: torch.Tensor = getattr(self, f"{name}_bias")[expert]
        return bias

    def _matrix(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.mT


def rounded_model(folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Load a model that computes as FP8 linears do.

    folder: checkpoint of floats.
    weights: weights of linears, by the checkpoint's names; None: the checkpoint's, rounded to FP8.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    round_linears(model)
    set_weights(model, weights or {})
    return model


def set_weights(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Replace the weights of a model's linears and experts. weights: by the checkpoint's names."""
    for name, weight in weights.items():
        if expert := EXPERT.fullmatch(name):
            _matrix_of(model, *expert.groups()).copy_(weight)
        elif "_proj" in name or "_input_gate" in name:
            model.get_parameter(name.replace("backbone.", "model.")).data = weight


def _matrix_of(model: Any, layer: str, expert: str, linear: str) -> torch.Tensor:
    """Return the part of a parameter of all experts in which transformers holds one expert's
    linear.
    """
    if layer.startswith("backbone."):
        of_all = model.get_submodule(layer.replace("backbone.", "model.")).mixer.experts
        ungated: torch.Tensor = of_all.get_parameter(linear).data[int(expert)]
        return ungated
    experts = model.get_submodule(f"{layer}.mlp.experts")
    if linear in ("down_proj", "w2"):
        matrix: torch.Tensor = experts.down_proj.data[int(expert)]
        return matrix
    gate, up = experts.gate_up_proj.data[int(expert)].chunk(2)
    return gate if linear in ("gate_proj", "w1") else up


_LAYER_INPUTS = ("per_layer_input_gate", "per_layer_projection", "per_layer_model_projection")


def round_linears(
    model: torch.nn.Module, ranks: int = 1, block: tuple[int, int] | None = None
) -> None:
    """Make the layers' linears and experts, also under PEFT's, compute as FP8 linears do.

    ranks: processes that share the model, each of which rounds its own part.
    block: rows and columns of a block with one scale; None: each rank's rows have scales.
    """
    for name, linear in model.named_modules():
        if type(linear) is GptOssExperts:
            linear.__class__, linear.down_parts = RoundedClampedExperts, ranks
            for weight, parts in ((linear.gate_up_proj, 1), (linear.down_proj, ranks)):
                weight.data = _stored(weight.data.mT, parts, block).mT.contiguous()
        elif type(linear) is NemotronHExperts:
            linear.__class__, linear.down_parts = RoundedUngatedExperts, ranks
            linear.up_proj.data = _stored(linear.up_proj.data, 1, block)
            linear.down_proj.data = _stored(linear.down_proj.data, ranks, block)
        elif type(linear).__name__.endswith("Experts"):
            linear.__class__, linear.down_parts = RoundedExperts, ranks
            gate_and_up = linear.gate_up_proj.data.chunk(2, 1)  # two linears, with their own blocks
            linear.gate_up_proj.data = torch.cat([_stored(w, 1, block) for w in gate_and_up], 1)
            linear.down_proj.data = _stored(linear.down_proj.data, ranks, block)
        name = name.removesuffix(".base_layer")
        if name.endswith("kv_b_proj"):  # its parts are multiplied apart, in floats
            if block is not None:  # a checkpoint has it in FP8
                linear.weight.data = rounded_in_blocks(linear.weight.data, block)
        elif (
            name.endswith(("_proj", "_qkv", "_z", "_qkvz", "_linear", "_mqa", *_LAYER_INPUTS))
            and type(linear) is torch.nn.Linear
        ):
            parts = ranks if name.endswith(_BY_INPUT) else 1
            linear.__class__, linear.parts = RoundedLinear, parts
            linear.weight.data = _stored(linear.weight.data, parts, block)


def _stored(weight: torch.Tensor, parts: int, block: tuple[int, int] | None) -> torch.Tensor:
    """Round a weight, or each expert's, to FP8, as `parts` processes with a part each would."""
    if block is None:
        return rounded(weight, parts)
    in_blocks = rounded_in_blocks(weight, block)
    width = gcd(block[1], weight.shape[-1] // parts) if parts > 1 else block[1]
    return rounded(in_blocks, parts) if width % BLOCK_WIDTHS else in_blocks


def rounded_in_blocks(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Round a weight [..., rows, columns] to FP8 with scales of blocks, and return its floats.

    Each of several matrices has its own blocks.
    """
    scales = block_scales(weight, block)
    wide = Fp8Rows(torch.ones_like(weight), scales, block).floats()
    return (weight / wide).to(DTYPE).float() * wide


def block_scales(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return a scale for each block of a matrix, or of each of several matrices.

    The scale is the block's largest number over FP8's largest.
    """
    if weight.dim() > 2:
        return torch.stack([block_scales(matrix, block) for matrix in weight])
    high, wide = block
    rows = [part.split(wide, 1) for part in weight.split(high)]
    return torch.stack([torch.stack([b.abs().amax() / LARGEST for b in row]) for row in rows])


def rounded(rows: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """Round the rows of a weight or an input to FP8, and return the floats of the FP8 numbers.

    parts: parts of the columns, each with scales of its own.
    """
    split = rows.unflatten(-1, (parts, -1))
    quantized = quantize_rows(split.flatten(0, -2))
    return (quantized.rows.float() * quantized.scales[:, None]).view_as(rows)
