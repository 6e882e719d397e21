"""Mixture-of-experts MLP of a layer: a router, and experts of which each token uses a few."""

from functools import partial

import torch

from lorikeet_engine.adapter_format import BaseShape, Quantization
from lorikeet_engine.errors import ModelError
from lorikeet_engine.kernels import fp8
from lorikeet_engine.kernels.fp8 import Fp8Rows
from lorikeet_engine.kernels.lora.experts import add_expert_lora, begin_experts
from lorikeet_engine.kernels.lora.linear import Inputs, Weight, rows_of
from lorikeet_engine.kernels.lora.types import LoraDelta, LoraGroup, LoraStep
from lorikeet_engine.kernels.moe import (
    Clamp,
    ClampedBiases,
    ExpertWeight,
    Sigmoids,
    clamped_swiglu,
    combine,
    expert_products,
    experts_of_one,
    route,
)
from lorikeet_engine.kernels.pointwise import (
    act_and_mul,
    add_delta,
    add_rms_norm,
    add_weighed,
    rms_norm,
    squared_relu,
)
from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.cut import Cut
from lorikeet_engine.models.linears import LoraLinear
from lorikeet_engine.models.mlp import Mlp
from lorikeet_engine.models.norms import Product, read_norm_weight, summed_product
from lorikeet_engine.parallel.rank_group import RankGroup


