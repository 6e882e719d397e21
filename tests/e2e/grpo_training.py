"""Train an adapter of the demo model with TRL's GRPO and the rollouts of docs/training.md.

Needs TRL. The reward is the share of vowels in an answer. Prints the mean reward of each step as
JSON. Environment: SERVICE, KEY, PUBLISH_KEY. Arguments: a folder, and the number of steps.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

ROOT = Path(__file__).parents[2]
WORDS = ("river", "stone", "light", "garden", "winter", "bread", "music", "paper")


def documented() -> dict[str, Any]:
    """Run the document's code against the service; return the names that it defines."""
    text = (ROOT / "docs" / "training.md").read_text()
    (code,) = re.findall("^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    address, key, publish = (os.environ[name] for name in ("SERVICE", "KEY", "PUBLISH_KEY"))
    client = f"Client({address!r}, key={key!r}, publish_key={publish!r})"
    space: dict[str, Any] = {}
    exec(re.sub(r"(?<== )Client\(.*\)", client, code), space)
    return space


def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    texts = [said["content"] for (said,) in completions]
    return [sum(map("aeiou".count, text)) / max(1, len(text)) for text in texts]


def main(folder: str, steps: int) -> None:
    code = documented()
    prompts = [[{"role": "user", "content": f"Tell me about a {word}."}] for word in WORDS]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(ROOT / "demo/model", dtype="float32"),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=32,
            num_generations=16,
            max_completion_length=24,
            temperature=2.0,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            max_steps=steps,
            save_steps=steps,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=AutoTokenizer.from_pretrained(ROOT / "demo/model"),
        peft_config=LoraConfig(
            r=8,
            lora_alpha=16,
            target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
        ),
        rollout_func=code["rollout"],
        callbacks=[code["PushCheckpoints"]()],
    )
    trainer.train()
    print(json.dumps([log["reward"] for log in trainer.state.log_history if "reward" in log]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
