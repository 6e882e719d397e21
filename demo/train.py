"""Train the base model, or one adapter on it.

`python -m demo.train base`, then `python -m demo.train adapter quillon/reverse` and the others.
"""

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from demo.data import EOS_ID, PAD_ID, adapter_batch, corpus, windows
from demo.recipes import BASE_MODEL, RECIPES
from demo.tasks import TASKS, Task
from demo.tokenizer import CONTEXT, build_tokenizer

FOLDER = Path(__file__).parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def base_config() -> LlamaConfig:
    """5 layers, 2.5 million parameters; head size 64 because GPU attention kernels want it."""
    tokenizer = build_tokenizer()
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def train_base(out: Path, steps: int, batch: int, tokens: int) -> None:
    """Write model, tokenizer and chat template of the base model to `out`; bf16."""
    torch.manual_seed(0)
    stream = corpus(tokens, seed=1, processes=os.cpu_count() or 1).to(DEVICE)
    print(f"corpus: {len(stream):,} tokens", flush=True)
    generator = torch.Generator(DEVICE).manual_seed(0)
    model = LlamaForCausalLM(base_config()).to(DEVICE)
    batches = ((ids, ids) for ids in iter(lambda: windows(stream, batch, CONTEXT, generator), None))
    fit(model, batches, steps, learning_rate=2e-3, weight_decay=0.1, name=BASE_MODEL)
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    model.to(torch.bfloat16).save_pretrained(out)
    build_tokenizer().save_pretrained(out)


def train_adapter(task: Task, base: Path, out: Path, steps: int | None, batch: int) -> None:
    """Write one adapter as PEFT saves it to `out`/tenant/name."""
    torch.manual_seed(0)
    recipe, rng = RECIPES[task.model], Random(task.model)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(DEVICE), recipe.config()
    )
    batches = iter(lambda: adapter_batch(task, batch, rng), None)
    fit(model, batches, steps or recipe.steps, 3e-3, weight_decay=0.0, name=task.model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(recipe.dtype)
    model.peft_config["default"].base_model_name_or_path = BASE_MODEL
    folder = out / task.tenant / task.name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card


def fit(
    model: torch.nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    learning_rate: float,
    weight_decay: float,
    name: str,
) -> None:
    """AdamW over `steps` batches of (ids, labels): short warm-up, then linearly down to zero."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, learning_rate, (0.9, 0.95), weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_up_then_down(steps))
    model.train()
    started = time.perf_counter()
    for step, (ids, labels) in zip(range(steps), batches, strict=False):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            loss = model(input_ids=ids.to(DEVICE), labels=labels.to(DEVICE)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0 or step == steps - 1:
            elapsed_s = time.perf_counter() - started
            print(f"{name} step {step}: loss {loss.item():.4f}, {elapsed_s:.1f} s", flush=True)
    model.eval()


def _warm_up_then_down(steps: int) -> Callable[[int], float]:
    warm_up = max(1, min(200, steps // 20))
    return lambda step: min((step + 1) / warm_up, (steps - step) / (steps - warm_up or 1))


def main() -> None:
    """Parse the command line and train what it asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("base", "adapter"))
    parser.add_argument("name", nargs="?", choices=[task.model for task in TASKS])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of model/ and adapters/")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--tokens", type=int, default=250_000_000, help="size of the base's corpus")
    options = parser.parse_args()
    base, adapters = options.out / "model", options.out / "adapters"
    if options.what == "base":
        train_base(base, options.steps or 9000, options.batch or 64, options.tokens)
    else:
        task = next(task for task in TASKS if task.model == options.name)
        train_adapter(task, base, adapters, options.steps, options.batch or 128)


if __name__ == "__main__":
    main()