class Experts:
    """Experts of a layer: y[t] = Σ p(t, e) · down(e)·(silu(gate(e)·x[t]) · up(e)·x[t]).

    gpt-oss's experts have biases and a clamped activation (kernels.moe.clamped_swiglu) instead;
    Nemotron's have no gate, and squared ReLU.

    The sum is over the experts e chosen for token t, with their weights p(t, e). Products work on
    rows, one for each pair of a token and one of its experts, sorted by expert (kernels/moe). With
    tensor parallelism, each process keeps a part of every expert's width and computes only its part
    of y; the parts must be added up over ranks.

    gate_up [experts, 2 · width, hidden], in floats, FP8 or MXFP4; width is the shape's
        `intermediate`. Without gate: [experts, width, hidden].
    down [experts, hidden, width], in floats, FP8 or MXFP4.
    hidden: width of hidden states or, if the shape has one, of `latent` vectors.
    biases: None if experts have no biases; with tensor parallelism, only the first process has
        those of down.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, layer: int) -> None:
        """Read a layer's experts from a checkpoint.

        Raises ModelError if a tensor is missing or malformed, or if the checkpoint rounds linears
        to NF4.

        layer: index of the layer.
        """
        if checkpoint.rounding is Quantization.NF4:
            raise ModelError(
                "weight_dtype=nf4: experts are served as floats or in FP8: want auto or fp8",
                field="weight_dtype",
            )
        whole, shape = config.shape, checkpoint.shard.part_of(config.shape)
        self.layer = layer
        self.squared_relu = config.squared_relu
        before = "expert_up" if self.squared_relu else "expert_gate_up"
        self.gate_up_group, self.down_group = (
            _lora_group(shape, group) for group in (before, "expert_down")
        )
        self.per_token, self.normalised = config.experts_per_token, config.normalised_experts
        self.gelu = config.gelu
        self.biases: ClampedBiases | None = None
        self.sigmoids: Sigmoids | None = None
        self.gate_up: ExpertWeight
        self.down: ExpertWeight
        width, hidden = shape.intermediate, shape.latent or shape.hidden
        first = checkpoint.shard.index * width
        own, every = range(first, first + width), range(hidden)
        router = shape.linears[shape.groups["router"][0]].path(layer)
        path = f"{router.rpartition('.')[0]}.experts"
        self.factors: torch.Tensor | None = None
        if config.experts_beside:
            path = f"model.layers.{layer}.experts"
            name = f"model.layers.{layer}.router.per_expert_scale"
            self.factors = checkpoint.read_float32(name, Cut.whole(whole.experts))
        if config.sigmoid_scale is not None:
            cut = Cut.whole(whole.experts)
            bias = checkpoint.read_float32(f"{router}.e_score_correction_bias", cut)
            self.sigmoids = Sigmoids(bias, config.sigmoid_scale, *config.expert_groups)
        if config.clamp is not None:
            if checkpoint.packs_experts:
                self._read_packed(checkpoint, path, whole, own)
            else:
                self._read_clamped(checkpoint, path, whole, own)
            self.biases = _read_biases(checkpoint, path, whole, own, config.clamp)
            return
        gate_up = Cut((whole.intermediate, hidden), own, every)
        parts = ("up_proj",) if self.squared_relu else ("gate_proj", "up_proj")
        self.gate_up = _read(checkpoint, path, parts, whole.experts, gate_up)
        down = Cut((hidden, whole.intermediate), every, own)
        self.down = _read(checkpoint, path, ("down_proj",), whole.experts, down)

    def _read_clamped(
        self, checkpoint: Checkpoint, path: str, whole: BaseShape, own: range
    ) -> None:
        """Read gpt-oss's experts, whose tensors are [experts, d_in, d_out].

        path: prefix of the tensors' names.
        whole: shape of the whole model.
        own: part of each expert's width to keep.
        """
        experts, width, hidden = whole.experts, whole.intermediate, whole.hidden
        gates_first = partial(_gates_first, experts, len(own))

        def of_down(values: torch.Tensor) -> torch.Tensor:
            return values.view(experts, len(own), hidden).transpose(1, 2).contiguous()

        cut = Cut((experts, hidden, 2 * width), range(experts * hidden), _pairs(own))
        self.gate_up = checkpoint.read_arranged(f"{path}.gate_up_proj", [cut], gates_first)
        starts = range(own.start, experts * width, width)
        cuts = [
            Cut((experts, width, hidden), range(start, start + len(own)), range(hidden))
            for start in starts
        ]
        self.down = checkpoint.read_arranged(f"{path}.down_proj", cuts, of_down)

    def _read_packed(self, checkpoint: Checkpoint, path: str, whole: BaseShape, own: range) -> None:
        """Read gpt-oss's experts in MXFP4, which stay packed.

        path: prefix of the tensors' names.
        whole: shape of the whole model.
        own: part of each expert's width to keep.
        """
        experts, width, hidden = whole.experts, whole.intermediate, whole.hidden
        pairs = _pairs(own)
        gates_first = pairs[::2], pairs[1::2]
        shape = experts, hidden, 2 * width
        name = f"{path}.gate_up_proj"
        self.gate_up = checkpoint.read_mxfp4(name, shape, gates_first, range(hidden))
        shape = experts, width, hidden
        self.down = checkpoint.read_mxfp4(f"{path}.down_proj", shape, [range(hidden)], own)

    def __call__(
        self,
        x: Inputs,
        logits: torch.Tensor,
        lora: LoraDelta | None,
        step: LoraStep | None,
    ) -> torch.Tensor:
        """Compute the weighted sum of each token's experts → [tokens, hidden].

        x [tokens, hidden]: input, the same for all experts.
        logits [tokens, experts]: output of the router, without LoRA.
        lora: LoRA delta, which is added to the router's logits; None: no adapter.
        step: LoRA work of the forward pass, for the experts' linears; LoRA reads their inputs
            unrounded.
        """
        rows, adapts = rows_of(x), step is not None and step.segments.changes_experts
        if rows.is_cuda and len(rows) == 1 and not adapts:
            return experts_of_one(
                rows, self.gate_up, self.down, logits, lora, self.per_token,
                normalised=self.normalised, gelu=self.gelu, biases=self.biases,
                factors=self.factors, sigmoids=self.sigmoids, squared_relu=self.squared_relu,
            )  # fmt: skip
        routed = route(
            logits,
            self.per_token,
            lora,
            normalised=self.normalised,
            sigmoids=self.sigmoids,
            factors=self.factors,
        )
        adapted = begin_experts(step, routed)
        gate_up = expert_products(x, self.gate_up, routed, gathered=True)  # [rows, 2 · width]
        if self.gate_up_group is not None:
            add_expert_lora(gate_up, rows, adapted, self.layer, self.gate_up_group, gathered=True)
        gated: Inputs
        if self.biases is not None:
            gated = clamped_swiglu(gate_up, self.biases.gate_up, routed, self.biases.clamp)
        elif self.squared_relu:
            gated = squared_relu(gate_up, fp8=isinstance(self.down, Fp8Rows))
        else:
            gated = act_and_mul(gate_up, gelu=self.gelu, fp8=isinstance(self.down, Fp8Rows))
        down = expert_products(gated, self.down, routed)  # [rows, hidden]
        if self.down_group is not None:
            add_expert_lora(down, rows_of(gated), adapted, self.layer, self.down_group)
        return combine(down, routed, None if self.biases is None else self.biases.down)


class SharedExpert:
    """Expert of a layer that all tokens share: y = sigmoid(weigh(x)) · mlp(x).

    `weigh` is a linear layer with one output, whose sigmoid is the weight of the expert's output.
    None: the weight is 1.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, layer: int) -> None:
        """Read this rank's part of the expert, and the whole of `weigh`.

        Raises ModelError if a tensor is missing or malformed.

        layer: index of the layer.
        """
        shape = config.shape
        self.mlp = Mlp(config, checkpoint, layer, None, None, shared=True)
        self.weigh: LoraLinear | None = None
        if "shared_weight" in shape.groups:
            self.weigh = LoraLinear(checkpoint, shape, layer, "shared_weight", bias=False)

    def add_to(self, y: torch.Tensor, x: Inputs, lora: LoraStep | None) -> None:
        """Add this rank's part of the expert's output to y [tokens, hidden].

        x: input [tokens, hidden].
        lora: LoRA work of the forward pass; None: no adapter.
        """
        weights = () if self.weigh is None else self.weigh(x, lora)
        add_weighed(y, *self.mlp.partial(x, lora), *weights)


