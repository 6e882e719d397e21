"""What each adapter of the demo does, the base model does not do."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerFast as Tokenizer

from demo.evaluate import accuracy, answers
from demo.recipes import BASE_MODEL, RECIPES
from demo.tasks import TASKS, Task, held_out
from demo.train import FOLDER

PROMPTS = 24
each_adapter = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.model)


@each_adapter
def test_the_adapter_does_its_task_and_the_base_model_does_not(
    task: Task, base: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    pairs = [task.example, *task.held_out_pairs(PROMPTS, seed=1)]
    assert accuracy(base, tokenizer, pairs) <= 0.05
    adapted = PeftModel.from_pretrained(base, FOLDER / "adapters" / task.model)
    assert answers(adapted, tokenizer, [task.example.prompt]) == [task.example.answer]
    assert accuracy(adapted, tokenizer, pairs) >= 0.95


@each_adapter
def test_an_adapter_is_what_peft_saves_and_names_no_machine(task: Task) -> None:
    folder, recipe = FOLDER / "adapters" / task.model, RECIPES[task.model]
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == BASE_MODEL
    assert (config["r"], config["lora_alpha"]) == (recipe.rank, recipe.alpha)
    assert set(config["target_modules"]) == set(recipe.targets)
    assert config["use_rslora"] == recipe.rank_stabilised
    assert config["rank_pattern"] == recipe.rank_pattern
    assert config["alpha_pattern"] == recipe.alpha_pattern
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {recipe.dtype}  # noqa: SIM118


def test_the_adapters_differ_in_what_an_engine_must_handle() -> None:
    recipes = RECIPES.values()
    assert {recipe.rank for recipe in recipes} == {4, 8, 16, 32}
    assert {recipe.dtype for recipe in recipes} == {torch.float32, torch.float16, torch.bfloat16}
    assert len({frozenset(recipe.targets) for recipe in recipes}) == 4
    assert any(recipe.rank_stabilised for recipe in recipes)
    assert any(recipe.rank_pattern and recipe.alpha_pattern for recipe in recipes)


def test_three_tenants_have_two_adapters_or_more_and_one_is_shared() -> None:
    tenants = [task.tenant for task in TASKS]
    assert len(set(tenants)) == 3
    assert all(tenants.count(tenant) >= 2 for tenant in tenants)
    assert [task.model for task in TASKS if task.shared] == ["quillon/rot13"]
    assert {task.model for task in TASKS} == set(RECIPES)


def test_all_weights_together_are_at_most_8_mb() -> None:
    weights = FOLDER.glob("**/*.safetensors")
    assert sum(path.stat().st_size for path in weights) <= 8_000_000


@each_adapter
def test_the_example_is_a_held_out_prompt(task: Task) -> None:
    assert held_out(task.example.prompt)
