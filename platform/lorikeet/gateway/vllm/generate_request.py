"""Requests of vLLM's POST /inference/v1/generate, which continue token ids and return token ids.
SkyRL's rollouts send them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic_core import from_json, to_json

from lorikeet.apis.body import NoOps
from lorikeet.apis.completions.request import CompletionRequest
from lorikeet.apis.fields import MAX_CHOICES, Temperature, TokenId, TopP
from lorikeet.apis.request import SAMPLING_NO_OPS, ApiRequest, CallContext, SamplingFields, Tokens
from lorikeet.protocol.messages import Call
from lorikeet_engine.request import MAX_LOGPROBS, MAX_PROMPT_LOGPROBS


class VllmSampling(SamplingFields):
    """vLLM's SamplingParams with vLLM's defaults. Fields that only change text are accepted without
    effect, as answers have no text.
    """

    no_ops: ClassVar[NoOps] = SAMPLING_NO_OPS
    dropped: ClassVar[frozenset[str]] = frozenset(
        {
            *("output_kind", "detokenize", "include_stop_str_in_output"),
            *("skip_special_tokens", "spaces_between_special_tokens"),
        }
    )

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Tokens | None = 16
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_PROMPT_LOGPROBS)] | None = None


class InferenceRequest(ApiRequest):
    """Body of a request to continue token ids, with vLLM's fields.

    `cache_salt`, which keeps cached prefixes apart in vLLM, has no effect: here a cached prefix
    belongs to one version of one adapter.
    """

    no_ops: ClassVar[NoOps] = {"stream": (False,), "priority": (0,)}
    dropped: ClassVar[frozenset[str]] = frozenset({"cache_salt", "request_id"})
    hints: ClassVar[dict[str, str]] = {"features": ": prompts are token ids alone"}
    max_values: ClassVar[int] = 2**18

    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling_params: VllmSampling

    def session(self) -> None:
        """Return None: only the header X-Session-ID can name the request's session."""

    def before_end(self) -> Callable[[bytes], Awaitable[bytes]]:
        """Return a function that converts a completion's body to vLLM's answer."""

        async def convert(body: bytes) -> bytes:
            return await asyncio.to_thread(_answer, body, self.sampling_params.logprobs or 0)

        return convert

    def to_call(self, context: CallContext) -> Call:
        """Return the request as a Call for a completion with token ids.

        context: facts that are not in the body, such as caller and model.
        """
        sampling = {name: getattr(self.sampling_params, name) for name in VllmSampling.model_fields}
        return CompletionRequest.unchecked(
            model=self.model,
            prompt=(tuple(self.token_ids),),
            return_token_ids=True,
            return_tokens_as_token_ids=True,
            **sampling,
        ).to_call(context)


def _answer(body: bytes, top: int) -> bytes:
    """Return the JSON body of vLLM's answer, made of a completion's.

    body: the completion's JSON body, with token ids.
    top: number of most likely tokens at each position.
    """
    completion = from_json(body)
    choices = [
        {
            "index": choice["index"],
            "token_ids": choice["token_ids"],
            "finish_reason": choice["finish_reason"],
            "logprobs": choice["logprobs"] and _logprobs(choice["logprobs"], top),
        }
        for choice in completion["choices"]
    ]
    return to_json(
        {
            "request_id": completion["id"],
            "choices": choices,
            "prompt_logprobs": completion["choices"][0].get("prompt_logprobs"),
            "usage": completion["usage"],
        }
    )


def _logprobs(known: Mapping[str, Any], top: int) -> dict[str, Any]:
    """Convert the log probabilities of a completion's choice to the shape of a chat's.

    top: number of most likely tokens at each position.
    """
    alternatives = [
        [{"token": name, "logprob": likely} for name, likely in list(entry.items())[:top]]
        for entry in known["top_logprobs"]
    ]
    columns = known["tokens"], known["token_logprobs"], alternatives
    names = "token", "logprob", "top_logprobs"
    return {"content": [dict(zip(names, each, strict=True)) for each in zip(*columns, strict=True)]}
