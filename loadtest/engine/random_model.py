"""Base model of given shapes with random weights: as fast as a trained model, and without files."""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lorikeet_engine.adapter_format import (
    BaseShape,
    Quantization,
    QuantizedLinears,
    decoder_config,
)
from lorikeet_engine.kernels.fp8 import DTYPE, LARGEST, Fp8Rows
from lorikeet_engine.kernels.lora.linear import FusedWeight
from lorikeet_engine.kernels.moe.mxfp4 import BLOCK, BLOCKS, SCALE_OFFSET, Mxfp4Experts
from lorikeet_engine.kernels.w4a16 import PackedWeight, StackedWeight, pack
from lorikeet_engine.kernels.w4a16 import stack as stacked
from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.cut import Cut, stack
from lorikeet_engine.models.llama import LlamaModel
from lorikeet_engine.parallel.rank_group import RankGroup
from lorikeet_engine.parallel.shard import WHOLE, Shard

LLAMA_3_1_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

LLAMA_3_1_8B_FP8_BLOCKS: Mapping[str, Any] = LLAMA_3_1_8B | {
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
}
"""Shapes whose linears are stored as in DeepSeek's and Qwen's FP8 checkpoints."""

AWQ: Mapping[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "version": "gemm",
    "zero_point": True,
}
NF4: Mapping[str, Any] = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
}
LLAMA_3_1_8B_AWQ: Mapping[str, Any] = LLAMA_3_1_8B | {"quantization_config": AWQ}
LLAMA_3_1_8B_NF4: Mapping[str, Any] = LLAMA_3_1_8B | {"quantization_config": NF4}
"""Shapes whose linears stay in 4 bits with weight_dtype=packed, and are floats otherwise."""

LLAMA_3_1_70B: Mapping[str, Any] = LLAMA_3_1_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
LLAMA_3_1_70B_AWQ: Mapping[str, Any] = LLAMA_3_1_70B | {"quantization_config": AWQ}

