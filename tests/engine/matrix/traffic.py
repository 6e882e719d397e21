"""One run of an engine in which every feature occurs, and the answers of that run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lorikeet_engine.adapter_format import BaseShape, read_config
from lorikeet_engine.request import EngineTimings, Tokens
from tests.engine.descending_grammar import DescendingGrammars
from tests.engine.engine_driver import Answers, build, greedy, load_adapters, prompt
from tests.engine.matrix.reference import COMPOSITION, SavedFamily, StoredReference
from tests.engine.matrix.storages import Storage
from tests.engine.peft_adapters import invoking

# Names of linears of all families; those of delta nets are fused in Qwen3-Next.
ALL = [
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"),
    *("out_proj", "shared_expert_gate"),
]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all_linears": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "some_linears": {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["v_proj", "down_proj", "in_proj_z", "in_proj_ba"],
        "rank_pattern": {r"layers\.1\.mlp\.down_proj": 12},
        "use_rslora": True,
        "modules_to_save": ["lm_head"],
    },
    "head": {
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "up_proj", "lm_head", "embed_tokens"],
        "rank_pattern": {"lm_head": 12, "embed_tokens": 5},
    },
    "rows": {
        "r": 4,
        "target_modules": ["q_proj", "down_proj"],
        "trainable_token_indices": {
            "embed_tokens": list(range(3, 90, 2)),
            "lm_head": list(range(3, 60, 3)),
        },
    },
    "dora": {
        "r": 5,
        "lora_alpha": 8,
        "target_modules": ALL,
        "rank_pattern": {r"layers\.1\.self_attn\.o_proj": 11},
        "use_rslora": True,
        "use_dora": True,
        "bias": "all",
    },
    "biases": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "o_proj", "down_proj", "in_proj_z", "in_proj_ba"],
        "lora_bias": True,
        "bias": "all",
    },
}
# Added to "head" in a composition; every family has o_proj.
ADDED = {
    "r": 4,
    "lora_alpha": 6,
    "target_modules": ["v_proj", "o_proj", "kv_b_proj"],
    "use_rslora": True,
}
# PEFT activates LoRA of linears alone, and takes those of MLPs for parameters of experts.
ACTIVATED: dict[str, Any] = {
    "r": 6,
    "lora_alpha": 9,
    "target_modules": [
        *("q_proj", "v_proj", "o_proj", "kv_a_proj_with_mqa"),
        *("in_proj", "in_proj_z", "in_proj_qkvz"),
    ],
    "alora_invocation_tokens": [7, 9],
}
WEIGHTS = {"head": 0.75, "added": -0.5}
GRAMMAR = "below 250, end under 1"
TOKENS, TOKENS_ALONE = 12, 4  # of each answer
# Of the first of TOGETHER: while these grow, there are too few pages for all.
LONG, LONG_TOKENS = 4, 30
ENGINE = {"kv_pages": 9, "max_context": 112, "max_batch_tokens": 24, "max_running": 24}
# States of delta nets are saved, to be hit, behind 64 tokens of a step.
HYBRID_ENGINE = ENGINE | {"max_batch_tokens": 64, "state_bytes": 2 << 20}
# (adapter, tokens of the prompt, grammar): more tokens than the KV pages hold at once.
TOGETHER: tuple[tuple[str | None, int, str | None], ...] = (
    (None, 9, None),
    ("some_linears", 17, None),
    ("head", 25, None),
    ("rows", 30, None),
    ("dora", 21, None),
    ("biases", 14, None),
    (COMPOSITION, 19, None),
    ("activated", 22, None),
    ("all_linears", 50, None),
    ("all_linears", 33, None),
    ("some_linears", 13, GRAMMAR),
)
ALONE_TWICE = ("all_linears", 70, None)
BASE_THEN_ACTIVATED = (None, 75, None), ("activated", 75, None)


@dataclass(frozen=True, slots=True)
class Answer:
    """A request and an engine's answer. logprobs: log probability of each token."""

    adapter: str | None
    prompt: Sequence[int]
    grammar: str | None
    tokens: Sequence[int]
    logprobs: Sequence[float]
    timings: EngineTimings