class RoutedMlp:
    """Router and experts of a layer; the router's logits choose each token's experts.

    Every rank has the whole router, and computes bitwise equal logits; so all ranks choose the same
    experts. Logits of sigmoids are float32, as in training: rounding could make logits equal, and
    so change which experts are chosen. Each rank computes its part of every expert. Experts may
    read and write vectors that are narrower than hidden states (Nemotron 3 Super): latent_in makes
    these, and latent_out makes hidden states of the experts' sum; every rank has both whole.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        layer: int,
        ranks: RankGroup | None,
        output_norm: str | None,
    ) -> None:
        """Read a layer's router, and this rank's part of its experts.

        Raises ModelError if a tensor is missing or malformed, or if the checkpoint rounds linears
        to NF4.

        layer: index of the layer.
        ranks: processes that share the layers; None: this process alone.
        output_norm: tensor name of the weight of a norm that the output passes; None: no norm.
        """
        self._ranks = ranks
        biased = config.clamp is not None
        wide = config.sigmoid_scale is not None or config.shape.latents is not None
        self.router = LoraLinear(checkpoint, config.shape, layer, "router", bias=biased, wide=wide)
        self.latent_in: LoraLinear | None = None
        if config.shape.latent:
            self.latent_in, self.latent_out = (
                LoraLinear(checkpoint, config.shape, layer, group, bias=False)
                for group in ("latent_in", "latent_out")
            )
        self.experts = Experts(config, checkpoint, layer)
        has_shared = config.shape.shared_intermediate > 0
        self.shared = SharedExpert(config, checkpoint, layer) if has_shared else None
        self.output_weight = read_norm_weight(config, checkpoint, output_norm)

    def rounds(self, tokens: int) -> bool:
        """Return whether the experts' first product (latent_in, or else their gate and up) rounds
        an input of this many tokens to FP8.
        """
        if self.latent_in is not None:
            return fp8.rounds(self.latent_in.weight, tokens)
        return fp8.rounds(self.experts.gate_up, tokens)

    def __call__(self, x: Inputs, lora: LoraStep | None) -> Product:
        """Compute the MLP of hidden states x [tokens, hidden] → Product [tokens, hidden].

        lora: LoRA work of the forward pass; None: no adapter.
        """
        logits, delta = self.router(x, lora)
        mixed = self.experts(self._narrowed(x, lora), logits, delta, lora)
        of_mixed: LoraDelta | None = None
        if self.latent_in is not None:
            mixed, of_mixed = self.latent_out(mixed, lora)
        if self.shared is not None:
            self.shared.add_to(mixed, x, lora)
        return summed_product(mixed, of_mixed, self.output_weight, self._ranks)

    def _narrowed(self, x: Inputs, lora: LoraStep | None) -> Inputs:
        """Return the experts' input: x, or its latent vectors [tokens, latent]."""
        if self.latent_in is None:
            return x
        y, delta = self.latent_in(x, lora)
        if delta is not None:
            add_delta(y, delta)
        return y


