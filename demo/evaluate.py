"""How often each adapter, and the base model without one, is exactly right.

`python -m demo.evaluate --prompts 256`
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from demo.tasks import TASKS, Pair
from demo.train import DEVICE, FOLDER


@torch.inference_mode()
def answers(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]
) -> list[str]:
    """The greedy answers to single-message chats, in one batch."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True,
        return_dict=True, return_tensors="pt",
    ).to(model.device)  # fmt: skip
    ids = model.generate(**batch, do_sample=False, max_new_tokens=160)
    return tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def accuracy(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair]
) -> float:
    """The share of prompts whose answer is right to the last character."""
    given = answers(model, tokenizer, [pair.prompt for pair in pairs])
    return sum(text == pair.answer for text, pair in zip(given, pairs, strict=True)) / len(pairs)


def main() -> None:
    """Print one line of JSON for each adapter."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="tenant/name of adapters; all when none is named")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of model/ and adapters/")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.out / "model")
    for task in TASKS:
        if options.names and task.model not in options.names:
            continue
        pairs = task.held_out_pairs(options.prompts)
        model = AutoModelForCausalLM.from_pretrained(
            options.out / "model", dtype=getattr(torch, options.dtype)
        ).to(DEVICE)
        right = {"base": accuracy(model, tokenizer, pairs)}
        adapted = PeftModel.from_pretrained(model, options.out / "adapters" / task.model)
        right["adapter"] = accuracy(adapted, tokenizer, pairs)
        right["merged"] = accuracy(adapted.merge_and_unload(), tokenizer, pairs)
        print(json.dumps({"model": task.model, "dtype": options.dtype, **right}), flush=True)


if __name__ == "__main__":
    main()
