"""Decoder of all model families: Llama and its relatives, which differ only in ModelConfig.

Contains LlamaModel, its layers and their attention. `linears` has the linears with LoRA, `mlp` and
`experts` the MLPs, `norms` the norms.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from lorikeet_engine.adapter_format import (
    FAMILIES,
    BaseShape,
    Linear,
    QkNormKind,
    Quantization,
)
from lorikeet_engine.adapter_format.families import (
    EMBEDDING_ROWS,
    EMBEDDINGS,
    HEAD,
    HEAD_ROWS,
    LayerKind,
    Width,
)
from lorikeet_engine.kernels import fp8, w4a16
from lorikeet_engine.kernels.attention import check_latents
from lorikeet_engine.kernels.attention.protocol import AttentionBackend, kv_head_dim
from lorikeet_engine.kernels.fp8_kv import FP8_KV
from lorikeet_engine.kernels.lora.linear import (
    Inputs,
    add_lora,
    begin_step,
    embed_adapted,
    linear,
    replace_logits,
)
from lorikeet_engine.kernels.lora.types import LoraGroup, LoraStep, LoraWeights, Segments
from lorikeet_engine.kernels.pointwise import rotary_and_store_kv, sigmoid_gate
from lorikeet_engine.models.batch import Batch
from lorikeet_engine.models.checkpoint import Checkpoint, check_room
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.cut import Cut
from lorikeet_engine.models.delta_net import DeltaNet
from lorikeet_engine.models.experts import ExpertsBesideMlp, RoutedMlp
from lorikeet_engine.models.kv_groups import layer_of_piece
from lorikeet_engine.models.kv_scales import read_kv_scales
from lorikeet_engine.models.latent_attention import LatentAttention
from lorikeet_engine.models.layer_inputs import LayerInputs, OwnInput
from lorikeet_engine.models.linears import LoraLinear, by_heads, columns, lora_linears
from lorikeet_engine.models.mamba import Mamba
from lorikeet_engine.models.mlp import Mlp
from lorikeet_engine.models.norms import (
    Product,
    RmsNorm,
    read_layer_scalar,
    read_norm_weight,
    read_qk_norm,
    shared_qk_norm,
    summed_product,
)
from lorikeet_engine.models.rope_config import RopeConfig
from lorikeet_engine.models.rotary import RotaryEmbeddings, Turns
from lorikeet_engine.models.score_head import ScoreHead
from lorikeet_engine.models.states import RecurrentStates
from lorikeet_engine.models.stored_tensors import check_tied_head
from lorikeet_engine.parallel.rank_group import RankGroup
from lorikeet_engine.parallel.shard import WHOLE, Shard

_NEXT_TOKENS = "mtp."
"""Prefix of the names of tensors for multi-token prediction, which the engine does not use."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Operands that all layers of a decoder share in one forward pass: the batch, LoRA work,
    attention back end, rotary angles, KV cache and states.
    """

    batch: Batch
    lora: LoraStep | None
    attention: AttentionBackend
    turns: Mapping[RopeConfig | None, Turns]
    kv_slots: tuple[torch.Tensor, ...]
    layers_kv: tuple[torch.Tensor, ...]
    states: RecurrentStates | None
    layer_inputs: torch.Tensor | None


class LlamaModel:
    """Decoder from token ids to logits, over paged KV and with an adapter for each sequence.

    With tensor parallelism, every process must get the same batches, and only the leader gets
    logits.

    config: config of the whole model.
    shape: shape of the part of the layers that this process computes.
    generates: whether the model has lm_head, or embeddings that take its place.
    score: the model's own classification or reward head; None without one.
    """

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, ranks: RankGroup | None = None
    ) -> None:
        """Read the parts of all tensors that this process keeps.

        Raises ModelError if a tensor is missing or malformed, and SettingsError if the model cannot
        be divided among that many processes.

        checkpoint: tensors; its `shard` is the part that this process keeps.
        ranks: processes that share the layers; None: this process alone.
        """
        self.config = config
        self.shape = checkpoint.shard.part_of(config.shape)
        self.device = checkpoint.device
        self.dtype = checkpoint.dtype
        self._ranks = ranks
        shape = config.shape
        if ranks is not None:
            ranks.sums.connect_rows(shape.hidden)
        size = config.vocab_size, shape.hidden
        self._embeddings = checkpoint.read(["model.embed_tokens.weight"], [size[0]], size[1])
        self._layers = [_Layer(config, checkpoint, i, ranks) for i in range(shape.layers)]
        scalar = read_layer_scalar(config, checkpoint, shape.layers - 1)
        self._norm = RmsNorm(config, checkpoint, "model.norm", scalar)
        cut = Cut(size, checkpoint.shard.vocabulary(config.vocab_size), range(shape.hidden))
        self.generates = checkpoint.has_head
        # A model without lm_head only pools. Its logits, which nobody reads, are the embeddings'.
        self._head = (
            cut.of(self._embeddings)
            if config.tied_embeddings or not self.generates
            else checkpoint.read_parts(["lm_head.weight"], [cut])
        )
        outer = (HEAD, HEAD_ROWS, EMBEDDINGS, EMBEDDING_ROWS)
        head, rows, *embeddings = (_outer_group(each, shape, checkpoint.shard) for each in outer)
        self._head_group, self._head_rows, self._embeddings_groups = head, rows, embeddings
        # rounded to the dtype, as transformers does for Gemma
        self._multiplier = torch.tensor(config.embedding_multiplier, dtype=self.dtype).item()
        self.score = ScoreHead.read(checkpoint, config.labels, size[1])
        self._rotary = RotaryEmbeddings(config.ropes, config.max_context, self.device)
        self._layer_inputs = LayerInputs(config, checkpoint) if shape.layer_input else None

    def forward(
        self,
        batch: Batch,
        kv: torch.Tensor,
        lora: LoraWeights | None,
        attention: AttentionBackend,
        states: RecurrentStates | None = None,
    ) -> torch.Tensor:
        """Compute the last hidden states of a batch, and write its keys and values to the KV cache.

        kv [layers of a page, 2, pages, page_size, kv_heads, head_dim]: KV cache, in which each
            layer's place is in config.kv_groups
        lora: weights of all adapters; may be None if batch.segments is None
        attention: back end whose `plan` was called with this batch
        states: states of delta nets or Mamba 2, which are updated; None if no layer has them
        → [tokens, hidden] in the model's dtype

        On CUDA, this code runs when graphs are captured at start, and in steps that are too large
        for a graph; all other steps replay graphs (execution/cuda_graphs.py).
        """
        turns = self._rotary.at(batch.positions)
        slots = batch.kv_slots.unbind(0)
        lora_step = _lora_step(lora, batch)
        x, layer_inputs = self._embed(batch, lora_step), None
        if self._layer_inputs is not None:
            layer_inputs = self._layer_inputs(batch.token_ids, x, lora_step)
        layers_kv = kv.unbind(0)
        step = _Step(batch, lora_step, attention, turns, slots, layers_kv, states, layer_inputs)
        delta = Product(torch.zeros_like(x))
        for layer in self._layers:
            delta = layer(x, delta, step)
        return self._norm.add_and_norm(x, delta)

    def linears(self) -> list[LoraLinear]:
        """Return the linears with LoRA of this process's part of the model, in no certain order.

        lm_head, linears of experts and kv_b_proj of latent attention are none of them.
        """
        inputs = [] if self._layer_inputs is None else [self._layer_inputs]
        found = (each for part in (*self._layers, *inputs) for each in lora_linears(part))
        return list({id(each): each for each in found}.values())

    def _embed(self, batch: Batch, lora: LoraStep | None) -> torch.Tensor:
        x = F.embedding(batch.token_ids, self._embeddings)
        if lora is not None:
            layer = self.config.shape.outer_layer
            embed_adapted(x, batch.token_ids, lora, layer, *self._embeddings_groups)
        return x if self._multiplier == 1.0 else x.mul_(self._multiplier)

    def logits(
        self, hidden: torch.Tensor, lora: LoraWeights | None, segments: Segments | None
    ) -> torch.Tensor:
        """Compute logits of hidden states.

        hidden [rows, hidden]: rows of `forward`'s result
        lora: weights of all adapters; may be None if segments is None
        segments: runs of these rows whose adapters change lm_head; None: no adapter does
        → [rows, vocab] in hidden's dtype; [0, vocab] in ranks other than the leader
        """
        logits, layer = linear(hidden, self._head), self.config.shape.outer_layer
        if segments is not None and segments.max_rank > 0:
            assert lora is not None, "segments without adapter weights"
            add_lora(logits, hidden, lora, segments, layer, self._head_group)
        if self._ranks is not None:
            logits = self._ranks.gather_logits(logits, self.config.vocab_size)
        if segments is not None and len(logits):
            assert lora is not None, "segments without adapter weights"
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
    ranks: RankGroup | None = None,
    *,
    packed: bool = False,
) -> LlamaModel:
    """Load a Hugging Face checkpoint folder (config.json and safetensors) onto the device.

    Raises ModelError, whose `field` is the config key, file or tensor at fault. Raises
    SettingsError if the device has too little memory for the weights or no products for them, or if
    the model cannot be divided among as many processes as there are ranks.

    max_context: limit on the tokens of a sequence; None: as many as the model has positions.
    rounding: NF4 or FP8, to which the layers' linears are rounded one after the other; None: as
        stored.
    ranks: processes that share the layers; this process loads its part. None: it loads all layers.
    packed: whether linears of 4 bits stay packed; False: they become floats.
    """
    shard = WHOLE if ranks is None else ranks.shard
    config, nbytes = rehearse_load(folder, dtype, max_context, rounding, shard, packed=packed)
    if (latents := config.shape.latents) is not None and device.type == "cuda":
        check_latents(latents.kv_rank, latents.rotary)
    stored = config.quantized_linears
    is_fp8 = Quantization.FP8 in (rounding, stored and stored.format)
    smaller = "" if is_fp8 or packed else Quantization.FP8.value
    if is_fp8:
        fp8.check_device(device, dtype)
    elif packed:
        w4a16.check_device(device)
    elif stored is not None:
        smaller = "packed"
    check_room(folder, nbytes, device, smaller)
    with Checkpoint(folder, device, dtype, stored, rounding, shard, packed=packed) as checkpoint:
        return _read(config, checkpoint, ranks)


def rehearse_load(
    folder: Path,
    dtype: torch.dtype,
    max_context: int | None = None,
    rounding: Quantization | None = None,
    shard: Shard = WHOLE,
    *,
    packed: bool = False,
) -> tuple[ModelConfig, int]:
    """Check that a checkpoint can be loaded, and return its config and its weights' bytes.

    Reads only the files' headers. Takes no memory and little time, unless a stored lm_head must be
    compared with the embeddings to which it is tied. Raises ModelError if the checkpoint cannot be
    served, and SettingsError if the model cannot be divided among the shard's processes.

    max_context: limit on the tokens of a sequence; None: as many as the model has positions.
    rounding: NF4 or FP8, to which the layers' linears would be rounded; None: as stored.
    packed: whether linears of 4 bits would stay packed.
    shard: part of the model whose bytes are returned; the first process's part is the largest.
    """
    config, meta = ModelConfig.from_folder(folder, max_context), torch.device("meta")
    stored = config.quantized_linears
    with Checkpoint(folder, meta, dtype, stored, rounding, shard, packed=packed) as checkpoint:
        _read(config, checkpoint)
    if config.tied_embeddings:
        check_tied_head(folder)
    return config, checkpoint.nbytes


def _read(
    config: ModelConfig, checkpoint: Checkpoint, ranks: RankGroup | None = None
) -> LlamaModel:
    model = LlamaModel(config, checkpoint, ranks)
    shape, tied = config.shape, config.tied_embeddings
    hybrid = FAMILIES[shape.family].is_hybrid
    # DeepSeek's are in layers behind the last one
    beyond = f"model.layers.{shape.layers}."
    next_tokens = _NEXT_TOKENS if shape.latents is None else beyond
    # published checkpoints have them in layers that attend to other layers' keys and values
    readers = [n for n in range(shape.layers) if shape.kv_owner(n) != n]
    unused = [f"model.layers.{n}.self_attn.{part}_" for n in readers for part in "kv"]
    checkpoint.check_all_read((*["lm_head."] * tied, *[next_tokens] * hybrid, *unused))
    return model


def _outer_group(linear: Linear, shape: BaseShape, shard: Shard) -> LoraGroup:
    index = shape.index(linear.name)
    kept = shard.ranges(shape)[index]
    return LoraGroup((index,), len(kept.inputs), (kept.d_out,))


def _lora_step(lora: LoraWeights | None, batch: Batch) -> LoraStep | None:
    if batch.segments is None:
        return None
    assert lora is not None, "segments without adapter weights"
    return begin_step(lora, batch.segments, len(batch.token_ids))


class _Layer:
    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, layer: int, ranks: RankGroup | None
    ) -> None:
        def path(norm: str | None) -> str | None:
            return norm and f"model.layers.{layer}.{norm}"

        norms, kind = config.norms, config.shape.kind(layer)
        scalar = read_layer_scalar(config, checkpoint, layer - 1)
        self.mixer: _Attention | _Latent | _Recurrent | None = None
        if kind.mixes:
            self.mixer_norm = RmsNorm(config, checkpoint, path(norms.attention_input), scalar)
        if kind.has_state:
            self.mixer = _Recurrent(config, checkpoint, layer, ranks)
        elif config.shape.latents is not None:
            self.mixer = _Latent(config, checkpoint, layer, ranks)
        elif kind.mixes:
            output_norm = path(norms.attention_output)
            self.mixer = _Attention(config, checkpoint, layer, ranks, output_norm)
        self.mlp: Mlp | RoutedMlp | None = None
        self.experts: ExpertsBesideMlp | None = None
        self.own_input: OwnInput | None = None
        if kind.mixes and FAMILIES[config.shape.family].alone:
            return
        self.mlp_norm = RmsNorm(config, checkpoint, path(norms.mlp_input))
        output_norm = path(norms.mlp_output)
        if config.experts_beside:
            of_mlp = path("post_feedforward_layernorm_1")
            self.mlp = Mlp(config, checkpoint, layer, ranks, of_mlp, shared=True)
            self.experts = ExpertsBesideMlp(config, checkpoint, layer, ranks, output_norm)
        elif config.experts_per_token and not kind.is_dense:
            self.mlp = RoutedMlp(config, checkpoint, layer, ranks, output_norm)
        else:
            shared = config.shape.shared_intermediate > 0 and not kind.is_dense
            self.mlp = Mlp(config, checkpoint, layer, ranks, output_norm, shared=shared)
        if config.shape.layer_input:
            self.own_input = OwnInput(config, checkpoint, layer)

    def __call__(self, x: torch.Tensor, delta: Product, step: _Step) -> Product:
        """Compute one decoder layer.

        Adds delta, and the output of all parts but the last, to the hidden states x in place.
        Returns the last part's output, which the next layer adds. The parts are attention, a delta
        net or Mamba 2, and an MLP; in some families, a layer has one of them alone.

        x [tokens, hidden]: hidden states.
        delta: product to add to x first, such as the previous layer's MLP output.
        """
        if self.mixer is not None:
            rounded = fp8.rounds(self.mixer.inputs.weight, len(x))
            delta = self.mixer(self.mixer_norm.inputs(x, delta, rounded=rounded), step)
        if self.mlp is not None:
            inputs = self.mlp_norm.inputs(x, delta, rounded=self.mlp.rounds(len(x)))
            delta = self.mlp(inputs, step.lora)
        if self.experts is not None:
            delta = self.experts(x, delta, step.lora)
        if self.own_input is not None:
            assert step.layer_inputs is not None, "a step without inputs of layers"
            delta = self.own_input(x, delta, step.layer_inputs, step.lora)
        return delta


class _Recurrent:
    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, layer: int, ranks: RankGroup | None
    ) -> None:
        kinds = config.shape.kinds
        net = Mamba if kinds[layer] is LayerKind.MAMBA else DeltaNet
        self._net = net(config, checkpoint, layer, ranks)
        self._index = sum(kind.has_state for kind in kinds[:layer])
        self.inputs = self._net.inputs

    def __call__(self, x: Inputs, step: _Step) -> Product:
        states, rows = step.states, step.batch.states
        assert states is not None, "a step without states"
        assert rows is not None, "a batch without places of states"
        return self._net(x, states.layer(self._index), rows, step.lora)


class _Latent:
    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, layer: int, ranks: RankGroup | None
    ) -> None:
        self._attention = LatentAttention(config, checkpoint, layer, ranks)
        self.inputs = self._attention.inputs

    def __call__(self, x: Inputs, step: _Step) -> Product:
        turns, kv = step.turns[self._attention.rope], (step.layers_kv, step.kv_slots)
        return self._attention(x, turns, *kv, step.batch, step.attention, step.lora)


class _Attention:
    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        layer: int,
        ranks: RankGroup | None,
        output_norm: str | None,
    ) -> None:
        shape, own = config.shape, checkpoint.shard.part_of(config.shape)
        self.heads, heads = own.heads, own.heads_of(layer)
        self.kv_heads, self.head_dim = heads.kv_heads, heads.head_dim
        self.rope, self.window = config.ropes[layer], config.windows[layer]
        place, self.owns_kv = config.kv_groups.places[layer], shape.kind(layer).has_kv
        assert place is not None
        self.place = place
        self.kv_width = kv_head_dim(self.head_dim, checkpoint.device.type)
        self.shares_pieces = shape.full is not None
        qkv, o = ("full_qkv", "full_o") if shape.is_full(layer) else ("qkv", "o")
        self.inputs = LoraLinear(checkpoint, shape, layer, qkv, bias=config.qkv_bias)
        outputs = [w for n in self.inputs.group.linears for w in shape.linears[n].outputs]
        gated = outputs[0] is Width.GATED_QUERIES
        self.keys_are_values = len(outputs) == 2  # queries and keys; of a reader, queries alone
        self.gates = self.heads * self.head_dim if gated else 0
        self.o = LoraLinear(checkpoint, shape, layer, o, bias=config.o_bias)
        self._ranks = ranks
        q = shape.linears[self.inputs.group.linears[0]]
        path, owner = (q.path(each).rpartition(".")[0] for each in (layer, shape.kv_owner(layer)))
        self.kv_scales = read_kv_scales(checkpoint, owner)
        self.qk_norm = read_qk_norm(config, checkpoint, layer)
        self.norm_ranks = ranks if config.qk_norm is QkNormKind.WHOLE else None
        self.output_weight = read_norm_weight(config, checkpoint, output_norm)
        self.sinks: torch.Tensor | None = None
        if config.sinks:
            first = checkpoint.shard.index * own.heads
            cut = Cut((shape.heads,), range(first, first + own.heads))
            self.sinks = checkpoint.read_float32(f"{path}.sinks", cut)

    def __call__(self, x: Inputs, step: _Step) -> Product:
        layer_kv, group = step.layers_kv[self.place.layer], self.place.group
        if self.shares_pieces:
            layer_kv = layer_of_piece(layer_kv, self.kv_heads, self.kv_width, self.place.part)
        y, lora = self.inputs(x, step.lora)
        if self.gates:
            gates, (y, lora) = columns(y, lora, self.gates, y.shape[1] - self.gates)
        qkv = y.view(len(y), -1, self.head_dim)
        norm, turns = self.qk_norm, step.turns[self.rope]
        if norm is not None and self.norm_ranks is not None:
            norm = shared_qk_norm(norm, self.norm_ranks, qkv, self.kv_heads, lora)
        slots = step.kv_slots[group]
        scales = self.kv_scales if layer_kv.dtype == FP8_KV else None
        own_kv = layer_kv if self.owns_kv else None
        rotary_and_store_kv(
            qkv, turns.cos, turns.sin, own_kv, slots, lora, norm, scales,
            interleaved=self.rope is not None and self.rope.interleaved,
            spans_head=self.rope is not None and self.rope.spans_head,
            keys_are_values=self.keys_are_values,
            query_gain=turns.query_gain,
        )  # fmt: skip
        q = qkv[:, : self.heads]  # [tokens, heads, head_dim], and so mixed
        attend = step.attention.attend
        mixed = attend(q, layer_kv, step.batch, scales, self.window, group, self.sinks)
        if self.gates:
            mixed = sigmoid_gate(mixed, *by_heads(*gates, self.head_dim))
        o = self.o(mixed.flatten(1), step.lora)
        return summed_product(*o, self.output_weight, self._ranks)
