"""The decoder that all families share, Llama and its kin; they differ in ModelConfig alone.

LlamaModel, its layers, and their linears with LoRA; `norms` has the norms.
On CUDA these launch the kernels of kernels/lora/linear.py, kernels/pointwise/fused.py and, in small
steps, kernels/attention/paged_decode.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from lorikeet_engine.adapter_format import BaseShape, Linear, Quantization
from lorikeet_engine.adapter_format.families import EMBEDDING_ROWS, EMBEDDINGS, HEAD, HEAD_ROWS
from lorikeet_engine.kernels import fp8
from lorikeet_engine.kernels.attention.protocol import AttentionBackend
from lorikeet_engine.kernels.fp8_kv import FP8_KV
from lorikeet_engine.kernels.lora.linear import (
    Inputs,
    add_lora,
    begin_step,
    embed_adapted,
    linear,
    linear_with_lora,
    linear_with_lora_before_silu,
    replace_logits,
)
from lorikeet_engine.kernels.lora.types import (
    LoraDelta,
    LoraGroup,
    LoraStep,
    LoraWeights,
    Segments,
    UnexpandedDelta,
)
from lorikeet_engine.kernels.pointwise import (
    rotary_and_store_kv,
    silu_and_mul,
)
from lorikeet_engine.models.batch import Batch
from lorikeet_engine.models.checkpoint import Checkpoint, check_room
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.kv_scales import read_kv_scales
from lorikeet_engine.models.norms import Product, RmsNorm, read_norm_weight, read_qk_norm
from lorikeet_engine.models.rope_config import RopeConfig
from lorikeet_engine.models.rotary import RotaryEmbeddings, Turns


@dataclass(frozen=True, slots=True)
class _Step:
    """What every layer of one forward pass shares."""

    batch: Batch
    lora: LoraStep | None
    attention: AttentionBackend
    turns: Mapping[RopeConfig | None, Turns]


class LlamaModel:
    """Token ids to hidden states to logits, over paged KV and with an adapter per sequence."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        self.config = config
        self.device = checkpoint.device
        self.dtype = checkpoint.dtype
        shape = config.shape
        size = [config.vocab_size], shape.hidden
        self._embeddings = checkpoint.read(["model.embed_tokens.weight"], *size)
        self._layers = [_Layer(config, checkpoint, i) for i in range(shape.layers)]
        self._norm = RmsNorm(config, checkpoint, "model.norm")
        self._head = (
            self._embeddings
            if config.tied_embeddings
            else checkpoint.read(["lm_head.weight"], *size)
        )
        self._head_group = _outer_group(HEAD, shape)
        self._head_rows = _outer_group(HEAD_ROWS, shape)
        self._embeddings_groups = [_outer_group(o, shape) for o in (EMBEDDINGS, EMBEDDING_ROWS)]
        # rounded as transformers rounds Gemma's
        self._multiplier = torch.tensor(config.embedding_multiplier, dtype=self.dtype).item()
        self._rotary = RotaryEmbeddings(config.ropes, config.max_context, self.device)

    def forward(
        self, batch: Batch, kv: torch.Tensor, lora: LoraWeights | None, attention: AttentionBackend
    ) -> torch.Tensor:
        """Last hidden states [tokens, hidden] of a batch, in the model's dtype.

        kv [layers, 2, pages, page_size, kv_heads, head_dim] receives the batch's keys and values.
        lora may be None when batch.segments is.

        On CUDA this Python and the layers' run when graphs are captured at start; a step replays
        the graphs (execution/cuda_graphs.py). Only a step that is too large for them runs it.
        """
        turns = self._rotary.at(batch.positions)
        step = _Step(batch, _lora_step(lora, batch), attention, turns)
        x = self._embed(batch, step.lora)
        delta = Product(torch.zeros_like(x))
        for layer, layer_kv in zip(self._layers, kv.unbind(0), strict=True):
            delta = layer(x, delta, layer_kv, step)
        return self._norm.add_and_norm(x, delta)

    def _embed(self, batch: Batch, lora: LoraStep | None) -> torch.Tensor:
        x = F.embedding(batch.token_ids, self._embeddings)
        if lora is not None:
            layer = self.config.shape.outer_layer
            embed_adapted(x, batch.token_ids, lora, layer, *self._embeddings_groups)
        return x if self._multiplier == 1.0 else x.mul_(self._multiplier)

    def logits(
        self, hidden: torch.Tensor, lora: LoraWeights | None, segments: Segments | None
    ) -> torch.Tensor:
        """Logits [rows, vocab] of hidden [rows, hidden] as forward gives it, in its dtype.

        segments: runs of these rows whose adapters change lm_head, None if no adapter does; lora
        may be None then.
        """
        logits = linear(hidden, self._head)
        if segments is not None:
            assert lora is not None, "segments without adapter weights"
            layer = self.config.shape.outer_layer
            if segments.max_rank > 0:
                add_lora(logits, hidden, lora, segments, layer, self._head_group)
            replace_logits(logits, hidden, lora, segments, layer, self._head_rows)
        scaling, cap = self.config.logits_scaling, self.config.logits_soft_cap
        if scaling != 1.0:
            logits.div_(scaling)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def load_model(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    max_context: int | None = None,
    rounding: Quantization | None = None,
) -> LlamaModel:
    """Load a Hugging Face checkpoint folder (config.json and safetensors) onto the device.

    max_context as in ModelConfig.from_folder. rounding: NF4 or FP8, to which the layers' linears
    are rounded, one after the other; None: as they are. Raises ModelError, whose `field` names the
    config key, file or tensor at fault, and SettingsError when the device has no room for the
    weights, or no products of FP8.
    """
    config, nbytes = rehearse_load(folder, dtype, max_context, rounding)
    stored = config.quantized_linears
    is_fp8 = Quantization.FP8 in (rounding, stored and stored.format)
    if is_fp8:
        fp8.check_device(device, dtype)
    check_room(folder, nbytes, device, is_fp8=is_fp8)
    with Checkpoint(folder, device, dtype, config.quantized_linears, rounding) as checkpoint:
        return _read(config, checkpoint)


