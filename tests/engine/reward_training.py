"""Train a reward model over a base model with TRL's RewardTrainer, on the CPU in a few steps.

Needs TRL. Usage: reward_training.py MODEL OUT

MODEL: folder of the base model and its tokenizer.
OUT: folder for the adapter, as the trainer saves it.
"""

import sys

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

PAIRS = [{"chosen": f"{word} is kind and calm.", "rejected": f"{word}!!!"} for word in "abcdefgh"]


def main(model_folder: str, out: str) -> None:
    """Train the adapter, and save it."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForSequenceClassification.from_pretrained(
        model_folder, num_labels=1, dtype="float32"
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(
            output_dir=f"{out}-runs",
            max_steps=4,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list(PAIRS * 2),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            task_type="SEQ_CLS",
            r=4,
            target_modules=["q_proj", "v_proj", "down_proj"],
            modules_to_save=["score"],
        ),
    )
    trainer.train()
    trainer.save_model(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
