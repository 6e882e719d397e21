"""A replica with a thinking model: the demo model with two tokens renamed to the tags."""

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lorikeet.protocol.messages import Call, Endpoint, Format, FormatKind
from lorikeet.replica.replica import Replica
from lorikeet.settings import Settings
from lorikeet.text.prompts import PromptEncoder
from lorikeet_engine.request import SamplingParams
from tests.serving.local_gateway import answer_of
from tests.text.test_prompts import DEMO

TAGS = {"<|system|>": "<think>", "<|pad|>": "</think>"}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "<|assistant|>{{ '<think></think>' if quick else '<think>' }}\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(DEMO, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        for token, tag in TAGS.items():
            text = text.replace(token, tag)
        (folder / name).write_text(text)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def bodies(model: Path, *calls: Call) -> list[Any]:
    """JSON bodies of the replica's answers."""
    given = {
        "LORIKEET_BASE_MODELS": f"thinker={model}",
        "LORIKEET_CATALOG": str(model.parent / "catalog"),
        "LORIKEET_CACHE_DIR": str(model.parent / "cache"),
    }

    async def inside() -> list[Any]:
        replica = Replica("r0", "thinker", Settings.from_env(given))
        try:
            return [json.loads([item async for item in answer_of(replica, c)][-1]) for c in calls]
        finally:
            replica.close()

    return asyncio.run(inside())


def call_of(model: Path, **fields: Any) -> Call:
    closing = PromptEncoder(model).vocabulary.added["</think>"]
    return Call(
        "r1",
        Endpoint.CHAT,
        0,
        "acme",
        "thinker",
        None,
        messages=({"role": "user", "content": "once upon"},),
        max_tokens=120,
        n=4,
        sampling=SamplingParams(temperature=1, seed=7, logit_bias=((closing, 12.0),)),
        **fields,
    )


def test_a_model_thinks_and_then_keeps_to_its_grammar(model: Path) -> None:
    held = call_of(model, format=Format('["red", "green"]', FormatKind.CHOICES))
    told = {"quick": True}
    thinks, is_quick, free = bodies(
        model, held, replace(held, template_args=told), replace(held, format=None)
    )
    for body in (thinks, is_quick):
        for choice in body["choices"]:
            assert choice["message"]["content"] in ("red", "green")
            assert choice["finish_reason"] == "stop"
    assert all(choice["message"]["reasoning_content"] for choice in thinks["choices"])
    assert 4 < reasoning_tokens(thinks) < thinks["usage"]["completion_tokens"]
    assert not any("reasoning_content" in choice["message"] for choice in is_quick["choices"])
    assert reasoning_tokens(is_quick) == 0
    # nothing made it close its tag before it came to an end
    assert {choice["message"]["content"] for choice in free["choices"]} == {""}
    assert reasoning_tokens(free) == free["usage"]["completion_tokens"]


def reasoning_tokens(body: Any) -> int:
    tokens: int = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return tokens
