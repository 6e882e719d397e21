"""Answers validated against the types of OpenAI's and Anthropic's own client packages."""

from functools import cache
from typing import Any

import openai.types
import pytest
from pydantic import TypeAdapter

PINGS = {"type": "ping"}


@cache
def _type_of(name: str) -> TypeAdapter[Any]:
    from openai.types import Batch, Completion, FileObject, Model
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from openai.types.responses import Response, ResponseStreamEvent

    known: dict[str, Any] = {
        "Batch": Batch,
        "FileObject": FileObject,
        "ChatCompletion": ChatCompletion,
        "ChatCompletionChunk": ChatCompletionChunk,
        "Completion": Completion,
        "Model": Model,
        "Response": Response,
        "ResponseStreamEvent": ResponseStreamEvent,
    }
    if name not in known:
        anthropic = pytest.importorskip("anthropic")
        known[name] = getattr(anthropic.types, name)
    return TypeAdapter(known[name])


def validate_as(name: str, answer: Any) -> None:
    """Raise ValidationError unless an answer is of the client packages' type with this name.

    The packages' clients themselves build objects without any check.
    """
    if name == "RawMessageStreamEvent" and answer == PINGS:
        return  # Anthropic's type lacks pings, which clients skip
    if name == "Completion":  # a stream has null until its last event, which OpenAI's type lacks
        ended = [c | {"finish_reason": c["finish_reason"] or "stop"} for c in answer["choices"]]
        answer = answer | {"choices": ended}
    _type_of(name).validate_python(answer)
    if name in ("Batch", "FileObject"):
        fields = getattr(openai.types, name).model_fields.keys()
        assert fields - {"status_details"} <= answer.keys() <= fields, "all, but deprecated ones"


def validate_error(body: Any) -> None:
    """Assert that the body of an error has all members of OpenAI's or Anthropic's shape."""
    if body.get("type") == "error":
        assert body.keys() == {"type", "error", "request_id"}
        assert body["error"].keys() == {"type", "message", "details"}
        assert body["error"]["details"].keys() == {"error_code"}
    else:
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}


def validate_models(body: Any) -> None:
    """Validate a list of models, or one model, in the shape of either API."""
    for model in body.get("data", [body]):
        validate_as("Model" if "object" in model else "ModelInfo", model)