# Features of requests, each with a predicate: True for an answer that shows the feature at work.
FEATURES: Mapping[str, Callable[[Answer], bool]] = {
    "base_model": lambda answer: answer.adapter is None,
    "adapters": lambda answer: answer.adapter in ("all_linears", "some_linears"),
    "head_and_embeddings": lambda answer: answer.adapter == "head",
    "token_rows": lambda answer: answer.adapter == "rows",
    "dora": lambda answer: answer.adapter == "dora",
    "biases": lambda answer: answer.adapter == "biases",
    "activated_lora": lambda answer: answer.adapter == "activated",
    "pages_of_the_base_model": lambda answer: (
        answer.adapter == "activated" and answer.timings.cached_tokens > 0
    ),
    "composition": lambda answer: answer.adapter == COMPOSITION,
    "chunked_prefill": lambda answer: answer.timings.steps > len(answer.tokens),
    "preemption": lambda answer: answer.timings.preemptions > 0,
    "prefix_hit": lambda answer: answer.timings.cached_tokens > 0,
    "structured_output": lambda answer: answer.grammar is not None,
}


def answers_of(
    family: SavedFamily, storage: Storage, checkpoint: Path, folder: Path
) -> list[Answer]:
    """Start an engine; ask all of TOGETHER at once, then ALONE_TWICE twice and those of
    BASE_THEN_ACTIVATED, each time alone.

    checkpoint: checkpoint to serve.
    folder: folder of the engine's cache.
    """
    has_states = BaseShape.from_config(read_config(checkpoint)).recurrent is not None
    settings = HYBRID_ENGINE if has_states else ENGINE
    engine = build(
        checkpoint,
        family.shelf,
        folder,
        grammars=DescendingGrammars(),
        **{**settings, **storage.settings},
    )
    answers = Answers(engine)
    try:
        load_adapters(answers, family.refs.values())
        alone = ALONE_TWICE, ALONE_TWICE, *BASE_THEN_ACTIVATED
        rounds = ((TOGETHER, TOKENS), *(((each,), TOKENS_ALONE) for each in alone))
        return [answer for asked in rounds for answer in _ask(answers, family, *asked)]
    finally:
        engine.close()


def _ask(
    answers: Answers,
    family: SavedFamily,
    asked: Sequence[tuple[str | None, int, str | None]],
    tokens: int,
) -> list[Answer]:
    for name, (adapter, length, grammar) in enumerate(asked):
        request = greedy(
            str(name),
            _prompt(adapter, length),
            adapter=family.refs[adapter],
            max_tokens=LONG_TOKENS if asked is TOGETHER and name < LONG else tokens,
            logprobs=0,
            grammar=grammar,
        )
        answers.submit(request)
    answers.all()
    return [
        _answer(adapter, _prompt(adapter, length), grammar, answers.outputs[str(name), 0])
        for name, (adapter, length, grammar) in enumerate(asked)
    ]


def _prompt(adapter: str | None, length: int) -> list[int]:
    ids = prompt(length)
    return invoking(ids, ACTIVATED["alora_invocation_tokens"]) if adapter == "activated" else ids


def _answer(
    adapter: str | None, ids: list[int], grammar: str | None, outputs: Sequence[Tokens]
) -> Answer:
    tokens = [token for output in outputs for token in output.token_ids]
    logprobs = [score.logprob for output in outputs for score in output.logprobs]
    timings = outputs[-1].timings
    assert timings is not None
    return Answer(adapter, ids, grammar, tokens, logprobs, timings)


def assert_equal(answer: Answer, reference: StoredReference) -> float:
    """Check that each token is the reference's likeliest of the allowed ones, and as likely there.

    Returns the median error of the tokens' log probabilities, as a share of the largest logit.
    """
    ids, tokens = list(answer.prompt), list(answer.tokens)
    logits = reference.logits(answer.adapter, ids, tokens)[len(ids) - 1 : -1]
    largest, tolerance = logits.abs().max(), reference.storage.tolerance
    want = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    errors = (torch.tensor(answer.logprobs) - want).abs() / largest
    assert errors.median() <= tolerance.median
    masked, beyond = 0, errors > tolerance.worst
    for at, (token, row) in enumerate(zip(tokens, logits, strict=True)):
        allowed = _allowed(answer.grammar, tokens[:at])
        assert token in allowed
        beyond[at] |= row[allowed].max() - row[token] > 2 * tolerance.worst * largest
        masked += int(row.argmax()) not in allowed
    assert beyond.sum() <= tolerance.beyond
    assert (masked > 0) == (answer.grammar is not None)
    return float(errors.median())


def _allowed(grammar: str | None, said: Sequence[int]) -> list[int]:
    if grammar is None:
        return list(range(256))
    matcher = DescendingGrammars().compile(grammar)
    for token in said:
        matcher.accept(token)
    return list(matcher.possible)
