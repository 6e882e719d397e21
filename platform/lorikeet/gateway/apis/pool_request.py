"""Requests that pool prompts instead of generating, in vLLM's shapes: POST /v1/classify, /v1/score
and /v1/pooling.

Only adapters with a classification or reward head (AdapterRef.head) answer these requests, and they
answer no requests to generate.
"""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from lorikeet.errors import InvalidInput
from lorikeet.gateway.apis.api_request import ApiRequest, CallContext
from lorikeet.gateway.apis.chat_messages import MAX_MESSAGES, Message, check_answered
from lorikeet.gateway.apis.chat_request import ChatRequest, TemplateFields
from lorikeet.gateway.apis.completion_request import CompletionRequest
from lorikeet.gateway.apis.fields import Prompts
from lorikeet.gateway.apis.no_ops import POOL_NO_OPS
from lorikeet.gateway.body import NoOps, misfit
from lorikeet.protocol.messages import Call, Endpoint
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.request import SamplingParams


class PoolRequest(TemplateFields, ApiRequest):
    """Fields common to requests that pool prompts.

    input: prompts, as texts or token ids. Each is pooled.
    messages: a chat to pool, as the chat template writes it. Without add_generation_prompt it ends
        before an answer's beginning.
    user: name of the request's session.
    """

    no_ops: ClassVar[NoOps] = POOL_NO_OPS
    max_values: ClassVar[int] = 2**18  # prompts of token ids have many values
    endpoint: ClassVar[Endpoint]

    input: Prompts | None = None
    messages: (
        Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
        | None
    ) = None
    user: Annotated[str, Field(max_length=1024)] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> "PoolRequest":
        if (self.input is None) == (self.messages is None):
            raise misfit("input", "want either it or messages")
        if self.messages is not None:
            check_answered(self.messages)
            self.check_continuation(self.messages[-1])
        return self

    def session(self) -> str | None:
        """Return the name of the request's session; None if it has none."""
        return self.user

    def to_call(self, context: CallContext) -> Call:
        """Return the request as a Call."""
        request: ChatRequest | CompletionRequest
        if self.messages is None:
            request = CompletionRequest.unchecked(model=self.model, prompt=self.input)
        else:
            fields = {name: getattr(self, name) for name in TemplateFields.model_fields}
            fields["add_generation_prompt"] = self.add_generation_prompt is True
            request = ChatRequest.unchecked(model=self.model, messages=self.messages, **fields)
        return replace(
            request.to_call(context),
            endpoint=self.endpoint,
            max_tokens=0,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            own_stop=(),
        )


class ClassifyRequest(PoolRequest):
    """Request of POST /v1/classify.

    use_activation: None or True: return probabilities; False: return the head's own values.
    """

    endpoint = Endpoint.CLASSIFY

    use_activation: bool | None = None

    def to_call(self, context: CallContext) -> Call:
        """Return the request as a Call."""
        return replace(super().to_call(context), raw_scores=self.use_activation is False)


class PoolingRequest(ClassifyRequest):
    """Request of POST /v1/pooling.

    encoding_format: float: return numbers; base64: return base64 of little-endian float32.
    """

    endpoint = Endpoint.POOLING

    encoding_format: Literal["float", "base64"] = "float"

    def to_call(self, context: CallContext) -> Call:
        """Return the request as a Call."""
        return replace(super().to_call(context), base64=self.encoding_format == "base64")


class ScoreRequest(PoolRequest):
    """Request of POST /v1/score, for reward models, whose heads have one label."""

    hints: ClassVar[dict[str, str]] = dict.fromkeys(
        ("text_1", "text_2", "queries", "documents"),
        ": pairs are of cross-encoders, send each whole text in input, or a chat in messages",
    )
    endpoint = Endpoint.SCORE

    def to_call(self, context: CallContext) -> Call:
        """Return the request as a Call."""
        return replace(super().to_call(context), raw_scores=True)


def check_head(call: Call) -> None:
    """Raise InvalidInput if the endpoint pools and the adapter has no head, if it generates and the
    adapter has one, or if it is /v1/score and the head has several labels.
    """
    head = call.adapter.head if isinstance(call.adapter, AdapterRef) else None
    if not call.endpoint.pools:
        if head is not None and not call.endpoint.counts:
            raise InvalidInput(
                f"model={call.model!r} has a classification head and does not generate: ask "
                "/v1/classify, /v1/score or /v1/pooling",
                param="model",
            )
        return
    if head is None:
        raise InvalidInput(
            f"model={call.model!r} has no classification head: name an adapter that was trained "
            "with one, of PEFT's task type SEQ_CLS",
            param="model",
        )
    if call.endpoint is Endpoint.SCORE and len(head.labels) > 1:
        raise InvalidInput(
            f"model={call.model!r} has {len(head.labels)} labels, and a score is of one: ask "
            "/v1/classify",
            param="model",
        )
