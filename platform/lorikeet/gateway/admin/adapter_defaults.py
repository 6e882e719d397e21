"""Request defaults that a version is registered with: their body, check and JSON."""

import asyncio
import json
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from lorikeet.apis.body import Body
from lorikeet.apis.fields import Stop, TokenId
from lorikeet.errors import InvalidInput
from lorikeet.gateway.call_encoders import CallEncoders
from lorikeet.gateway.sampling_defaults import SamplingDefaults
from lorikeet.request_defaults import (
    MAX_ADDED_TOKENS,
    MAX_STOP_TOKENS,
    MAX_SYSTEM_PROMPT_BYTES,
    MAX_TEMPLATE_BYTES,
    MAX_TOKEN_CHARACTERS,
    AddedToken,
    RequestDefaults,
    TokenizerChanges,
)
from lorikeet.text.prompts import PromptEncoder
from lorikeet.tokenizer_vocabulary import MAX_ADDED, SPECIAL_TOKENS, model_digest

_END = "eos_token"


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


class AddedTokenBody(Body):
    """Added token of a tokenizer, as in tokenizer.json."""

    id: TokenId
    content: Annotated[str, Field(min_length=1, max_length=MAX_TOKEN_CHARACTERS)]
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True

    def token(self) -> AddedToken:
        """Return the token."""
        return AddedToken(**self.model_dump())


class TokenizerBody(Body):
    """Tokenizer of a version: the base model's with more added tokens.

    model: SHA-256 of the vocabulary and merges (model_digest), which must be the base model's.
    added: all added tokens.
    special_tokens: texts of special tokens by name, such as eos_token.
    """

    model: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    added: Annotated[list[AddedTokenBody], Field(max_length=MAX_ADDED)]
    special_tokens: Annotated[
        dict[Literal[SPECIAL_TOKENS], Annotated[str, Field(max_length=MAX_TOKEN_CHARACTERS)]],  # type: ignore[valid-type]
        Field(default={}),
    ]


class DefaultsBody(Body):
    """Request defaults of a version: values for requests that leave them out.

    chat_template: template that writes prompts of chats; null: the base model's.
    system_prompt: text of the system message of chats without one; null: no text.
    stop: strings that end a choice, beside the request's.
    stop_token_ids: tokens that end a choice, beside the request's and the base model's.
    tokenizer: tokenizer that writes prompts and reads answers; null: the base model's.
    """

    chat_template: Annotated[str | None, _bounded(MAX_TEMPLATE_BYTES)] = None
    system_prompt: Annotated[str | None, _bounded(MAX_SYSTEM_PROMPT_BYTES)] = None
    stop: Stop = ()
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] = Field(default=[])
    sampling: SamplingBody = SamplingBody()
    tokenizer: TokenizerBody | None = None


async def checked_defaults(
    wanted: DefaultsBody | None,
    encoders: CallEncoders,
    tenant: str,
    base_model: str,
    vocabulary_size: int,
) -> RequestDefaults | None:
    """Check request defaults by rendering a few chats; return those to register, None if none are
    set.

    A stop string that is one token of its own, such as <|im_end|>, becomes a stop token, since
    answers omit the text of special tokens.

    wanted: request defaults in the body of the registration.
    encoders: encoders of prompts, by base model.
    tenant: owner of the adapter.
    vocabulary_size: number of tokens for which the adapter has embeddings, its own or the base
        model's.

    Raises InvalidInput for a stop token that the tokenizer lacks, for a tokenizer that differs from
    the base model's by more than added tokens, and if a chat cannot be rendered; Overloaded if
    there was no time to render.
    """
    if wanted is None:
        return None
    changes = None
    if wanted.tokenizer is not None:
        of_base = await encoders.encoder(base_model, tenant)
        about = wanted.tokenizer, of_base, base_model, vocabulary_size
        changes = await asyncio.to_thread(_tokenizer_changes, *about)
    try:
        vocabulary = (await encoders.encoder(base_model, tenant, changes)).vocabulary
    except InvalidInput as error:
        raise InvalidInput(error.message, param="defaults.tokenizer.added") from None
    for token in wanted.stop_token_ids:
        if vocabulary.tokenizer.id_to_token(token) is None:
            raise InvalidInput(
                f"the tokenizer of {base_model} has no token {token}: leave it out",
                param="defaults.stop_token_ids",
            )
    ends = {*wanted.stop_token_ids}
    ends |= {vocabulary.added[stop] for stop in wanted.stop if stop in vocabulary.added}
    own_end = None if changes is None else dict(changes.special_tokens).get(_END)
    if own_end is not None and (end := vocabulary.tokenizer.token_to_id(own_end)) is not None:
        ends.add(end)
    defaults = RequestDefaults(
        wanted.chat_template,
        wanted.system_prompt,
        tuple(stop for stop in wanted.stop if stop not in vocabulary.added),
        tuple(sorted(ends)),
        wanted.sampling.values(),
        changes,
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
    if defaults is None:
        return None
    shown = asdict(defaults)
    if defaults.tokenizer is not None:
        shown["tokenizer"]["special_tokens"] = dict(defaults.tokenizer.special_tokens)
    return shown


def _tokenizer_changes(
    wanted: TokenizerBody, encoder: PromptEncoder, base_model: str, vocabulary_size: int
) -> TokenizerChanges | None:
    """Return the differences of a tokenizer from its base model's; None if both are equal.

    encoder: encoder with the base model's tokenizer.
    vocabulary_size: number of tokens for which the adapter has embeddings.

    Raises InvalidInput, naming the field, for other differences than added tokens.
    """

    def refusal(field: str, problem: str) -> InvalidInput:
        remedy = f"train with {base_model}'s tokenizer, to which tokens may be added"
        return InvalidInput(
            f"the adapter's tokenizer {problem}: {remedy}", param=f"defaults.tokenizer.{field}"
        )

    vocabulary = encoder.vocabulary
    if model_digest(json.loads(encoder.backend.to_str())["model"]) != wanted.model:
        raise refusal("model", f"has another vocabulary or other merges than {base_model}'s")
    sent = {each.content: each.token() for each in wanted.added}
    for content, number in vocabulary.added.items():
        if content not in sent:
            raise refusal("added", f"lacks {base_model}'s token {content!r}")
        if sent[content].id != number:
            had = f"{base_model}'s token {content!r}, which is {number}, has the id"
            raise refusal("added", f"differs: {had} {sent[content].id} there")
    of_base = {token.content: token for token in encoder.added_tokens()}
    added = [token for content, token in sent.items() if of_base.get(content) != token]
    if len(added) > MAX_ADDED_TOKENS:
        raise refusal("added", f"adds {len(added)} tokens, and at most {MAX_ADDED_TOKENS} can be")
    added.sort(key=lambda token: token.id)
    if added and added[-1].id >= vocabulary_size:
        last = added[-1]
        raise InvalidInput(
            f"the added token {last.content!r} has the id {last.id}, and the adapter has "
            f"embeddings of {vocabulary_size} tokens: call resize_token_embeddings before the "
            'training, and train modules_to_save=["embed_tokens", "lm_head"]',
            param="defaults.tokenizer.added",
        )
    special = wanted.special_tokens.items()
    others = {name: text for name, text in special if encoder.special_tokens.get(name) != text}
    known = {*sent, *vocabulary.tokenizer.get_vocab(with_added_tokens=False)} if others else ()
    for name, text in others.items():
        if text not in known:
            raise refusal("special_tokens", f"has no token {text!r}, its {name}")
    if not added and not others:
        return None
    return TokenizerChanges(tuple(added), tuple(sorted(others.items())))
