"""Train an adapter of the demo model with TRL's AsyncGRPOTrainer, as docs/training.md says.

Needs TRL. The reward is the share of vowels in an answer. Prints as JSON the number of versions
that the trainer loaded, and of the first step the mean ratio of its own probabilities of tokens to
those that the service returned. Environment: SERVICE_URL, with the keys. Arguments: a folder that
the service may load from, and the number of steps.
"""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_rollout_worker,
    packing,
)

ROOT = Path(__file__).parents[2]
WORDS = ("river", "stone", "light", "garden", "winter", "bread", "music", "paper")


def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    texts = [said[0]["content"] for said in completions]
    return [sum(map("aeiou".count, text)) / max(1, len(text)) for text in texts]


def attention_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    *_: int,
    softmax_scale: float,
    **__: Any,
) -> torch.Tensor:
    """Return causal attention of segments, whose last query sees the segment's last key.

    query [tokens, heads, width]; key and value [tokens, kv heads, width]; ends: [segments + 1].
    """
    parts = []
    for segment in range(len(query_ends) - 1):
        q = query[query_ends[segment] : query_ends[segment + 1]]
        k, v = (x[key_ends[segment] : key_ends[segment + 1]] for x in (key, value))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [heads, tokens, width]
        attended = F.scaled_dot_product_attention(q, k, v, seen, scale=softmax_scale)
        parts.append(attended.transpose(0, 1))
    return torch.cat(parts)


# TRL wants a GPU, its kernel of attention, and vLLM's package, of which rollouts use nothing.
torch.cuda.get_device_name = lambda *_: "cpu"
packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention_on_cpu)
async_rollout_worker.is_vllm_available = lambda: True


def main(folder: str, steps: int) -> None:
    prompts = [[{"role": "user", "content": f"Tell me about a {word}."}] for word in WORDS]
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo/model")
    # TRL knows how to parse answers of some chat templates, and is told for others.
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|assistant|>",
        "fields": {"content": {"close_pattern": re.escape(tokenizer.eos_token), "content": "text"}},
    }
    trainer = AsyncGRPOTrainer(
        model=str(ROOT / "demo/model"),
        reward_funcs=reward,
        args=AsyncGRPOConfig(
            output_dir=folder,
            vllm_server_base_url=os.environ["SERVICE_URL"],
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=16,
            max_staleness=1,
            learning_rate=3e-3,
            max_steps=steps,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=8,
            lora_alpha=16,
            target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
        ),
    )
    trainer.train()
    ratios = [log["ratio"] for log in trainer.state.log_history if "ratio" in log]
    print(json.dumps({"versions": trainer.model_version, "ratio": ratios[0]}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
