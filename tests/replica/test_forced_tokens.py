"""Forced tokens take fewer steps, and are the tokens that masks alone would allow."""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from loadtest.engine.random_model import random_model, write_config
from lorikeet.protocol.messages import Call, Endpoint, FinalUsage, Format, StreamItem
from lorikeet.replica.grammar_matcher import ModelGrammars, TextMatcher
from lorikeet.replica.replica import Replica
from lorikeet.settings import Settings
from lorikeet.text.grammars.format_grammar import schema_grammar
from lorikeet_engine.engine import Engine, EngineSettings
from lorikeet_engine.models.llama import load_model
from lorikeet_engine.request import Request, SamplingParams
from tests.engine.blobs import Shelf
from tests.engine.engine_driver import Answers
from tests.engine.half_right import draft_half_right
from tests.replica.schemas import SCHEMAS
from tests.serving.local_gateway import answer_of

DEMO = Path(__file__).parents[2] / "demo" / "model"
SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "eos_token_id": 1,
}
PROMPT = (5, 6, 7)
Answered = tuple[str, list[object], FinalUsage]
OFTEN = {("nested", "words"), ("enums", "demo")}  # of each kind of model; the others in make soak
WAYS = [({"temperature": 0.0}, 1), ({"temperature": 1.0, "seed": 0}, 2)]  # and choices


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokens are parts of words, as those of real ones are."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
    )
    tokenizer.train_from_iterator([json.dumps(SCHEMAS), Path(__file__).read_text()], trainer)
    folder = tmp_path_factory.mktemp("words")
    write_config(folder, SHAPE | {"vocab_size": tokenizer.get_vocab_size()})
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def model(request: pytest.FixtureRequest, words: Path) -> Path:
    return DEMO if request.param == "demo" else words


def ask(
    model: Path, folder: Path, requests: list[Request], room: int, speculation: str = "off"
) -> Answers:
    """room: how many tokens that are forced a step may compute."""
    torch.set_num_threads(1)
    cache, sizes = folder / "cache", {"max_running": 32, "max_batch_tokens": 32 + room}
    of_engine = EngineSettings(
        model=model, cache_dir=cache, kv_bytes=16 << 20, speculation=speculation, **sizes
    )
    load = load_model if model == DEMO else random_model
    answers = Answers(Engine(of_engine, Shelf(folder / "blobs"), load, ModelGrammars(model)))
    for request in requests:
        answers.submit(request)
    answers.until(lambda: not answers.pending, timeout_s=240)
    answers.engine.close()
    return answers


def steps(answers: Answers) -> dict[tuple[str, int], int]:
    """In how many steps each choice took part."""
    ends = {key: outputs[-1].timings for key, outputs in answers.outputs.items()}
    return {key: end.steps for key, end in ends.items() if end is not None}


def saved(model: Path, grammar: str, said: list[int]) -> int:
    """The steps that need not be for an answer, as its grammar has it."""
    matcher, spared, at = ModelGrammars(model).compile(grammar), 0, 0
    while at < len(said):
        run = min(max(1, len(matcher.forced_tokens())), len(said) - at)
        spared += run - 1
        for token in said[at : at + run]:
            matcher.accept(token)
        at += run
    return spared


