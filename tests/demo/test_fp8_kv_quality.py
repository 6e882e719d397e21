"""Quality of the demo's model with an FP8 KV cache, with and without its adapters."""

from statistics import mean

import pytest

from demo.tasks import TASKS
from tests.demo.conftest import MODEL
from tests.engine.blob_shelf import BlobShelf
from tests.engine.engine_driver import Answers, build, greedy

PROMPTS = 2  # of each task, with its adapter and without


@pytest.fixture
def asked(tmp_path, tokenizer):
    """Return the source of adapters, and adapters and prompts by request."""
    shelf, asked = BlobShelf(tmp_path / "blobs"), {}
    for task in TASKS:
        ref = shelf.add(MODEL.parent / "adapters" / task.model, task.name, task.tenant)
        for i, pair in enumerate(task.held_out_pairs(PROMPTS, seed=5)):
            message = [{"role": "user", "content": pair.prompt}]
            ids = tokenizer.apply_chat_template(
                message, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            asked[f"{task.model} {i}"] = ref, ids
            asked[f"base {task.model} {i}"] = None, ids
    return shelf, asked


def answered(shelf, asked, cache_dir, followed=None, **settings):
    """Return greedy answers, and log probabilities of prompts and answers, by request.

    followed: answers to score; None for the engine's own.
    """
    engine = build(MODEL, shelf, cache_dir, kv_pages=2000, **settings)
    answers = Answers(engine)
    for name, (adapter, ids) in asked.items():
        answers.submit(greedy(name, ids, adapter=adapter, max_tokens=40, ignore_eos=False))
    answers.all()
    made = {name: answers.of(name) for name in asked}
    for name, (adapter, ids) in asked.items():
        text = ids + (followed or made)[name]
        way = {"max_tokens": 1, "prompt_logprobs": 1}
        answers.submit(greedy(f"scored {name}", text, adapter=adapter, **way))
    answers.all()
    engine.close()
    scores = {
        name: [score.logprob for score in answers.scores[f"scored {name}", 0]] for name in asked
    }
    return made, scores


def equal(tokens, others):
    """Return the number of tokens before the first difference."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(others)))


def test_answers_stay_exact_with_an_fp8_kv_cache(asked, tmp_path):
    shelf, asked = asked
    made, scores = answered(shelf, asked, tmp_path / "cache")
    fp8_made, fp8_scores = answered(shelf, asked, tmp_path / "cache", made, kv_dtype="fp8")
    for base in (False, True):
        names = [name for name in asked if name.startswith("base ") == base]
        tokens = sum(len(made[name]) for name in names)
        same = sum(equal(made[name], fp8_made[name]) for name in names) / tokens
        apart = mean(
            abs(a - b)
            for name in names
            for a, b in zip(scores[name], fp8_scores[name], strict=True)
        )
        assert same > 0.98  # 1.0 of 394 tokens with adapters, of 615 without
        assert apart < 0.08  # 0.025 with adapters, 0.0025 without
