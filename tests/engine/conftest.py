"""Tiny random checkpoints of every family, and batches built by hand."""

import json
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from lorikeet_engine.engine import Engine
from lorikeet_engine.execution.batch_builder import StateInput
from lorikeet_engine.kernels.attention.protocol import PageTable
from lorikeet_engine.models.batch import Batch, StateRows
from lorikeet_engine.parallel import followers
from lorikeet_engine.scheduling.kv_cache import StateUse
from tests.engine.blob_shelf import BlobShelf

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": 24},
    "ministral": {
        "model_type": "ministral",
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "ministral3": {
        "model_type": "ministral3",
        "initializer_range": 0.2,  # at 0.25, transformers itself is 100 eps off its float64 result
        "head_dim": 48,
        "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5},
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "phi3": {
        "model_type": "phi3",
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75},
    },
    "granite": {
        "model_type": "granite",
        "attention_multiplier": 0.1,
        "embedding_multiplier": 1.7,
        "logits_scaling": 1.3,
        "residual_multiplier": 0.6,
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0]},
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {
        "model_type": "olmo3",
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": YARN},
    },
    "exaone4": {
        "model_type": "exaone4",
        "head_dim": 32,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm": {"model_type": "glm", "head_dim": 32},
    "glm4": {"model_type": "glm4", "head_dim": 16},
    "seed_oss": {
        "model_type": "seed_oss",
        "head_dim": 32,
        "attention_dropout": 0.0,  # which some tests' references would do
        "residual_dropout": 0.0,
    },
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "gemma4_text": {
        "model_type": "gemma4_text",
        "initializer_range": 0.2,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "head_dim": 16,
        "global_head_dim": 48,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 24,
        "final_logit_softcapping": 8.0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 100.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
}
GEMMA4_E: dict[str, dict[str, Any]] = {
    "gemma4_e_text": {
        **FAMILIES["gemma4_text"],
        "initializer_range": 0.1,
        "num_hidden_layers": 5,
        "layer_types": [
            *("sliding_attention", "full_attention", "sliding_attention"),
            *("sliding_attention", "full_attention"),
        ],
        "num_kv_shared_layers": 2,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 261,
        "use_double_wide_mlp": True,
        "pad_token_id": 0,
    },
}
FAMILIES["gemma4_unified_text"] = {
    name: value
    for name, value in FAMILIES["gemma4_text"].items()
    if name != "hidden_size_per_layer_input"
} | {"model_type": "gemma4_unified_text", "final_logit_softcapping": None}
MOE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "num_experts": 6,
        "num_experts_per_tok": 3,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
}
GEMMA4_MOE: dict[str, dict[str, Any]] = {
    "gemma4_moe_text": {
        **FAMILIES["gemma4_text"],
        "enable_moe_block": True,
        "moe_intermediate_size": 48,
        "num_experts": 6,
        "top_k_experts": 3,
    },
}
HYBRID: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 5,
        "layer_types": [
            *("linear_attention", "full_attention", "linear_attention"),
            *("linear_attention", "full_attention"),
        ],
        "head_dim": 32,
        "linear_key_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 20,
    },
    "qwen3_5_moe_text": {
        "model_type": "qwen3_5_moe_text",
        "initializer_range": 0.2,  # at 0.3, transformers itself is 95 eps off its float64 result
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 32,
        "linear_key_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 20,
        "moe_intermediate_size": 40,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 56,
    },
}
HYBRID["qwen3_next"] = HYBRID["qwen3_5_moe_text"] | {"model_type": "qwen3_next"}
GPT_OSS: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "model_type": "gpt_oss",
        "initializer_range": 0.2,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "sliding_window": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "swiglu_alpha": 1.3,
        "swiglu_limit": 0.9,
        "rope_parameters": {**YARN, "truncate": False},
    },
}
MAMBA: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "model_type": "nemotron_h",
        "initializer_range": 0.2,
        "layers_block_type": [
            *("linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"),
            *("full_attention", "linear_attention"),
        ],
        "head_dim": 24,
        "mamba_head_dim": 12,
        "mamba_num_heads": 8,
        "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 56,
        "n_groups": 4,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.7,
        "ssm_state_size": 20,
        "time_step_min": 1e-30,  # transformers' least time step in prompts, and none in decodes
    },
}
MAMBA["granitemoehybrid"] = {
    "model_type": "granitemoehybrid",
    "initializer_range": 0.1,  # at 0.2, transformers itself is 120 eps off its float64 result
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
    "attention_multiplier": 0.1,
    "embedding_multiplier": 1.7,
    "logits_scaling": 1.3,
    "residual_multiplier": 0.6,
    "mamba_d_state": 20,
    "mamba_n_heads": 8,
    "num_experts_per_tok": 3,
    "num_local_experts": 6,
    "shared_intermediate_size": 56,
}
MAMBA["granite_rope"] = MAMBA["granitemoehybrid"] | {
    "layer_types": [*["linear_attention", "full_attention"] * 2],
    "attention_bias": True,
    "num_local_experts": 0,
    "mamba_n_groups": 4,
    "position_embedding_type": "rope",
}
MAMBA["nemotron_h_latent"] = MAMBA["nemotron_h"] | {
    "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp", "moe"],
    "moe_latent_size": 28,
}
LATENT: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {
        "model_type": "glm4_moe_lite",
        "initializer_range": 0.2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "kv_lora_rank": 36,
        "q_lora_rank": 28,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "moe_intermediate_size": 40,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.7,
    },
}
LATENT["deepseek_v3"] = LATENT["glm4_moe_lite"] | {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 1,
    "n_group": 4,
    "n_routed_experts": 12,
    "topk_group": 2,
    "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
}
LATENT["deepseek_v3_whole_queries"] = LATENT["deepseek_v3"] | {
    "initializer_range": 0.15,
    "q_lora_rank": None,
}
LATENT["deepseek_v2"] = {
    key: value
    for key, value in LATENT["deepseek_v3_whole_queries"].items()
    if key not in ("n_group", "topk_group")
} | {"model_type": "deepseek_v2", "routed_scaling_factor": 1.0}
EIGHT_HEADS = {
    "num_attention_heads": 8,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "mamba_num_heads": 16,
    "mamba_n_heads": 16,
}
"""Changes to a config of SIZES that let eight ranks share it."""
VARIANTS: dict[str, dict[str, Any]] = {
    # two ranks have whole blocks of 32 inputs, as MXFP4 wants
    "gpt_oss_in_blocks": {**GPT_OSS["gpt_oss"], "intermediate_size": 192},
    "llama3_rope": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "linear_rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    },
    "dynamic_rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    },
    "yarn": {"model_type": "llama", "rope_parameters": YARN},
    "yarn_mscale": {
        "model_type": "qwen3",
        "rope_parameters": {
            **YARN,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
            "beta_fast": 4,
            "truncate": False,
        },
    },
    "longrope": {
        "model_type": "phi3",
        "original_max_position_embeddings": 8,
        "rope_parameters": {
            "rope_type": "longrope",
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.4, 1.8, 2.5],
            "long_factor": [1.2, 1.9, 4.0, 9.0, 20.0, 50.0],
        },
    },
    "qwen2_window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 1,
    },
    "qwen3_window": {
        "model_type": "qwen3",
        "head_dim": 32,
        "use_sliding_window": True,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3_deep": {**FAMILIES["gemma3_text"], "num_hidden_layers": 6, "sliding_window_pattern": 3},
    "gemma4_deep": {
        **FAMILIES["gemma4_text"],
        "num_hidden_layers": 13,
        "initializer_range": 0.15,
        "layer_types": None,  # windows in five of six layers, and none in the last
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
    },
    "gemma4_e_deep": {
        **GEMMA4_E["gemma4_e_text"],
        "num_hidden_layers": 13,
        "layer_types": None,  # windows in five of six layers, and none in the last
        "num_kv_shared_layers": 6,
        "use_double_wide_mlp": False,
        "num_key_value_heads": 1,
    },
    "phi3_window": {"model_type": "phi3", "sliding_window": 24},
    "exaone4_whole": {  # all layers turn, as none has a window
        **FAMILIES["exaone4"],
        "sliding_window": None,
        "layer_types": ["full_attention"] * 2,
    },
    "smollm3_window": {
        "model_type": "smollm3",
        "no_rope_layers": [1, 0],
        "use_sliding_window": True,
        "sliding_window": 24,
    },
    "biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "granite_attention": {
        **MAMBA["granite_rope"],
        "layer_types": ["full_attention"] * 4,
        "tie_word_embeddings": True,
    },
    # transformers' decodes, unlike its prompts, have no limits
    "mamba_limits": {**MAMBA["granite_rope"], "time_step_limit": (0.4, 0.9)},
    "tied": {"model_type": "qwen2", "tie_word_embeddings": True, "num_hidden_layers": 3},
    "sharded": {"model_type": "llama", "num_key_value_heads": 1, "num_hidden_layers": 3},
}


