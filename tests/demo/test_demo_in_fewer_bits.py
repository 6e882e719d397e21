"""The trained demo model in FP8 and in 4 bits answers nearly as in floats, alone and fine-tuned.

Each test prints the share of equal greedy tokens and the mean difference of log probabilities:
over stories, and over the right answers to chats.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from demo.sentences import story
from demo.tasks import TASKS, Task
from lorikeet_engine.engine import Engine, EngineSettings
from lorikeet_engine.request import Request, SamplingParams
from tests.demo.conftest import MODEL
from tests.engine.blob_shelf import BlobShelf
from tests.engine.engine_driver import Answers
from tests.engine.models.quantized_checkpoints import write_rounded

TEXTS = 4
EQUAL = {"fp8": 0.98, "nf4": 0.97, "awq": 0.97, "gptq": 0.97}
"""Least share of equal tokens of stories, by format."""
SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> BlobShelf:
    return BlobShelf(tmp_path_factory.mktemp("blobs"))


@pytest.fixture(scope="module")
def floats(shelf: BlobShelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    yield from engine_of(MODEL, "auto", shelf, tmp_path_factory)


@pytest.fixture(scope="module", params=EQUAL)
def kind(request: pytest.FixtureRequest) -> str:
    """Return a format of the linears: integers of 4 bits in groups of 32 by rounding, or FP8."""
    return str(request.param)


@pytest.fixture(scope="module")
def engines(
    kind: str, floats: Engine, shelf: BlobShelf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Engine]]:
    """Return an engine of floats and an engine of the format."""
    if kind in ("fp8", "nf4"):
        made = engine_of(MODEL, kind, shelf, tmp_path_factory)
    else:
        folder = tmp_path_factory.mktemp(kind) / "model"
        order = in_another_order if kind == "gptq" else None
        checkpoint, _ = write_rounded(MODEL, folder, order)
        made = engine_of(checkpoint, "packed", shelf, tmp_path_factory)
    for engine in made:
        yield [floats, engine]


def engine_of(
    model: Path, weight_dtype: str, shelf: BlobShelf, folders: pytest.TempPathFactory
) -> Iterator[Engine]:
    settings = EngineSettings(
        model,
        folders.mktemp(weight_dtype),
        weight_dtype=weight_dtype,
        max_batch_tokens=512,  # length of a text; the start measures steps of this size
    )
    engine = Engine(settings, shelf)
    yield engine
    engine.close()


def in_another_order(d_in: int) -> torch.Tensor:
    """Return groups of 32 inputs as act-order leaves them."""
    order = torch.randperm(d_in, generator=torch.Generator().manual_seed(1))
    return (torch.arange(d_in) // 32)[order]


@functools.cache  # each format is compared with the same scores of floats
def scores(engine: Engine, ids: tuple[int, ...], adapter: Any = None) -> list[Any]:
    """Return the log probability of each token of a text but the first."""
    answers = Answers(engine)
    answers.submit(Request("r", (ids,), SCORED, adapter=adapter))
    answers.all()
    return answers.scores["r", 0]


def compare(engines: list[Engine], texts: Iterator[tuple[list[int], int]], adapter: Any = None):
    """Compare the scores of texts; return the share of equal tokens and the mean difference."""
    pairs = list[tuple[Any, Any]]()
    for ids, begin in texts:
        ours, theirs = (scores(engine, tuple(ids), adapter)[begin - 1 :] for engine in engines)
        pairs += zip(ours, theirs, strict=True)
    equal = sum(a.top[0][0] == b.top[0][0] for a, b in pairs) / len(pairs)
    difference = sum(abs(a.logprob - b.logprob) for a, b in pairs) / len(pairs)
    print(f"{len(pairs)} tokens: {equal:.2%} equal, log-probabilities differ by {difference:.5f}")
    return equal, difference


def answers_of(
    chats: list[list[tuple[str, str]]], tokenizer: Any
) -> Iterator[tuple[list[int], int]]:
    for chat in chats:
        messages = [{"role": role, "content": text} for role, text in chat]
        asked = tokenizer.apply_chat_template(
            messages[:-1], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        yield ids, len(asked)


def test_the_base_model_gives_stories_nearly_the_same_likelihood(
    kind: str, engines: list[Engine], tokenizer: Any
) -> None:
    stories = [tokenizer(story(Random(seed)))["input_ids"][:500] for seed in range(2 * TEXTS)]
    equal, difference = compare(engines, ((ids, 1) for ids in stories))
    assert equal >= EQUAL[kind]
    assert difference <= 0.01


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.model)
def test_a_fine_tune_answers_as_before(
    task: Task, engines: list[Engine], shelf: BlobShelf, tokenizer: Any
) -> None:
    adapter = shelf.add(MODEL.parent / "adapters" / task.model, task.name, task.tenant)
    pairs = task.held_out_pairs(TEXTS, seed=3)
    chats = [[("user", pair.prompt), ("assistant", pair.answer)] for pair in pairs]
    equal, difference = compare(engines, answers_of(chats, tokenizer), adapter)
    assert equal >= 0.99
    assert difference <= 0.01
