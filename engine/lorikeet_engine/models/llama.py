"""Decoder of all model families: Llama and its relatives, which differ only in ModelConfig.

Contains LlamaModel, its layers and their attention. `linears` has the linears with LoRA, `mlp` and
`experts` the MLPs, `norms` the norms.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from lorikeet_engine.errors import ModelError, SettingsError
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
from lorikeet_engine.kernels.lora.types import (
    LoraDelta,
    LoraGroup,
    LoraStep,
    LoraWeights,
    Segments,
)
from lorikeet_engine.kernels.pointwise import rms_norm, rotary_and_store_kv, sigmoid_gate
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
from lorikeet_engine.models.rotary import RopeConfig, RotaryEmbeddings, Turns
from lorikeet_engine.models.score_head import ScoreHead
from lorikeet_engine.models.states import RecurrentStates
from lorikeet_engine.models.stored_tensors import check_tied_head, find_tensors
from lorikeet_engine.parallel.rank_group import RankGroup
from lorikeet_engine.parallel.shard import WHOLE, Shard

_MTP = "mtp."
"""Prefix of the names of tensors for multi-token prediction, in Qwen's and Nemotron's models."""


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
    mtp: head that predicts the token after the next one; None without one.
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
        self._outer_layer = shape.outer_layer
        scalar = read_layer_scalar(config, checkpoint, shape.layers - 1)
        self._norm = RmsNorm(config, checkpoint, "model.norm", scalar)
        cut = Cut(size, checkpoint.shard.vocabulary(config.vocab_size), range(shape.hidden))
        self.generates = checkpoint.has_head
        # A model without lm_head only pools. Its logits, which nobody reads, are the embeddings'.
        self._tied = cut if config.tied_embeddings or not self.generates else None
        self._head = (
            checkpoint.read_parts(["lm_head.weight"], [cut])
            if self._tied is None
            else cut.of(self._embeddings)
        )
        outer = (HEAD, HEAD_ROWS, EMBEDDINGS, EMBEDDING_ROWS)
        head, rows, *embeddings = (_outer_group(each, shape, checkpoint.shard) for each in outer)
        self._head_group, self._head_rows, self._embeddings_groups = head, rows, embeddings
        # rounded to the dtype, as transformers does for Gemma
        self._multiplier = torch.tensor(config.embedding_multiplier, dtype=self.dtype).item()
        self.score = ScoreHead.read(checkpoint, config.labels, size[1])
        self._rotary = RotaryEmbeddings(config.ropes, config.max_context, self.device)
        self._layer_inputs = LayerInputs(config, checkpoint) if shape.layer_input else None
        self.mtp = None if config.mtp is None else MtpHead(config, checkpoint)

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
        lora_step = _lora_step(lora, batch)
        x, layer_inputs = self._embed(batch, lora_step), None
        if self._layer_inputs is not None:
            layer_inputs = self._layer_inputs(batch.token_ids, x, lora_step)
        step = self._step(batch, kv, lora_step, attention, states, layer_inputs)
        delta = Product(torch.zeros_like(x))
        for layer in self._layers:
            delta = layer(x, delta, step)
        return self._norm.add_and_norm(x, delta)

    def predict(
        self,
        hidden: torch.Tensor,
        batch: Batch,
        kv: torch.Tensor,
        lora: LoraWeights | None,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Compute the MTP head's logits of the token after the next one, and write the head's keys
        and values.

        hidden [tokens, hidden]: result of `forward` for these tokens
        batch: batch of `forward`, but with the next token in place of each token
        kv: KV cache
        lora: weights of all adapters; may be None if batch.segments is None
        attention: back end whose `plan` was called with this batch
        → logits [rows, vocab] for each of batch.logit_rows; without rows, the head's attention and
          MLP are left out
        """
        assert self.mtp is not None, "a model without MTP head"
        step = self._step(batch, kv, None, attention)
        embedded = self._embed(batch, _lora_step(lora, batch))
        if not len(batch.logit_rows):
            self.mtp.store(embedded, hidden, step)
            return hidden.new_empty(0, self.config.logits_width)
        predicting = self.mtp(embedded, hidden, step)[batch.logit_rows]
        return self.logits(predicting, lora, batch.head_segments)

    def add_tokens(self, count: int) -> None:
        """Take more tokens, which adapters have of their own, behind the vocabulary.

        Their embeddings are 0 without an adapter that replaces them, and their logits −inf. Called
        once, before the first step.

        Raises SettingsError if the model has embeddings for each layer, which adapters cannot add.
        """
        if self._layer_inputs is not None:
            raise SettingsError(
                "LORIKEET_MAX_ADDED_TOKENS: the base model has embeddings for each layer, of its "
                "own tokens alone: set it to 0"
            )
        self._embeddings = F.pad(self._embeddings, (0, 0, 0, count))
        if self._tied is not None:  # else the embeddings without these rows would stay in memory
            self._head = self._tied.of(self._embeddings[: self.config.vocab_size])
        self.config = replace(self.config, added_tokens=count)

    def linears(self) -> list[LoraLinear]:
        """Return the linears with LoRA of this process's part of the model, in no certain order.

        lm_head, linears of experts and kv_b_proj of latent attention are none of them.
        """
        inputs = [] if self._layer_inputs is None else [self._layer_inputs]
        found = (each for part in (*self._layers, *inputs) for each in lora_linears(part))
        return list({id(each): each for each in found}.values())

    def _step(
        self,
        batch: Batch,
        kv: torch.Tensor,
        lora: LoraStep | None,
        attention: AttentionBackend,
        states: RecurrentStates | None = None,
        layer_inputs: torch.Tensor | None = None,
    ) -> _Step:
        turns, slots = self._rotary.at(batch.positions), batch.kv_slots.unbind(0)
        return _Step(batch, lora, attention, turns, slots, kv.unbind(0), states, layer_inputs)

    def _embed(self, batch: Batch, lora: LoraStep | None) -> torch.Tensor:
        x = F.embedding(batch.token_ids, self._embeddings)
        if lora is not None:
            embed_adapted(x, batch.token_ids, lora, self._outer_layer, *self._embeddings_groups)
        return x if self._multiplier == 1.0 else x.mul_(self._multiplier)

    def logits(
        self, hidden: torch.Tensor, lora: LoraWeights | None, segments: Segments | None
    ) -> torch.Tensor:
        """Compute logits of hidden states.

        hidden [rows, hidden]: rows of `forward`'s result
        lora: weights of all adapters; may be None if segments is None
        segments: runs of these rows whose adapters change lm_head; None: no adapter does
        → [rows, vocab] in hidden's dtype; [0, vocab] in ranks other than the leader; vocab is the
          config's logits_width
        """
        logits = linear(hidden, self._head)
        if segments is not None and segments.max_rank > 0:
            assert lora is not None, "segments without adapter weights"
            add_lora(logits, hidden, lora, segments, self._outer_layer, self._head_group)
        if self._ranks is not None:
            logits = self._ranks.gather_logits(logits, self.config.vocab_size)
        added, cap = self.config.added_tokens, self.config.logits_soft_cap
        if added:  # tanh of −inf would be finite
            logits = F.pad(logits, (0, added), value=-math.inf if cap is None else math.nan)
        if segments is not None and len(logits):
            assert lora is not None, "segments without adapter weights"
            replace_logits(logits, hidden, lora, segments, self._outer_layer, self._head_rows)
        scaling = self.config.logits_scaling
        if scaling != 1.0:
            logits.div_(scaling)
        if cap is None:
            return logits
        logits.div_(cap).tanh_().mul_(cap)
        if added:
            logits[:, -added:].nan_to_num_(nan=-math.inf)
        return logits


