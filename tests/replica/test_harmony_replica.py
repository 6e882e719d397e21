"""A replica with a model in Harmony: the demo model, whose special tokens are renamed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lorikeet.protocol.messages import Call, Endpoint, Format, ToolUse
from lorikeet.text.prompts import PromptEncoder
from lorikeet_engine.request import SamplingParams
from tests.replica.harmony_model import TEMPLATE
from tests.replica.test_thinking_replica import bodies
from tests.text.test_prompts import DEMO

MARKS = {
    "<|bos|>": "<|start|>",
    "<|eos|>": "<|return|>",
    "<|pad|>": "<|call|>",
    "<|system|>": "<|channel|>",
    "<|user|>": "<|message|>",
    "<|assistant|>": "<|end|>",
}
ZONES = ["utc", "cet"]
SCHEMA = {
    "type": "object",
    "properties": {"zone": {"enum": ZONES}},
    "required": ["zone"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "time", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harmony") / "model"
    shutil.copytree(DEMO, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        for token, mark in MARKS.items():
            text = text.replace(token, mark)
        (folder / name).write_text(text)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    ends = [PromptEncoder(folder).vocabulary.added[mark] for mark in ("<|return|>", "<|call|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def call_of(model: Path, bias: dict[str, float], **fields: Any) -> Call:
    backend = PromptEncoder(model).backend
    biased = tuple((backend.token_to_id(token), value) for token, value in bias.items())
    sampling = SamplingParams(temperature=0.0, logit_bias=biased)
    asked = Call("r1", Endpoint.CHAT, 0, "acme", "harmony", None, max_tokens=200, sampling=sampling)
    return replace(asked, messages=({"role": "user", "content": "When?"},), **fields)


def test_a_replica_holds_a_forced_call_and_a_format(model: Path) -> None:
    forced = ToolUse((TOOL,), forced=("time",))
    called, said = bodies(
        model,
        call_of(model, {"<|channel|>": -100.0}, tools=forced),
        call_of(model, {"f": 100.0}, format=Format(json.dumps(SCHEMA))),
    )
    (choice,) = called["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "time"
    assert json.loads(call["function"]["arguments"])["zone"] in ZONES
    (choice,) = said["choices"]
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"])["zone"] in ZONES