def rehearse_load(
    folder: Path,
    dtype: torch.dtype,
    max_context: int | None = None,
    rounding: Quantization | None = None,
) -> tuple[ModelConfig, int]:
    """What load_model would find, by the files' headers: the config, and the weights in bytes.

    Takes no memory and little time. Raises ModelError as load_model does.
    """
    config, meta = ModelConfig.from_folder(folder, max_context), torch.device("meta")
    with Checkpoint(folder, meta, dtype, config.quantized_linears, rounding) as checkpoint:
        _read(config, checkpoint)
        return config, checkpoint.nbytes


def _read(config: ModelConfig, checkpoint: Checkpoint) -> LlamaModel:
    model = LlamaModel(config, checkpoint)
    checkpoint.check_all_read(["lm_head.weight"] if config.tied_embeddings else [])
    return model


def _outer_group(linear: Linear, shape: BaseShape) -> LoraGroup:
    index = shape.index(linear.name)
    d_in, d_out = shape.dims(index)
    return LoraGroup((index,), d_in, (d_out,))


def _lora_step(lora: LoraWeights | None, batch: Batch) -> LoraStep | None:
    if batch.segments is None:
        return None
    assert lora is not None, "segments without adapter weights"
    return begin_step(lora, batch.segments, len(batch.token_ids))


class _Layer:
    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, layer: int) -> None:
        def path(norm: str | None) -> str | None:
            return norm and f"model.layers.{layer}.{norm}"

        norms = config.norms
        self.attention_norm = RmsNorm(config, checkpoint, path(norms.attention_input))
        self.attention = _Attention(config, checkpoint, layer, path(norms.attention_output))
        self.mlp_norm = RmsNorm(config, checkpoint, path(norms.mlp_input))
        self.mlp = _Mlp(config, checkpoint, layer, path(norms.mlp_output))

    def __call__(
        self, x: torch.Tensor, delta: Product, layer_kv: torch.Tensor, step: _Step
    ) -> Product:
        """Add delta, and attention's output, to x in place; return what is yet to be added."""
        qkv, gate_up = self.attention.qkv, self.mlp.gate_up
        delta = self.attention(self.attention_norm.inputs_of(qkv.weight, x, delta), layer_kv, step)
        return self.mlp(self.mlp_norm.inputs_of(gate_up.weight, x, delta), step)


