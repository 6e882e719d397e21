"""Small models of real shapes, their float32 results, and the tolerance of bfloat16."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter import Adapter
from lorikeet_engine.engine import Engine
from lorikeet_engine.request import FinishReason, Request
from lorikeet_engine.sampling.draws import SamplingRow
from tests.engine import engine_driver
from tests.engine.blob_shelf import BlobShelf
from tests.engine.engine_driver import Answers
from tests.engine.peft_adapters import activation, save_adapter
from tests.engine.peft_world import composed

# Largest error of a log-probability against the reference: 36 eps of bfloat16, 0.28. Each of ten
# or so tensors that a layer writes is rounded to 8 bits, and the layers behind it carry that on:
# after four layers that makes 1% of the logits' spread, 0.02 to 0.03, and up to 0.18 for the worst
# of millions (on an H200: 0.15, and 0.257 of Granite,
# whose logits spread wider). Two logits that differ by more keep their order, in practice.
TOLERANCE = 36 * torch.finfo(torch.bfloat16).eps
# A delta net's outputs are divided by their own size, however small: roundings grow. The worst of
# these models on an H200 is 0.32; transformers' own bfloat16 on a CPU is 0.35 off, ours there 0.25.
_TOLERANCES = {"qwen3_5_text": 48 * torch.finfo(torch.bfloat16).eps}
SIZES = {  # heads of 128 in most families, as attention kernels are compiled for each width
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.03,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_ON_CPU = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "mistral": {"sliding_window": 50},
    "ministral": {
        "head_dim": 128,
        "sliding_window": 50,
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
    },
    "ministral3": {
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 128, "num_attention_heads": 8},
    "phi3": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
    "granite": {
        "attention_multiplier": 1 / 16,
        "embedding_multiplier": 1.5,
        "logits_scaling": 0.8,
        "residual_multiplier": 0.6,
    },
    "smollm3": {
        "no_rope_layers": [1, 1, 1, 0],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 2_000_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 128,
        },
    },
    "olmo2": {},
    "olmo3": {
        "sliding_window": 50,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 128,
            }
        },
    },
    "exaone4": {
        "head_dim": 128,
        "sliding_window": 50,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    },
    "gemma2": {
        "head_dim": 256,
        "query_pre_attn_scalar": 200,
        "sliding_window": 50,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 20.0,
    },
    "gemma3_text": {
        "head_dim": 256,
        "query_pre_attn_scalar": 200,
        "sliding_window": 50,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "gemma4_text": {
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 50,
        "layer_types": [*["sliding_attention"] * 2, *["full_attention"] * 2],
        "final_logit_softcapping": 20.0,
    },
    "gemma4_e_text": {
        "model_type": "gemma4_text",
        "head_dim": 256,
        "global_head_dim": 512,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": 2048,
        "sliding_window": 50,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "final_logit_softcapping": 20.0,
    },
    "glm": {"head_dim": 128},
    "glm4": {"head_dim": 96},
    "seed_oss": {"head_dim": 128},
    # All experts of each token: rounding could select other ones of a few than the reference does.
    "qwen3_moe": {
        "head_dim": 128,
        "moe_intermediate_size": 256,
        "num_experts": 4,
        "num_experts_per_tok": 4,
    },
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 3},
    "nemotron_h": {
        "head_dim": 128,
        "layers_block_type": [
            *("linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe")
        ],
        "mamba_head_dim": 64,
        "mamba_num_heads": 16,
        "moe_intermediate_size": 256,
        "moe_latent_size": 128,
        "moe_shared_expert_intermediate_size": 512,
        "n_groups": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.5,
        "ssm_state_size": 128,
        "time_step_min": 1e-30,  # transformers' least time step in prompts, and none in decodes
    },
    "granitemoehybrid": {
        "attention_multiplier": 1 / 16,
        "embedding_multiplier": 1.5,
        "intermediate_size": 256,
        "layer_types": [*["full_attention", "linear_attention"] * 2],
        "logits_scaling": 0.9,
        "mamba_d_state": 128,
        "mamba_n_heads": 16,
        "num_experts_per_tok": 3,
        "num_local_experts": 3,
        "residual_multiplier": 0.8,
        "shared_intermediate_size": 512,
    },
    "glm4_moe_lite": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": 192,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "moe_intermediate_size": 256,
        "n_routed_experts": 4,
        "num_experts_per_tok": 4,
    },
    "deepseek_v2": {  # queries without latents
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 256,
        "n_routed_experts": 4,
        "num_experts_per_tok": 4,
    },
    "gpt_oss": {
        "head_dim": 64,
        "num_attention_heads": 8,
        "sliding_window": 50,
        "intermediate_size": 480,
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "qwen3_5_text": {
        "head_dim": 256,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "rank4_qv": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "rank8_all": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "rank64_ko": {"r": 64, "lora_alpha": 64, "target_modules": ["k_proj", "o_proj"]},
    "ranks_rs": {
        "r": 16,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ["q_proj", "up_proj", "down_proj"],
        "rank_pattern": {r"layers\.1\.mlp\.down_proj": 4},
    },
    "head_and_embeddings": {
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["v_proj", "lm_head", "embed_tokens"],
        "rank_pattern": {"lm_head": 24},
    },
}
NAMES = (None, *ADAPTERS)
_ATTENTION = {"target_modules": ALL[:4]}
_LATENTS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
_TARGETS = {  # changes to ADAPTERS in families whose MLP has other linears, or none
    "gpt_oss": {
        "rank8_all": _ATTENTION,
        "ranks_rs": _ATTENTION | {"rank_pattern": {r"layers\.1\.self_attn\.o_proj": 4}},
    },
    "qwen3_5_text": {"rank8_all": {"target_modules": "all-linear"}},
    "gemma4_e_text": {"rank8_all": {"target_modules": "all-linear"}},
    "glm4_moe_lite": {
        "rank4_qv": {"target_modules": ["q_b_proj", "kv_b_proj"]},
        "rank8_all": {"target_modules": _LATENTS},
        "rank64_ko": {"target_modules": ["kv_b_proj", "o_proj"]},
        "ranks_rs": {
            "target_modules": ["q_a_proj", "kv_b_proj"],
            "rank_pattern": {r"layers\.1\.self_attn\.kv_b_proj": 4},
        },
        "head_and_embeddings": {"target_modules": ["kv_b_proj", "lm_head", "embed_tokens"]},
    },
}
_TARGETS["deepseek_v2"] = _TARGETS["glm4_moe_lite"] | {
    "rank4_qv": {"target_modules": ["q_proj", "kv_b_proj"]},
    "rank8_all": {"target_modules": ["q_proj", *_LATENTS[2:]]},
    "ranks_rs": {
        "target_modules": ["q_proj", "kv_b_proj"],
        "rank_pattern": {r"layers\.1\.self_attn\.kv_b_proj": 4},
    },
}


def adapters_of(family: str) -> dict[str, dict[str, Any]]:
    """Return ADAPTERS, with targets that the family has."""
    changes = _TARGETS.get(family, {})
    return {name: lora | changes.get(name, {}) for name, lora in ADAPTERS.items()}


class Float32Reference:
    """One family: a checkpoint, its adapters, and float32 results of transformers and PEFT.

    on_cpu: changes to SIZES on a CPU, which needs no wide heads, and is slow.
    """

    def __init__(
        self,
        family: str,
        folder: Path,
        device: str,
        adapters: Mapping[str, dict[str, Any]] | None = None,
        on_cpu: Mapping[str, int] = _ON_CPU,
    ) -> None:
        self.device = device
        self.tolerance = _TOLERANCES.get(family, TOLERANCE)
        self.checkpoint = _save_model(family, folder / "model", on_cpu if device == "cpu" else {})
        self.shelf = BlobShelf(folder / "blobs")
        self.refs: dict[str | None, Adapter | None] = {None: None}
        base = transformers.AutoModelForCausalLM.from_pretrained(
            self.checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).to(device)
        self._model: Any = None
        loras = adapters_of(family) if adapters is None else adapters
        for seed, (name, lora) in enumerate(loras.items()):
            saved = save_adapter(self.checkpoint, folder / name, seed, **lora)
            _round(saved / "adapter_model.safetensors")
            self.refs[name] = self.shelf.add(saved, name)
            if self._model is None:
                self._model = peft.PeftModel.from_pretrained(base, saved, adapter_name=name)
            else:
                self._model.load_adapter(saved, name)

    def compose(self, name: str, weights: Mapping[str, float]) -> None:
        """Make a composition of adapters. weights: weight of each adapter by its name."""
        names, factors = [*weights], [*weights.values()]
        self._model.add_weighted_adapter(names, factors, name, combination_type="cat")
        self.refs[name] = composed(self.refs, weights)

    @torch.inference_mode()
    def logprobs(self, name: str | None, tokens: list[int], answered: int = 0) -> torch.Tensor:
        """Return log probabilities [tokens, vocab] after each token, under an adapter.

        answered: number of the last tokens that are an answer, which invoke no activated LoRA.
        """
        ids = torch.tensor([tokens], device=self.device)
        if name is None:
            with self._model.disable_adapter():
                return self._model(input_ids=ids).logits[0].log_softmax(-1)
        self._model.set_adapter(name)
        activated = activation(self._model, tokens[: len(tokens) - answered], len(tokens))
        return self._model(input_ids=ids, **activated).logits[0].log_softmax(-1)


@dataclass
class RecordingSampler:
    """Sampler that records the logits of every token, by the choice's seed and step."""

    engine: Engine
    logits: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    tokens: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sampler = self.engine._sampler
        self.penalties = self._sampler.penalties
        self.engine._sampler = self  # type: ignore[assignment]

    def sample(
        self, logits: torch.Tensor, rows: list[SamplingRow], processed: Any = None
    ) -> torch.Tensor:
        at = [(row.seed, row.step) for row in rows]
        self.logits.update(zip(at, logits.float().log_softmax(-1), strict=True))
        drawn = self._sampler.sample(logits, rows, processed)
        self.tokens.update(zip(at, drawn.clone(), strict=True))
        return drawn


