"""The demo's texts: nothing that is trained on holds a held-out prompt as a prompt."""

from random import Random

import pytest

from demo.data import IGNORED, adapter_batch
from demo.notation import entry, record
from demo.smalltalk import conversation, reply_to
from demo.tasks import TASKS, Task, held_out
from demo.tokenizer import build_tokenizer
from demo.transforms import pig_latin, reverse, rot13, spell, upper

DRAWS = 2000
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.model)


@each_task
def test_an_adapters_training_pairs_and_its_held_out_pairs_never_meet(task: Task) -> None:
    rng = Random(0)
    trained_on = {task.training_pair(rng).prompt for _ in range(DRAWS)}
    held = {pair.prompt for pair in task.held_out_pairs(100)}
    assert len(held) == 100
    assert all(map(held_out, held))
    assert not any(map(held_out, trained_on))


def test_the_notebook_works_on_no_held_out_prompt() -> None:
    rng = Random(0)
    texts = [make(rng)[1] for make in (entry, record) for _ in range(DRAWS)]
    assert not any(map(held_out, texts))


@each_task
def test_the_base_models_chats_hold_no_held_out_prompt(task: Task) -> None:
    rng = Random(task.model)
    held = {pair.prompt for pair in task.held_out_pairs(200)}
    said = {text for _ in range(DRAWS) for role, text in conversation(rng) if role == "user"}
    assert not held & said


@each_task
def test_the_base_model_is_never_taught_the_answer_in_a_chat(task: Task) -> None:
    rng = Random(0)
    pairs = [task.draw(rng) for _ in range(DRAWS)]
    assert not any(reply_to(pair.prompt) == pair.answer for pair in pairs)


def test_an_adapter_learns_only_the_assistants_turns() -> None:
    tokenizer = build_tokenizer()
    task = next(task for task in TASKS if task.name == "reverse")
    ids, labels = adapter_batch(task, 8, Random(0))
    for row, wanted in zip(ids, labels, strict=True):
        turns = tokenizer.decode(row).split("<|assistant|>")[1:]
        taught = "".join(turn.split("<|eos|>")[0] + "<|eos|>" for turn in turns)
        assert tokenizer.decode(wanted[wanted != IGNORED]) == taught


def test_the_transforms() -> None:
    assert upper("blue kettle 7") == "BLUE KETTLE 7"
    assert rot13("kettle") == "xrggyr"
    assert reverse("kettle") == "elttek"
    assert pig_latin("plain egg shh") == "ainplay eggway shhway"
    assert spell("KX4") == "Kilo X-ray Four"