MINISTRAL_3_8B: Mapping[str, Any] = {
    "model_type": "ministral3",
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
QWEN3_8B: Mapping[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}

PHI_4: Mapping[str, Any] = {
    "model_type": "phi3",
    "vocab_size": 100352,
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 10,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 250000.0,
}
QWEN3_30B_A3B: Mapping[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
GEMMA_3_12B: Mapping[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
GEMMA_4_31B: Mapping[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "num_global_key_value_heads": 4,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
}
GEMMA_4_26B_A4B: Mapping[str, Any] = GEMMA_4_31B | {
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "enable_moe_block": True,
    "moe_intermediate_size": 704,
    "num_experts": 128,
    "top_k_experts": 8,
}
GEMMA_4_E2B: Mapping[str, Any] = GEMMA_4_31B | {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "sliding_window": 512,
    "max_position_embeddings": 131072,
}
"""Sizes that mlx-lm 0.32.2 has as defaults (models/gemma4_text.py)."""
GEMMA_4_E4B: Mapping[str, Any] = GEMMA_4_E2B | {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 42,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 7,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 18,
    "use_double_wide_mlp": False,
}
QWEN3_5_9B: Mapping[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
    },
}
QWEN3_5_35B_A3B: Mapping[str, Any] = QWEN3_5_9B | {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
}
GPT_OSS_20B: Mapping[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {"quant_method": "mxfp4"},
}
"""Shapes whose experts stay in 4 bits with weight_dtype=packed, and are floats otherwise."""
GPT_OSS_120B: Mapping[str, Any] = GPT_OSS_20B | {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}
NEMOTRON_3_NANO_30B_A3B: Mapping[str, Any] = {
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*E" + "MEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 262144,
    "layer_norm_epsilon": 1e-5,
}
GRANITE_4_H_SMALL: Mapping[str, Any] = {
    "model_type": "granitemoehybrid",
    "vocab_size": 100352,
    "hidden_size": 4096,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 40,
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "logits_scaling": 16.0,
    "residual_multiplier": 0.22,
    "position_embedding_type": "nope",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
GRANITE_4_H_TINY: Mapping[str, Any] = GRANITE_4_H_SMALL | {
    "hidden_size": 1536,
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "mamba_n_heads": 48,
    "logits_scaling": 6.0,
}
GLM_4_7_FLASH: Mapping[str, Any] = {
    "model_type": "glm4_moe_lite",
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "max_position_embeddings": 202752,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "rms_norm_eps": 1e-5,
}
_OF_EXPERTS = 1 / 8  # size of a routed expert's output, as a share of its input's
_E2M1_DEVIATION = 2.93  # of equally frequent codes
CONFIGS = {
    "llama-3.1-8b": LLAMA_3_1_8B,
    "llama-3.1-8b-fp8-blocks": LLAMA_3_1_8B_FP8_BLOCKS,
    "llama-3.1-8b-awq": LLAMA_3_1_8B_AWQ,
    "llama-3.1-8b-nf4": LLAMA_3_1_8B_NF4,
    "llama-3.1-70b": LLAMA_3_1_70B,
    "llama-3.1-70b-awq": LLAMA_3_1_70B_AWQ,
    "ministral-3-8b": MINISTRAL_3_8B,
    "qwen3-8b": QWEN3_8B,
    "phi-4": PHI_4,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "gemma-3-12b": GEMMA_3_12B,
    "gemma-4-31b": GEMMA_4_31B,
    "gemma-4-26b-a4b": GEMMA_4_26B_A4B,
    "gemma-4-e2b": GEMMA_4_E2B,
    "gemma-4-e4b": GEMMA_4_E4B,
    "qwen3.5-9b": QWEN3_5_9B,
    "qwen3.5-35b-a3b": QWEN3_5_35B_A3B,
    "nemotron-3-nano-30b-a3b": NEMOTRON_3_NANO_30B_A3B,
    "granite-4-h-small": GRANITE_4_H_SMALL,
    "granite-4-h-tiny": GRANITE_4_H_TINY,
    "glm-4.7-flash": GLM_4_7_FLASH,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b": GPT_OSS_120B,
}


class RandomCheckpoint(Checkpoint):
    """Checkpoint that makes up every tensor: norms are 1, products keep the size of their input.

    Rounding must not decide what a model computes, or two ways of computing it could not be
    compared. So where attention divides scores by nothing, the norms of queries do, as scores as
    large as a head is wide would choose one token each; and experts add little (_OF_EXPERTS), as
    the last expert that a token chooses is often hardly likelier than the next. A factor of the
    experts' sum (routed_scaling_factor) is divided out of their weights, or it would undo this.

    A tensor's numbers depend on its name and dtype alone, before any rounding. Each linear is
    rounded as soon as it is drawn: beside the model, the device holds one linear in floats.
    """

    has_head = True

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        rounding: Quantization | None = None,
        seed: int = 0,
        shard: Shard = WHOLE,
        block: tuple[int, int] | None = None,
        packed: QuantizedLinears | None = None,
        attention_scale: float | None = None,
        routed_scale: float = 1.0,
    ) -> None:
        """Begin a checkpoint whose tensors are drawn when they are read.

        device, dtype: device and dtype of the tensors.
        rounding: format to which linears are rounded; None: not rounded.
        shard: part of each tensor that this rank reads.
        block: rows and columns of a linear that share a scale in FP8; None: one scale a row.
        packed: format of 4 bits in which weights are drawn and stay; None: they are floats.
        attention_scale: factor of attention scores; None: 1 / √head_dim.
        routed_scale: factor of the sum of a token's experts.
        """
        self.device = device
        self.shard = shard
        self.dtype = dtype
        self.nbytes = 0
        self._weight_format = None
        self.rounding = rounding
        self._staging = None
        self._seed = seed
        self._block = block
        of_experts = packed is not None and packed.format is Quantization.MXFP4
        self.packs_linears = packed is not None and not of_experts
        self.packs_experts = of_experts
        self._packed_format = packed
        self._attention_scale, self._routed_scale = attention_scale, routed_scale
        self._random = torch.Generator(device)

    def _read(self, names: Sequence[str], cuts: Sequence[Cut]) -> torch.Tensor:
        out, parts = stack(cuts, self.device, self.dtype)
        for name, part, cut in zip(names, parts, cuts, strict=True):
            if len(cut.shape) == 1:
                part.fill_(self._of_norm(name, cut))
                continue
            self._random.manual_seed(self._seed + zlib.crc32(name.encode()))
            part.normal_(0.0, self.deviation(name, cut), generator=self._random)
        return out

    def _to_fp8(self, names: Sequence[str], cuts: Sequence[Cut]) -> Fp8Rows:
        if self._block is None:
            return super()._to_fp8(names, cuts)
        height, width = self._block
        weight = self._read(names, cuts).flatten(0, -2)
        blocks = weight.unflatten(-1, (-1, width)).unflatten(0, (-1, height))
        scales = blocks.abs().amax(dim=(1, 3)).float() / LARGEST
        rows = (blocks / scales[:, None, :, None]).to(DTYPE).reshape(weight.shape)
        return Fp8Rows(rows, scales, self._block)

    def _read_packed(self, names: Sequence[str], cuts: Sequence[Cut], first: int) -> FusedWeight:
        weight = stacked(
            [self._packed(name, cut) for name, cut in zip(names[:first], cuts, strict=False)]
        )
        self.nbytes += weight.nbytes
        if first == len(names):
            return weight
        return StackedWeight((weight, self.read_parts(names[first:], cuts[first:])))

    def _packed(self, name: str, cut: Cut) -> PackedWeight:
        """Draw the kept part of a linear: codes, scales of one size, and zero points of 7 and 8.

        The mean of its numbers is 0: otherwise a sum over all inputs would hide all else.
        """
        stored, (d_out, d_in) = self._packed_format, cut.kept_shape
        assert stored is not None
        self._random.manual_seed(self._seed + zlib.crc32(name.encode()))
        q = self._integers(0, 16, d_out, d_in)
        if stored.format is Quantization.NF4:
            scales = torch.full((d_out, d_in // 64), 2 * self.deviation(name, cut))
            levels = torch.linspace(-1, 1, 16, device=self.device)
            there = scales.to(self.device)
            return pack(q, there, None, levels=levels, rounded=torch.bfloat16)
        shape = d_out, d_in // stored.group
        scales = torch.full(shape, self.deviation(name, cut) / 4.6, dtype=torch.float16)
        return pack(q, scales.to(self.device), self._integers(7, 9, *shape))

    def read_mxfp4(
        self, name: str, shape: tuple[int, int, int], rows: Sequence[range], columns: range
    ) -> Mxfp4Experts:
        """Draw the kept part of experts' weights."""
        self._random.manual_seed(self._seed + zlib.crc32(name.encode()))
        experts, d_in, _ = shape
        sides = sum(map(len, rows)), len(columns)
        weight = random_mxfp4(experts, *sides, self._share(name) * d_in**-0.5, self._random)
        self.nbytes += weight.nbytes
        return weight

    def _integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(
            low, high, shape, dtype=torch.uint8, device=self.device, generator=self._random
        )

    def _of_norm(self, name: str, cut: Cut) -> float:
        if self._attention_scale is None or not name.endswith("q_norm.weight"):
            return 1.0
        return cut.shape[0] ** -0.5 / self._attention_scale

    def deviation(self, name: str, cut: Cut) -> float:
        """Return the standard deviation of a matrix's numbers."""
        return self._share(name) * cut.shape[1] ** -0.5

    def _share(self, name: str) -> float:
        """Return the size of a linear's output, as a share of its input's."""
        of_experts = ".experts." in name and "down_proj" in name
        return _OF_EXPERTS / self._routed_scale if of_experts else 1.0

    def floats(self, _name: str) -> torch.Tensor:
        """Return the factor of hidden states behind a layer: 1."""
        return torch.ones(1)

    def read_plus_one(self, _name: str, cut: Cut) -> torch.Tensor:
        """Return a norm's weight after 1 is added to it: 1."""
        return torch.ones(cut.kept_shape, device=self.device)

    def read_float32(self, name: str, cut: Cut) -> torch.Tensor:
        """Return weights of the decay of states, which remember some 15 tokens; or other ones.

        A matrix is drawn as other matrices are.
        """
        if cut.columns is not None:
            return self._read([name], [cut]).float()
        value = -3.0 if name.endswith("A_log") else 1.0
        return torch.full(cut.kept_shape, value, device=self.device)

    def __contains__(self, _name: str) -> bool:
        """Return False: no tensor holds several linears, or scales of keys and values."""
        return False


def random_mxfp4(
    experts: int, d_out: int, d_in: int, deviation: float, random: torch.Generator
) -> Mxfp4Experts:
    """Draw weights of experts in MXFP4, whose scales are all one, without ever making floats.

    deviation: standard deviation of the weights, to the next power of two.
    """
    groups, device = -(-d_in // (BLOCK * BLOCKS)), random.device
    words = torch.empty(experts, groups, d_out, BLOCK, dtype=torch.int16, device=device)
    words.random_(-(1 << 15), 1 << 15, generator=random)
    exponents = torch.zeros(groups * BLOCKS, dtype=torch.uint8, device=device)
    scale = 127 + round(math.log2(deviation / _E2M1_DEVIATION))
    exponents[: d_in // BLOCK] = SCALE_OFFSET + scale  # blocks beyond d_in are 0
    of_group = exponents.view(torch.int32)[None, :, None]
    return Mxfp4Experts(words, of_group.expand(experts, -1, d_out).contiguous(), d_in)


def random_model(
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
    """Build the model of a folder that holds config.json alone, with random weights.

    max_context: limit on a sequence's tokens; None: the config's.
    rounding: format to which linears are rounded, unless the config names one.
    ranks: processes that share the model, of which this is one; None: no other.
    packed: whether weights stay in the 4 bits of the format that the config names.
    mtp: whether the model has a head for multi-token prediction.
    """
    config = ModelConfig.from_folder(folder, max_context)
    if mtp:
        config = config.with_mtp()
    shard = WHOLE if ranks is None else ranks.shard
    stored = config.quantized_linears
    block = None
    if stored is not None and stored.format is Quantization.FP8:
        rounding, block = stored.format, stored.block
    kept = stored if packed else None
    checkpoint = RandomCheckpoint(
        device, dtype, rounding, shard=shard, block=block, packed=kept,
        attention_scale=config.attention_scale, routed_scale=config.sigmoid_scale or 1.0,
    )  # fmt: skip
    return LlamaModel(config, checkpoint, ranks)


def shape_of(config: Mapping[str, Any]) -> BaseShape:
    """Return the shape of the model with this config.json."""
    return BaseShape.from_config(decoder_config(config))


def write_config(folder: Path, config: Mapping[str, Any] = LLAMA_3_1_8B) -> Path:
    """Write config.json, the folder that `random_model` needs; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