class _Attention:
    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, layer: int, output_norm: str | None
    ) -> None:
        shape = config.shape
        self.heads, self.head_dim = shape.heads, shape.head_dim
        self.rope, self.window = config.ropes[layer], config.windows[layer]
        self.qkv = LoraLinear(checkpoint, shape, layer, "qkv", bias=config.qkv_bias)
        self.o = LoraLinear(checkpoint, shape, layer, "o", bias=config.o_bias)
        self.kv_scales = read_kv_scales(checkpoint, layer)
        self.qk_norm = read_qk_norm(config, checkpoint, layer)
        self.output_weight = read_norm_weight(config, checkpoint, output_norm)

    def __call__(self, x: Inputs, layer_kv: torch.Tensor, step: _Step) -> Product:
        y, lora = self.qkv(x, step.lora)
        qkv = y.view(len(y), -1, self.head_dim)
        turns = step.turns[self.rope]
        slots, scales = step.batch.kv_slots, self.kv_scales if layer_kv.dtype == FP8_KV else None
        rotary_and_store_kv(
            qkv, turns.cos, turns.sin, layer_kv, slots, lora, self.qk_norm, scales,
            interleaved=self.rope is not None and self.rope.interleaved,
        )  # fmt: skip
        q = qkv[:, : self.heads]  # [tokens, heads, head_dim], and so mixed
        mixed = step.attention.attend(q, layer_kv, step.batch, scales, self.window)
        return Product(*self.o(mixed.flatten(1), step.lora), self.output_weight)


class _Mlp:
    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, layer: int, output_norm: str | None
    ) -> None:
        bias = config.mlp_bias
        self.gate_up = LoraLinear(checkpoint, config.shape, layer, "gate_up", bias=bias)
        self.down = LoraLinear(checkpoint, config.shape, layer, "down", bias=bias)
        self.gelu = config.gelu
        self.output_weight = read_norm_weight(config, checkpoint, output_norm)

    def __call__(self, x: Inputs, step: _Step) -> Product:
        gated = silu_and_mul(*self.gate_up.before_silu(x, step.lora), gelu=self.gelu)
        return Product(*self.down(gated, step.lora), self.output_weight)


class LoraLinear:
    """y = x·Wᵀ + b, and + B(t)·A(t)·x for a token t whose sequence has an adapter.

    Linears of one group are fused: their weights stand on top of one another in
    weight [sum(d_outs), d_in], their outputs side by side in y.
    """

    def __init__(
        self, checkpoint: Checkpoint, shape: BaseShape, layer: int, group: str, *, bias: bool
    ) -> None:
        """Read the linears of a group of the shape's; raises ModelError."""
        linears = shape.groups[group]
        assert all(shape.linears[n].experts == 1 for n in linears), "one matrix for all tokens"
        d_in, d_outs = shape.dims(linears[0])[0], tuple(shape.dims(n)[1] for n in linears)
        self.layer = layer
        self.group = LoraGroup(linears, d_in, d_outs)
        paths = [shape.linears[n].path(layer) for n in linears]
        self.weight = checkpoint.read_linear([f"{path}.weight" for path in paths], d_outs, d_in)
        self.bias = checkpoint.read([f"{path}.bias" for path in paths], d_outs) if bias else None

    def __call__(self, x: Inputs, lora: LoraStep | None) -> tuple[torch.Tensor, LoraDelta | None]:
        """Return y [tokens, sum(d_outs)] of x [tokens, d_in], and what is yet to be added to it."""
        return linear_with_lora(x, self.weight, self.bias, lora, self.layer, self.group)

    def before_silu(
        self, x: Inputs, lora: LoraStep | None
    ) -> tuple[torch.Tensor, LoraDelta | UnexpandedDelta | None]:
        """Do what __call__ does, for silu_and_mul alone to read: the delta may be unexpanded."""
        return linear_with_lora_before_silu(x, self.weight, self.bias, lora, self.layer, self.group)