def compare(
    reference: Float32Reference,
    request: Request,
    name: str | None,
    draws: RecordingSampler,
    answers: Answers,
    tolerance: float | None = None,
) -> float:
    """Compare a request's answers with the reference, which is fed the sampled tokens.

    name: adapter of the request; None for the base model alone.
    draws: logits and tokens that the engine's sampler has recorded.
    tolerance: limit on the error of each log probability, None: the family's; the root mean square
        of the errors of a choice may be a fifth of it.

    Returns the share of tokens for which the reference's two best differ by more than the
    tolerance.
    """
    tolerance = reference.tolerance if tolerance is None else tolerance
    clear = []
    for choice in range(len(request.prompts) * request.n):
        said = answers.of(request.request_id, choice)
        stopped = answers.finish[request.request_id, choice] is FinishReason.STOP
        at = [(request.sampling.seed + choice, step) for step in range(len(said) + stopped)]
        drawn = [int(draws.tokens[key]) for key in at]
        assert said == drawn[: len(said)]
        assert stopped == (drawn[-1] in request.sampling.stop_token_ids)
        prompt = list(request.prompts[choice // request.n])
        answered = len(drawn) - 1
        want = reference.logprobs(name, prompt + drawn[:-1], answered)[len(prompt) - 1 :]
        error = torch.stack([draws.logits[key] for key in at]) - want
        worst, typical = error.abs().max().item(), error.square().mean().sqrt().item()
        assert worst <= tolerance, f"{request.request_id} under {name}: {worst}"
        assert typical <= tolerance / 5, f"{request.request_id} under {name}: {typical}"
        best = want.topk(2).values
        clear += (best[:, 0] - best[:, 1] > tolerance).tolist()
        if request.sampling.temperature == 0:
            pairs = zip(drawn, want.argmax(-1).tolist(), clear[-len(drawn) :], strict=True)
            assert all(token == likeliest for token, likeliest, is_clear in pairs if is_clear)
    return sum(clear) / len(clear)


def build(reference: Float32Reference, folder: Path, **settings: Any) -> Engine:
    """Build a bfloat16 engine on the reference's device."""
    sizes = {
        "device": reference.device,
        "dtype": "bfloat16",
        "adapter_dtype": "bfloat16",
        "max_running": 12,
        "max_batch_adapters": len(ADAPTERS),
        "adapter_gpu_bytes": 16 << 20,
        "adapter_host_bytes": 32 << 20,
    }
    return engine_driver.build(
        reference.checkpoint, reference.shelf, folder / "cache", **{**sizes, **settings}
    )


def run_to_end(answers: Answers) -> None:
    """Step until all requests have ended; allow time for kernels that a first run compiles."""
    answers.until(lambda: not answers.pending, timeout_s=120)


def _save_model(family: str, folder: Path, sizes: Mapping[str, int]) -> Path:
    sizes = {"model_type": family, **SIZES, **sizes, **FAMILIES[family]}
    config = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            # norms and biases start as 0 or 1, which would hide them
            if weight.dim() == 1 or name.endswith("_bias"):
                weight.data.add_(torch.randn_like(weight), alpha=0.3)
            if "gemma4" in family and name.endswith("q_norm.weight"):
                weight.data /= len(weight) ** 0.5  # scores have no such divisor of their own
    model.lm_head.weight.data.mul_(0.1 / 0.03)  # logits spread like a trained model's
    model.save_pretrained(folder)
    _round(folder / "model.safetensors")
    return folder


def _round(path: Path) -> None:
    """Round the weights to bfloat16 in place, so that only computation differs, not the weights."""
    tensors = {name: tensor.bfloat16().float() for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
