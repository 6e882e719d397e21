"""What schemas force comes in fewer steps, and is token for token what masks alone let be said."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.benchmarks.random_model import random_model, write_config
from loadtest.schemas import SCHEMAS
from lorikeet.protocol.messages import Call, Endpoint, FinalUsage, Format, StreamItem
from lorikeet.replica.grammar import ModelGrammars, grammar_of
from lorikeet.replica.replica import Replica
from lorikeet.settings import Settings
from lorikeet_engine.engine import Engine, EngineSettings
from lorikeet_engine.models.llama import load_model
from lorikeet_engine.request import Request, SamplingParams
from tests.engine.blobs import Shelf
from tests.engine.engine_driver import Answers
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
WAYS = [{"temperature": 0.0}, *({"temperature": 1.0, "seed": seed} for seed in range(3))]


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


def ask(model: Path, folder: Path, requests: list[Request], room: int) -> Answers:
    """room: how many tokens that are forced a step may compute."""
    torch.set_num_threads(1)
    cache, sizes = folder / "cache", {"max_running": 32, "max_batch_tokens": 32 + room}
    of_engine = EngineSettings(model=model, cache_dir=cache, kv_bytes=16 << 20, **sizes)
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


@pytest.mark.parametrize("model", ["demo", "words"], indirect=True)
@pytest.mark.parametrize("name", SCHEMAS)
def test_each_schema_is_answered_with_the_same_tokens_in_fewer_steps(
    model: Path, name: str, tmp_path: Path
) -> None:
    grammar = grammar_of(json.dumps(SCHEMAS[name]))
    requests = [
        Request(f"{i}", (PROMPT,), SamplingParams(400, grammar=grammar, **way), n=2)
        for i, way in enumerate(WAYS)
    ]
    at_once, masked = (ask(model, tmp_path, requests, room) for room in (128, 0))
    assert at_once.tokens == masked.tokens
    assert at_once.finish == masked.finish
    assert all(len(o.token_ids) == 1 for outputs in masked.outputs.values() for o in outputs)
    spared = {key: saved(model, grammar, said) for key, said in at_once.tokens.items()}
    assert steps(at_once) == {key: len(at_once.tokens[key]) - spared[key] for key in spared}
    assert all(spared.values())


CALL = Call(
    request_id="r",
    endpoint=Endpoint.COMPLETIONS,
    created=0,
    tenant="acme",
    model="demo",
    adapter=None,
    prompts=("Tell me about it.",),
    max_tokens=200,
    sampling=SamplingParams(seed=4),
    format=Format(json.dumps(SCHEMAS["enums"])),
)
CALLS = [
    replace(CALL, request_id=name, **more)
    for name, more in {
        "whole": {},
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
    """Of each call what a client reads of text, token ids and log probabilities, and its usage."""
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


def test_clients_read_the_same_and_pay_the_same(tmp_path: Path) -> None:
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
    """What does not depend on how many steps there were."""
    return {name: (*said, replace(usage, timings=())) for name, (*said, usage) in answers.items()}
