"""Request defaults that a version is registered with: their body, check and JSON."""

from dataclasses import asdict
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field

from lorikeet.apis.body import Body
from lorikeet.apis.fields import Stop, TokenId
from lorikeet.errors import InvalidInput
from lorikeet.gateway.call_encoders import CallEncoders
from lorikeet.gateway.sampling_defaults import SamplingDefaults
from lorikeet.request_defaults import (
    MAX_STOP_TOKENS,
    MAX_SYSTEM_PROMPT_BYTES,
    MAX_TEMPLATE_BYTES,
    RequestDefaults,
)


def _bounded(max_bytes: int) -> AfterValidator:
    def check(text: str | None) -> str | None:
        size = len((text or "").encode())
        if size > max_bytes:
            raise ValueError(f"has {size} bytes: want at most {max_bytes}")
        return text

    return AfterValidator(check)


class SamplingBody(SamplingDefaults):
    """Sampling defaults of a version. Unknown names are refused."""

    model_config = ConfigDict(extra="forbid")


class DefaultsBody(Body):
    """Request defaults of a version: values for requests that leave them out.

    chat_template: template that writes prompts of chats; null: the base model's.
    system_prompt: text of the system message of chats without one; null: no text.
    stop: strings that end a choice, beside the request's.
    stop_token_ids: tokens that end a choice, beside the request's and the base model's.
    """

    chat_template: Annotated[str | None, _bounded(MAX_TEMPLATE_BYTES)] = None
    system_prompt: Annotated[str | None, _bounded(MAX_SYSTEM_PROMPT_BYTES)] = None
    stop: Stop = ()
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] = Field(default=[])
    sampling: SamplingBody = SamplingBody()


async def checked_defaults(
    wanted: DefaultsBody | None, encoders: CallEncoders, tenant: str, base_model: str
) -> RequestDefaults | None:
    """Check request defaults by rendering a few chats; return those to register, None if none are
    set.

    A stop string that is one token of its own, such as <|im_end|>, becomes a stop token, since
    answers omit the text of special tokens.

    wanted: request defaults in the body of the registration.
    encoders: encoders of prompts, by base model.
    tenant: owner of the adapter.

    Raises InvalidInput for a stop token that the tokenizer lacks, and if a chat cannot be rendered;
    Overloaded if there was no time to render.
    """
    if wanted is None:
        return None
    vocabulary = encoders.vocabulary(base_model)
    for token in wanted.stop_token_ids:
        if vocabulary.tokenizer.id_to_token(token) is None:
            raise InvalidInput(
                f"the tokenizer of {base_model} has no token {token}: leave it out",
                param="defaults.stop_token_ids",
            )
    tokens = {vocabulary.added[stop] for stop in wanted.stop if stop in vocabulary.added}
    defaults = RequestDefaults(
        wanted.chat_template,
        wanted.system_prompt,
        tuple(stop for stop in wanted.stop if stop not in vocabulary.added),
        tuple(sorted({*wanted.stop_token_ids, *tokens})),
        wanted.sampling.values(),
    )
    if defaults == RequestDefaults():
        return None
    try:
        await encoders.check(tenant, base_model, defaults)
    except InvalidInput as error:
        field = "system_prompt" if wanted.chat_template is None else "chat_template"
        raise InvalidInput(
            f"not registered, since a chat failed that is rendered first: {error.message}",
            param=f"defaults.{field}",
        ) from None
    return defaults


def defaults_json(defaults: RequestDefaults | None) -> dict[str, Any] | None:
    """Return a version's request defaults as JSON; None if it has the base model's."""
    return None if defaults is None else asdict(defaults)
