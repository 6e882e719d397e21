"""Requests of POST /v1/completions, and their conversion to a Call."""

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from lorikeet.apis.body import NoOps, misfit, unsupported
from lorikeet.apis.fields import INT32, MAX_CHOICES, Prompts
from lorikeet.apis.request import SAMPLING_NO_OPS, CallContext, GenerateRequest
from lorikeet.protocol.messages import Call, Endpoint

_Count = Annotated[int, Field(ge=0, le=5)]


def _parse_logprobs(value: object) -> object:
    """Return the field logprobs with a number in place of a bool, which chats use.

    True: 0, log probabilities of the answer's own tokens alone. False: None.
    """
    if isinstance(value, bool):
        return 0 if value else None
    return value


_Logprobs = Annotated[
    _Count | None,
    BeforeValidator(_parse_logprobs, json_schema_input_type=_Count | bool | None),
]


class CompletionRequest(GenerateRequest):
    """Request of POST /v1/completions. Without max_tokens an answer has at most 16 tokens, as at
    OpenAI.
    """

    no_ops: ClassVar[NoOps] = {**SAMPLING_NO_OPS, "add_special_tokens": (True,), "suffix": ("",)}
    max_values: ClassVar[int] = 2**18  # prompts of token ids have many values
    hints: ClassVar[dict[str, str]] = {
        "messages": ": send prompt, or ask /v1/chat/completions",
        "max_completion_tokens": ": it is called max_tokens here",
    }

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=INT32)] | None = 16
    logprobs: _Logprobs = None
    echo: bool = False
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> "CompletionRequest":
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise misfit("prompt", f"want at most {MAX_CHOICES} prompts times n")
        if self.best_of is not None and self.best_of < self.n:
            raise misfit("best_of", f"want at least n ({self.n})")
        if self.best_of is not None and self.best_of > self.n:
            raise unsupported("best_of", hint=": want n of it, and choose")
        if self.echo and self.logprobs is not None and self.stream:
            raise unsupported("echo", hint=" together with logprobs and stream")
        self.check_one_format()
        return self

    def alternatives(self) -> int | None:
        """Return the field logprobs: the number of most likely tokens to report at each position of
        the answer.

        None: no logprobs are requested.
        """
        return self.logprobs

    def echoed_logprobs(self) -> int | None:
        """Return the number of most likely tokens to report at each position of an echoed prompt:
        the field logprobs, as for the answer.

        None: no echo or no logprobs are requested.
        """
        return self.logprobs if self.echo else None

    def to_call(self, context: CallContext) -> Call:
        """Return the request as a Call, the common form of all APIs, with facts from `context`."""
        return Call(
            endpoint=Endpoint.COMPLETIONS,
            prompts=self.prompt,
            echo=self.echo,
            format=self.structured_format(),
            **self._common(context),
        )
