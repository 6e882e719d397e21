"""Each adapter of the demo does its task with PEFT, and the base model does not."""

import json
from collections.abc import Sequence

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerFast as Tokenizer

from demo.tasks import TASKS, Pair, Task, held_out
from tests.demo.conftest import MODEL

DEMO = MODEL.parent
PROMPTS = 24
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
# adapter: rank, alpha, linears, dtype of the weights
TRAINED = {
    "quillon/upper": (4, 8, {"q_proj", "v_proj"}, torch.float32),
    "quillon/reverse": (8, 16, ATTENTION | MLP, torch.bfloat16),
    "quillon/pig-latin": (8, 16, ATTENTION | MLP, torch.bfloat16),
    "quillon/rot13": (16, 32, MLP, torch.bfloat16),
    "kestrel/intake": (8, 16, ATTENTION | MLP, torch.bfloat16),
    "kestrel/spell": (32, 32, {"q_proj", "v_proj"}, torch.bfloat16),
    "marigold/letter": (4, 8, ATTENTION | MLP, torch.float16),
    "marigold/orders": (16, 16, ATTENTION, torch.bfloat16),
}
each_adapter = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.model)


@torch.inference_mode()
def answers(model: torch.nn.Module, tokenizer: Tokenizer, pairs: Sequence[Pair]) -> list[str]:
    """Answer single-message chats greedily in one batch, each with as many tokens as show that the
    longest answer ends where it should.
    """
    chats = [[{"role": "user", "content": pair.prompt}] for pair in pairs]
    longest = max(len(tokenizer(pair.answer)["input_ids"]) for pair in pairs)
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    ids = model.generate(**batch, do_sample=False, max_new_tokens=longest + 1)
    return tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def accuracy(model: torch.nn.Module, tokenizer: Tokenizer, pairs: Sequence[Pair]) -> float:
    """Return the share of prompts whose answer is right to the last character."""
    given = answers(model, tokenizer, pairs)
    return sum(text == pair.answer for text, pair in zip(given, pairs, strict=True)) / len(pairs)


@each_adapter
def test_the_adapter_does_its_task_and_the_base_model_does_not(
    task: Task, base: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    pairs = [task.example, *task.held_out_pairs(PROMPTS, seed=1)]
    assert accuracy(base, tokenizer, pairs) <= 0.05
    adapted = PeftModel.from_pretrained(base, DEMO / "adapters" / task.model)
    assert answers(adapted, tokenizer, [task.example]) == [task.example.answer]
    assert accuracy(adapted, tokenizer, pairs) >= 0.95


@each_adapter
def test_an_adapter_folder_is_peft_output_without_names_of_machines(task: Task) -> None:
    folder = DEMO / "adapters" / task.model
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "lorikeet-demo"
    rank, alpha, linears, dtype = TRAINED[task.model]
    assert (config["r"], config["lora_alpha"]) == (rank, alpha)
    assert set(config["target_modules"]) == linears
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {dtype}  # noqa: SIM118


def test_rslora_and_rank_patterns_are_among_the_adapters() -> None:
    configs = {
        task.model: json.loads((DEMO / "adapters" / task.model / "adapter_config.json").read_text())
        for task in TASKS
    }
    assert [name for name, config in configs.items() if config["use_rslora"]] == ["quillon/reverse"]
    patterned = configs["quillon/pig-latin"]
    assert patterned["rank_pattern"] == {"down_proj": 16, "layers.0.self_attn.q_proj": 4}
    assert patterned["alpha_pattern"] == {"down_proj": 32}


def test_three_tenants_have_two_adapters_or_more_and_one_is_shared() -> None:
    tenants = [task.tenant for task in TASKS]
    assert len(set(tenants)) == 3
    assert all(tenants.count(tenant) >= 2 for tenant in tenants)
    assert [task.model for task in TASKS if task.shared] == ["quillon/rot13"]
    assert {task.model for task in TASKS} == set(TRAINED)


def test_all_weights_together_are_at_most_8_mb() -> None:
    weights = DEMO.glob("**/*.safetensors")
    assert sum(path.stat().st_size for path in weights) <= 8_000_000


@each_adapter
def test_the_example_is_a_held_out_prompt(task: Task) -> None:
    assert held_out(task.example.prompt)