@pytest.mark.parametrize(
    ("name", "model"),
    [
        pytest.param(name, model, marks=[] if (name, model) in OFTEN else [pytest.mark.soak])
        for name in SCHEMAS
        for model in ("demo", "words")
    ],
    indirect=["model"],
)
def test_each_schema_is_answered_with_the_same_tokens_in_fewer_steps(
    model: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = schema_grammar(json.dumps(SCHEMAS[name]))
    requests = [
        Request(f"{i}", (PROMPT,), SamplingParams(200, grammar=grammar, **way), n=n)
        for i, (way, n) in enumerate(WAYS)
    ]
    at_once, masked = (ask(model, tmp_path, requests, room) for room in (128, 0))
    assert at_once.tokens == masked.tokens
    assert at_once.finish == masked.finish
    assert all(len(o.token_ids) == 1 for outputs in masked.outputs.values() for o in outputs)
    spared = {key: saved(model, grammar, said) for key, said in at_once.tokens.items()}
    assert steps(at_once) == {key: len(at_once.tokens[key]) - spared[key] for key in spared}
    assert all(spared.values())
    draft_half_right(monkeypatch, lambda *choice: at_once.tokens[choice])
    drafted = ask(model, tmp_path, requests, 128, "lookup")
    assert drafted.tokens == at_once.tokens
    assert drafted.finish == at_once.finish
    assert all(steps(drafted)[choice] < taken for choice, taken in steps(at_once).items())


def mask_of(grammars: ModelGrammars, matcher: TextMatcher) -> list[int]:
    """The tokens that may follow."""
    bits = np.zeros((1, 64), np.uint8)
    assert grammars.fill_bitmasks([matcher], bits) == [None]
    return list(np.flatnonzero(np.unpackbits(bits[0], bitorder="little")))


@pytest.mark.parametrize("model", ["demo", "words"], indirect=True)
@pytest.mark.parametrize("name", SCHEMAS)
def test_masks_of_forced_tokens_equal_llguidances_own(model: Path, name: str) -> None:
    grammars, dice, forced = ModelGrammars(model), random.Random(0), 0
    compiled = grammars.compile(schema_grammar(json.dumps(SCHEMAS[name])))
    for _ in range(4):
        matcher, said = compiled.copy(), 0
        while not matcher.must_end and said < 300:
            words = np.zeros((1, -(-grammars.tokenizer("").vocab_size // 32)), np.int32)
            fresh = matcher.state.deep_copy()
            fill_next_token_bitmask_par(grammars._executor, [(fresh, 0)], words)
            want = set(np.flatnonzero(np.unpackbits(words.view(np.uint8)[0], bitorder="little")))
            allowed = mask_of(grammars, matcher)
            assert set(allowed) == want - set(grammars.tokenizer("").eos_tokens)
            forced += len(matcher.forced_tokens()) > 1
            if not allowed:
                break
            matcher.accept(int(dice.choice(allowed)))
            said += 1
    assert forced > 5


class Counting:
    """An LLMatcher that counts how often it is asked what must follow."""

    def __init__(self, state: LLMatcher) -> None:
        self._state, self.asked = state, 0

    def compute_ff_tokens(self) -> list[int]:
        self.asked += 1
        return self._state.compute_ff_tokens()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


def test_llguidance_is_asked_once_for_a_long_forced_text(words: Path) -> None:
    text = "adapter of a base model, " * 200
    grammars = ModelGrammars(words)
    matcher = grammars.compile(schema_grammar(json.dumps({"const": text})))
    copies = [matcher.copy() for _ in range(3)]
    for each in copies:
        each.state = counting = Counting(each.state)  # type: ignore[assignment]
        for _ in range(1000):
            (token,) = mask_of(grammars, each)
            told = each.forced_tokens()
            assert told[0] == token
            assert 1 < len(told) <= 256
            each.accept(int(token))
        assert counting.asked == 0


CALL = Call(
    request_id="r",
    endpoint=Endpoint.COMPLETIONS,
    created=0,
    tenant="acme",
    model="demo",
    adapter=None,
    prompts=("Tell me about it.",),
    max_tokens=80,
    sampling=SamplingParams(seed=4),
    format=Format(json.dumps(SCHEMAS["enums"])),
)
CALLS = [
    replace(CALL, request_id=name, **more)
    for name, more in {
        "whole": {"max_tokens": 200},
        "streamed": {"stream": True, "include_usage": True},
        "ended within what is forced": {"stop": ("ngu",)},
        "ended within what is forced, streamed": {
            "stop": ("ngu",),
            "stream": True,
            "include_usage": True,
        },
        "cut within what is forced": {"max_tokens": 5},
        "several": {"n": 3},
        "with log probabilities": {"sampling": SamplingParams(seed=4, logprobs=2)},
        "with a penalty": {"sampling": SamplingParams(seed=4, frequency_penalty=0.5)},
        "with token ids": {"return_token_ids": True},
    }.items()
]


def answered(
    folder: Path, batch_tokens: int, number: Callable[[str], object] = float
) -> dict[str, Answered]:
    """Text, token ids, log probabilities and usage of each call."""
    given = {
        "LORIKEET_BASE_MODELS": f"demo={DEMO}",
        "LORIKEET_CATALOG": str(folder / "catalog"),
        "LORIKEET_CACHE_DIR": str(folder / "cache"),
        "LORIKEET_MAX_RUNNING": "4",
        "LORIKEET_MAX_BATCH_TOKENS": f"{batch_tokens}",
    }

    async def inside() -> dict[str, list[StreamItem]]:
        replica = Replica("r0", "demo", Settings.from_env(given))
        try:
            return {c.request_id: [i async for i in answer_of(replica, c)] for c in CALLS}
        finally:
            replica.close()

    answers = asyncio.run(inside())
    return {call.request_id: read(call, answers[call.request_id], number) for call in CALLS}


def read(call: Call, items: list[StreamItem], number: Callable[[str], object]) -> Answered:
    (usage,) = (item for item in items if isinstance(item, FinalUsage))
    body = b"".join(item for item in items if isinstance(item, bytes))
    events = [line[6:] for line in body.split(b"\n\n") if line.startswith(b"data: {")]
    parsed = partial(json.loads, parse_float=number)
    parts = [parsed(event) for event in events] if call.stream else [parsed(body)]
    choices = [choice for part in parts for choice in part["choices"]]
    text = "".join(choice["text"] for choice in choices)
    told = [(c.get("token_ids"), c["logprobs"]) for c in choices if not call.stream]
    return text, [told, choices[-1]["finish_reason"]], usage


def test_forced_tokens_change_neither_answers_nor_usage(tmp_path: Path) -> None:
    at_once = answered(tmp_path, 64, lambda text: pytest.approx(float(text), abs=1e-3))
    masked = answered(tmp_path, 4)
    assert without_timings(at_once) == without_timings(masked)
    for name, (*_, usage) in at_once.items():
        is_slow = name in ("with log probabilities", "with a penalty")
        assert (sum(t.steps for t in usage.timings) < usage.completion_tokens) != is_slow, name
    for way in ("", ", streamed"):
        text, (_, finish), usage = at_once[f"ended within what is forced{way}"]
        assert text.endswith('"la')
        assert finish == "stop"
        assert usage.completion_tokens == len(f"{text}ngu")
    assert at_once["cut within what is forced"][2].completion_tokens == 5


def without_timings(answers: dict[str, Answered]) -> dict[str, Answered]:
    """Parts of answers that do not depend on the number of steps."""
    return {name: (*said, replace(usage, timings=())) for name, (*said, usage) in answers.items()}