def load_model(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    max_context: int | None = None,
    rounding: Quantization | None = None,
    ranks: RankGroup | None = None,
    *,
    packed: bool = False,
    mtp: bool = False,
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
    mtp: whether to load the head for multi-token prediction.
    """
    shard = WHOLE if ranks is None else ranks.shard
    parts = {"packed": packed, "mtp": mtp}
    config, nbytes = rehearse_load(folder, dtype, max_context, rounding, shard, **parts)
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
    mtp: bool = False,
) -> tuple[ModelConfig, int]:
    """Check that a checkpoint can be loaded, and return its config and its weights' bytes.

    Reads only the files' headers. Takes no memory and little time, unless a stored lm_head must be
    compared with the embeddings to which it is tied. Raises ModelError if the checkpoint cannot be
    served, and SettingsError if the model cannot be divided among the shard's processes.

    max_context: limit on the tokens of a sequence; None: as many as the model has positions.
    rounding: NF4 or FP8, to which the layers' linears would be rounded; None: as stored.
    packed: whether linears of 4 bits would stay packed.
    mtp: whether the head for multi-token prediction would be loaded.
    shard: part of the model whose bytes are returned; the first process's part is the largest.
    """
    config, meta = ModelConfig.from_folder(folder, max_context), torch.device("meta")
    if mtp:
        config = _with_mtp(folder, config, rounding)
    stored = config.quantized_linears
    with Checkpoint(folder, meta, dtype, stored, rounding, shard, packed=packed) as checkpoint:
        _read(config, checkpoint)
    if config.tied_embeddings:
        check_tied_head(folder)
    return config, checkpoint.nbytes


def _read(
    config: ModelConfig, checkpoint: Checkpoint, ranks: RankGroup | None = None
) -> LlamaModel:
    shape, tied = config.shape, config.tied_embeddings
    hybrid, beyond = FAMILIES[shape.family].is_hybrid, f"model.layers.{shape.layers}."
    if config.mtp is not None:
        checkpoint.rename(f"{_MTP}layers.0.", beyond)
    model = LlamaModel(config, checkpoint, ranks)
    # DeepSeek's parts for multi-token prediction are in layers after the last one
    next_tokens = _MTP if shape.latents is None else beyond
    # published checkpoints have them in layers that attend to other layers' keys and values
    readers = [n for n in range(shape.layers) if shape.kv_owner(n) != n]
    unused = [f"model.layers.{n}.self_attn.{part}_" for n in readers for part in "kv"]
    checkpoint.check_all_read((*["lm_head."] * tied, *[next_tokens] * hybrid, *unused))
    return model


def _with_mtp(folder: Path, config: ModelConfig, rounding: Quantization | None) -> ModelConfig:
    """Return the config with the MTP head. Raises ModelError if there is none that can be served.

    rounding: format to which linears would be rounded; None: none.
    """

    def refusal(reason: str) -> ModelError:
        return ModelError(f"speculation=mtp: {reason}: want lookup or off", field="speculation")

    family, stored = FAMILIES[config.shape.family], find_tensors(folder)
    if not family.mtp:
        raise refusal(f"{family.name} has no MTP head that can be served")
    if config.quantized_linears is not None or rounding is not None:
        raise refusal("the MTP head is served beside linears of floats alone")
    if f"{_MTP}fc.weight" not in stored:
        raise refusal(f"{folder} has no MTP head, tensors {_MTP}*")
    others = f"{_MTP}embed_tokens.", f"{_MTP}lm_head.", f"{_MTP}layers.1."
    if found := next((name for name in stored if name.startswith(others)), None):
        raise refusal(f"{folder} has {found}, which no MTP head that can be served has")
    return config.with_mtp()


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


class MtpHead:
    """Head for multi-token prediction (MTP) of Qwen's models: predicts the token after the next.

    From the last hidden state h[t] of a token and the embedding e[t + 1] of the next one, it
    computes

        m[t] = norm(layer(fc·[norm(e[t + 1]), norm(h[t])]))

    from which the model's own lm_head predicts token t + 2 (DeepSeek-V3, arXiv 2412.19437, section
    2.2, with both parts the other way round). The layer is one with attention, like the model's
    own; it has its own place in KV pages, and no adapter changes it.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        """Read the head's tensors, of which those of the layer are named as one more layer's.

        Raises ModelError if a tensor is missing or malformed.
        """
        hidden = config.shape.hidden
        self._fc = checkpoint.read(["mtp.fc.weight"], [hidden], 2 * hidden)
        self._of_embedding, self._of_hidden = (
            checkpoint.read_plus_one(f"mtp.pre_fc_norm_{part}.weight", Cut.whole(hidden))
            for part in ("embedding", "hidden")
        )
        self._norm = RmsNorm(config, checkpoint, "mtp.norm")
        self._layer = _Layer(config.of_mtp(), checkpoint, config.shape.layers, None)

    def __call__(self, embedded: torch.Tensor, hidden: torch.Tensor, step: _Step) -> torch.Tensor:
        """Compute m [tokens, hidden] of each token, and write the layer's keys and values.

        embedded [tokens, hidden]: embeddings of the next tokens
        hidden [tokens, hidden]: last hidden states
        step: batch, KV cache and attention of the step
        """
        x = self._inputs(embedded, hidden)
        return self._norm.add_and_norm(x, self._layer(x, Product(torch.zeros_like(x)), step))

    def store(self, embedded: torch.Tensor, hidden: torch.Tensor, step: _Step) -> None:
        """Write the layer's keys and values, without attention and MLP. Arguments: as of a call."""
        x, mixer = self._inputs(embedded, hidden), self._layer.mixer
        assert isinstance(mixer, _Attention)
        norm = self._layer.mixer_norm
        mixer.project(norm.inputs(x, Product(torch.zeros_like(x)), rounded=False), step)

    def _inputs(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        parts = (embedded, self._of_embedding), (hidden, self._of_hidden)
        normed = [rms_norm(x, weight, self._norm.eps) for x, weight in parts]
        return linear(torch.cat(normed, -1), self._fc)


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
        q, gates = self.project(x, step)
        layer_kv = self._own_kv(step)
        attend, group = step.attention.attend, self.place.group
        scales = self.kv_scales if layer_kv.dtype == FP8_KV else None
        mixed = attend(q, layer_kv, step.batch, scales, self.window, group, self.sinks)
        if gates is not None:
            mixed = sigmoid_gate(mixed, *by_heads(*gates, self.head_dim))
        o = self.o(mixed.flatten(1), step.lora)
        return summed_product(*o, self.output_weight, self._ranks)

    def _own_kv(self, step: _Step) -> torch.Tensor:
        layer_kv = step.layers_kv[self.place.layer]
        if self.shares_pieces:
            return layer_of_piece(layer_kv, self.kv_heads, self.kv_width, self.place.part)
        return layer_kv

    def project(
        self, x: Inputs, step: _Step
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, LoraDelta | None] | None]:
        """Write the keys and values of hidden states x [tokens, hidden] to the KV cache.

        Returns the queries [tokens, heads, head_dim], and the gates of outputs with the LoRA delta
        to add to them; None without gates.
        """
        layer_kv, gates = self._own_kv(step), None
        y, lora = self.inputs(x, step.lora)
        if self.gates:
            gates, (y, lora) = columns(y, lora, self.gates, y.shape[1] - self.gates)
        qkv = y.view(len(y), -1, self.head_dim)
        norm, turns = self.qk_norm, step.turns[self.rope]
        if norm is not None and self.norm_ranks is not None:
            norm = shared_qk_norm(norm, self.norm_ranks, qkv, self.kv_heads, lora)
        slots = step.kv_slots[self.place.group]
        scales = self.kv_scales if layer_kv.dtype == FP8_KV else None
        own_kv = layer_kv if self.owns_kv else None
        rotary_and_store_kv(
            qkv, turns.cos, turns.sin, own_kv, slots, lora, norm, scales,
            interleaved=self.rope is not None and self.rope.interleaved,
            spans_head=self.rope is not None and self.rope.spans_head,
            keys_are_values=self.keys_are_values,
            query_gain=turns.query_gain,
        )  # fmt: skip
        return qkv[:, : self.heads], gates