class ExpertsBesideMlp:
    """Router and experts of a layer whose MLP computes beside them, as in Gemma 4.

    y = norm(mlp(x)) + norm(experts(norm(x))), where the router reads another norm of x. Every rank
    has the whole router.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        layer: int,
        ranks: RankGroup | None,
        output_norm: str | None,
    ) -> None:
        """Read a layer's router, this rank's part of its experts, and their norms.

        Raises ModelError if a tensor is missing or malformed, or if the checkpoint rounds linears
        to NF4.

        layer: index of the layer.
        ranks: processes that share the layers; None: this process alone.
        output_norm: tensor name of the weight of a norm that the output passes; None: no norm.
        """
        path, hidden = f"model.layers.{layer}", config.shape.hidden
        self._ranks, self._eps, self._root = ranks, config.norm_eps, hidden**-0.5
        self.router = LoraLinear(checkpoint, config.shape, layer, "router", bias=False)
        self.router_weight = checkpoint.read_float32(f"{path}.router.scale", Cut.whole(hidden))
        self.experts = Experts(config, checkpoint, layer)
        before, behind = (
            read_norm_weight(config, checkpoint, f"{path}.{place}_feedforward_layernorm_2")
            for place in ("pre", "post")
        )
        assert before is not None
        assert behind is not None
        self.input_weight, self.experts_weight = before, behind
        self.output_weight = read_norm_weight(config, checkpoint, output_norm)

    def __call__(self, x: torch.Tensor, mlp: Product, lora: LoraStep | None) -> Product:
        """Compute the sum of an MLP's output and of the experts' → Product [tokens, hidden].

        x [tokens, hidden]: hidden states, of which the MLP has read a norm.
        mlp: output of the MLP, with the norm that it passes.
        lora: LoRA work of the forward pass; None: no adapter.
        """
        logits, delta = self.router(rms_norm(x, self.router_weight, self._eps, self._root), lora)
        inputs = rms_norm(x, self.input_weight, self._eps)
        mixed = self.experts(inputs, logits, delta, lora)
        if self._ranks is not None:
            self._ranks.sums.all_reduce(mixed)
        y = rms_norm(mixed, self.experts_weight, self._eps)
        given = (mlp.lora, 1.0, mlp.norm_weight, mlp.exchange)
        return Product(
            rows_of(add_rms_norm(y, mlp.y, None, self._eps, *given)), None, self.output_weight
        )


def _pairs(own: range) -> range:
    """Return the columns of gpt-oss's gate_up_proj for a part of an expert's width: each gate
    before the value that it gates.

    own: the part of the width.
    """
    return range(2 * own.start, 2 * own.stop)


def _gates_first(experts: int, width: int, values: torch.Tensor) -> torch.Tensor:
    """Arrange columns of gpt-oss's gate_up_proj as rows, each expert's gates before the values
    that they gate: [experts, 2 · width, d_in].

    width: number of gates of each expert.
    values: the columns, in which gates and the values that they gate alternate.
    """
    values = values.view(experts, -1, width, 2)
    return values.permute(0, 3, 2, 1).reshape(experts, 2 * width, -1)


def _read_biases(
    checkpoint: Checkpoint, path: str, whole: BaseShape, own: range, clamp: Clamp
) -> ClampedBiases:
    """Read the biases of gpt-oss's experts; those of down_proj in the first process only.

    path: prefix of the tensors' names.
    whole: shape of the whole model.
    own: part of each expert's width to keep.
    clamp: constants of the experts' activation.
    """
    experts, name = whole.experts, f"{path}.gate_up_proj_bias"
    cut = Cut((experts, 2 * whole.intermediate), range(experts), _pairs(own))
    gates_first = partial(_gates_first, experts, len(own))
    gate_up = checkpoint.read_arranged(name, [cut], gates_first, rounds=False)
    assert isinstance(gate_up, torch.Tensor)
    down, name = None, f"{path}.down_proj_bias"
    if checkpoint.shard.index:
        checkpoint.leave([name])  # the first process adds the biases to the sum
    else:
        down = checkpoint.read([name], [experts], whole.hidden)
    return ClampedBiases(clamp, gate_up.view(experts, -1), down)


def _lora_group(shape: BaseShape, group: str) -> LoraGroup | None:
    """Return a group of experts' linears; None if no adapter can change them.

    group: its name in BaseShape.groups.
    """
    linears = shape.groups.get(group)
    if linears is None:
        return None
    return LoraGroup(linears, shape.dims(linears[0])[0], tuple(shape.dims(n)[1] for n in linears))


def _read(
    checkpoint: Checkpoint, path: str, parts: tuple[str, ...], count: int, cut: Cut
) -> Weight:
    """Read the kept part of one linear of all experts, or of several linears that share an input.

    The checkpoint has one tensor of all experts, gate_up_proj or down_proj, or a tensor for each
    linear of each expert.

    path: prefix of the tensors' names.
    parts: names of the linears in one expert, such as gate_proj and up_proj, which share an input.
    count: number of experts.
    cut: part of one expert's linear to keep.
    → [count, parts · rows, columns]
    """
    names = [f"{path}.{expert}.{part}.weight" for expert in range(count) for part in parts]
    cuts = [cut] * len(names)
    stacked = f"{path}.{'gate_up_proj' if len(parts) > 1 else parts[0]}"
    if stacked in checkpoint:
        height, rows = cut.shape[0], cut.rows
        shape = (count, len(parts) * height, cut.shape[1])
        begins = range(0, len(names) * height, height)
        cuts = [Cut(shape, range(b + rows.start, b + rows.stop), cut.columns) for b in begins]
        names = [stacked] * len(names)
    weight = checkpoint.read_linear(names, cuts)
    if isinstance(weight, Fp8Rows):
        scales = weight.scales.view(count, -1, *weight.scales.shape[1:])
        return Fp8Rows(weight.rows.view(count, -1, cut.kept_shape[1]), scales, weight.block)
    return weight.view(count, -1, cut.kept_shape[1])
