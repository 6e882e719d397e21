"""What requests that generate have in common, in whichever API's words: the Call each becomes."""

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field, model_validator

from lorikeet.gateway.apis.fields import INT32, Metadata
from lorikeet.gateway.apis.responses_items import InputItem
from lorikeet.gateway.auth import Caller, ResolvedModel
from lorikeet.gateway.body import Body, misfit
from lorikeet.protocol.messages import Call
from lorikeet.routing.locations import CHARACTERS_PER_TOKEN
from lorikeet.routing.ranking import Work
from lorikeet_engine.request import SchedulingParams

_TEMPLATE_TOKENS = 5  # what chat templates put around each message, roughly

Tokens = Annotated[int, Field(ge=1, le=INT32)]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=0, le=INT32)]


class CallContext(NamedTuple):
    """What a gateway knows of a request beside its body.

    created: Unix time, seconds. past: the items of the stored conversation that it continues.
    stores: whether the answer will be stored.
    """

    request_id: str
    created: int
    caller: Caller
    scheduling: SchedulingParams
    model: ResolvedModel
    past: Sequence[InputItem] = ()
    stores: bool = False

    def work(self, prompt_tokens: int, sequences: int) -> Work:
        """Return what an answer of so many sequences is for a replica."""
        return Work(prompt_tokens, self.model.rank, self.model.image_bytes, sequences)


class ApiRequest(Body):
    """A request to generate."""

    model: Annotated[str, Field(min_length=1, max_length=256)]

    @abstractmethod
    def to_call(self, context: CallContext) -> Call:
        """Return the Call that a replica gets."""

    @abstractmethod
    def session(self) -> str | None:
        """Return the name of the session that the request belongs to, if it says."""


class OpenAIRequest(ApiRequest):
    """What all of OpenAI's endpoints take. A class with `stream_options` says what these are."""

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    stream: bool = False
    user: str | None = None
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _streams(self) -> "OpenAIRequest":
        if "stream_options" in self.model_fields_set and not self.stream:
            raise misfit("stream_options", "want stream to be true with it")
        return self

    def session(self) -> str | None:
        """Return `user`."""
        return self.user


def prompt_tokens(prompt: str | Sequence[int]) -> int:
    """Estimate a prompt's tokens; token ids are exact, but a gateway has no tokenizer for text."""
    if isinstance(prompt, str):
        return 1 + len(prompt) // CHARACTERS_PER_TOKEN
    return len(prompt)


def chat_tokens(
    messages: Iterable[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> int:
    """Estimate a conversation's tokens."""
    size = prompt_tokens(json.dumps(tools)) if tools else 0
    for message in messages:
        size += _TEMPLATE_TOKENS + prompt_tokens(message["content"])
        if calls := message.get("tool_calls"):
            size += prompt_tokens(json.dumps(calls))
        if thought := message.get("reasoning_content"):
            size += prompt_tokens(thought)
    return size