@pytest.fixture
def close_later() -> Iterator[Callable[[Engine], Engine]]:
    """Return a function that passes an engine through and closes it at the end of the test."""
    with ExitStack() as engines:
        yield lambda engine: engines.enter_context(closing(engine))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run torch with one thread, as more would only spin over small tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def forked_followers() -> Iterator[None]:
    """Fork engines' followers from a process that has imported torch, which saves seconds."""
    from tests.engine import forked_followers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(followers, "_start", forked_followers.start)
        yield


class TinyCheckpoints(dict[str, Path]):
    """Checkpoint folders in float32 by name, each saved on first use.

    Names: of FAMILIES, MOE, GEMMA4_MOE, GEMMA4_E, HYBRID, MAMBA, LATENT, GPT_OSS, VARIANTS; "tied "
    before a family's name ties its embeddings.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> Path:
        config = {
            **FAMILIES,
            **MOE,
            **GEMMA4_MOE,
            **GEMMA4_E,
            **HYBRID,
            **MAMBA,
            **LATENT,
            **GPT_OSS,
            **VARIANTS,
        }[name.removeprefix("tied ")]
        if name.startswith("tied "):
            config = config | {"tie_word_embeddings": True}
        self |= save_all({name: config}, self._folder)
        return self[name]


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the session's TinyCheckpoints."""
    return TinyCheckpoints(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def shelf(tmp_path: Path) -> BlobShelf:
    return BlobShelf(tmp_path / "blobs")


@pytest.fixture
def edited(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies a checkpoint and edits its config; None removes a key."""

    def edit(name: str, **changes: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(tiny_checkpoints[name], folder)
        path = folder / "config.json"
        config = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return folder

    return edit


@dataclass
class PagedTokens:
    """Sequences in shuffled pages, and batches of their next tokens.

    windows: window of each group of layers. Each group has as many pages as it would have
    alone.
    """

    device: str = "cpu"
    pages: int = 64
    page_size: int = 16
    windows: tuple[int | None, ...] = (None,)
    lengths: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shuffled = torch.randperm(self.pages, generator=torch.Generator().manual_seed(3))
        self.free: list[int] = shuffled.tolist()

    def batch(self, chunks: dict[str, Sequence[int]]) -> Batch:
        """Make a batch of the next tokens of each named sequence, with logits for every token."""
        ids, positions, places, starts = [], [], [], [0]
        for name, tokens in chunks.items():
            for token in tokens:
                ids.append(token)
                positions.append(self.lengths.get(name, 0))
                places.append(self._next_place(name))
            starts.append(len(ids))
        kv_lengths = np.array([self.lengths[name] for name in chunks], np.int32)
        groups = len(self.windows)
        slots = [
            [(page * groups + group) * self.page_size + at for page, at in places]
            for group in range(groups)
        ]
        tensor = partial(torch.tensor, device=self.device)
        return Batch(
            token_ids=tensor(ids),
            positions=tensor(positions),
            kv_slots=tensor(slots),
            logit_rows=torch.arange(len(ids), device=self.device),
            query_starts=np.array(starts, np.int32),
            kv_lengths=kv_lengths,
            page_tables=tuple(self._page_table(chunks, group) for group in range(groups)),
            segments=None,
            states=self._state_rows(chunks),
        )

    def _state_rows(self, chunks: dict[str, Sequence[int]]) -> StateRows:
        """Return the places of states: each sequence has the slot of its first page."""
        uses = [StateUse(self.tables[name][0], None, ()) for name in chunks]
        begins = [self.lengths[name] == len(tokens) for name, tokens in chunks.items()]
        starts = np.cumsum([0, *map(len, chunks.values())])
        return StateInput.of(uses, begins, starts).upload(torch.device(self.device))

    @property
    def all_pages(self) -> int:
        """Number of pages of all groups."""
        return self.pages * len(self.windows)

    def _page_table(self, chunks: dict[str, Sequence[int]], group: int) -> PageTable:
        """Return the page table of a group, from the first page that the chunks' first tokens
        attend to.
        """
        window, groups, tables, lengths = self.windows[group], len(self.windows), [], []
        for name, tokens in chunks.items():
            first = self.lengths[name] - len(tokens)
            unseen = 0 if window is None else max(0, first + 1 - window) // self.page_size
            pages = self.tables[name][unseen:]
            tables.append(array("i", [page * groups + group for page in pages]))
            lengths.append(self.lengths[name] - unseen * self.page_size)
        return PageTable.of(tables, np.array(lengths, np.int32), self.page_size)

    def _next_place(self, name: str) -> tuple[int, int]:
        position = self.lengths.get(name, 0)
        table = self.tables.setdefault(name, [])
        if position % self.page_size == 0:
            table.append(self.free.pop())
        self.lengths[name] = position + 1
        return table[-1], position % self.page_size


@pytest.fixture
def paged_tokens() -> Callable[..., PagedTokens]:
    return PagedTokens


def save_all(configs: dict[str, dict[str, Any]], folder: Path) -> dict[str, Path]:
    """Save random checkpoints in float32 of SIZES and each config; return their folders by name."""
    for name, config in configs.items():
        _save(config, folder / name, shard_size="100KB" if name == "sharded" else "1GB")
    return {name: folder / name for name in configs}


def _save(config: dict[str, Any], folder: Path, shard_size: str) -> None:
    settings = {**SIZES, **config}
    family = settings.pop("model_type")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(family, **settings), dtype=torch.float32
        )
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("inv_freq"):
                continue
            if weight.dim() == 1 or name.endswith(
                "_bias"
            ):  # norms start as 1 and biases as 0, which would hide them
                weight.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
            if name.endswith("router.scale"):  # so that experts are clearly chosen
                weight.data = (1.0 + weight.data) * len(weight) ** 0.5
            if "gemma4" in family and name.endswith("q_norm.weight"):
                weight.data /= len(weight) ** 0.5  # scores have no such divisor of their own
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # starts as 1
                buffer.normal_(0.8, 0.2)
    model.save_pretrained(folder, max_shard_size=shard_size)
