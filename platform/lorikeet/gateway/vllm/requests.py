"""Paths and bodies of vLLM's endpoints for trainers."""

from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from lorikeet.apis.body import Body, misfit, unsupported
from lorikeet.apis.chat.messages import MAX_MESSAGES, Message, check_answered
from lorikeet.apis.chat.request import ChatRequest, TemplateFields
from lorikeet.apis.fields import TokenId
from lorikeet.apis.request import ApiRequest, CallContext
from lorikeet.apis.tools import Tools
from lorikeet.protocol.messages import Call, Endpoint

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SKYRL_LOAD = "/skyrl/v1/load_lora_adapter"
QUESTIONS = ("/server_info", "/get_world_size", "/is_paused")
NO_OPS = ("/pause", "/resume", "/reset_prefix_cache")
REFUSED = (
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
    *("/finish_weight_update", "/collective_rpc", "/sleep", "/wake_up"),
)
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
GENERATE = "/inference/v1/generate"
PATHS = frozenset({*QUESTIONS, *NO_OPS, *REFUSED, TOKENIZE, DETOKENIZE, GENERATE, SKYRL_LOAD})
"""Paths outside /v1, which the tenants' listener passes on."""


class LoadRequest(Body):
    """Body of a request to load an adapter, with vLLM's fields.

    lora_name: name of the adapter, with or without the key's tenant.
    lora_path: absolute path of the adapter's folder.
    load_inplace: replace an adapter of this name that another key loaded or that is registered.
    """

    dropped: ClassVar[Collection[str]] = {"is_3d_lora_weight"}  # files show it

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class SkyrlLoadRequest(LoadRequest):
    """Body of SkyRL's request to load an adapter.

    load_inplace: replace an adapter of this name that another key loaded or that is registered;
        true by default.
    """

    load_inplace: bool = True


class UnloadRequest(Body):
    """Body of a request to unload an adapter, with vLLM's fields.

    lora_name: name of the adapter, with or without the key's tenant.
    """

    dropped: ClassVar[Collection[str]] = {"lora_int_id"}

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]


class TokenizeRequest(TemplateFields, ApiRequest):
    """Body of a request for the token ids of a prompt, a text or a chat, with vLLM's fields.

    add_special_tokens: add the tokenizer's special tokens to a text; null: true. A chat has those
        of its template alone.
    return_token_strs: return each token's text in the vocabulary, too.
    """

    prompt: str | None = None
    messages: (
        Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
        | None
    ) = None
    tools: Tools = Field(default=[])
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _agrees(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise misfit("prompt", "want either it or messages")
        if self.messages is not None:
            if self.add_special_tokens:
                raise unsupported("add_special_tokens", hint=" with messages")
            check_answered(self.messages)
            self.check_continuation(self.messages[-1])
        return self

    def session(self) -> None:
        """Return None: the request belongs to no session."""

    def to_call(self, context: CallContext) -> Call:
        """Return a chat as a Call that only counts tokens."""
        fields = {name: getattr(self, name) for name in (*TemplateFields.model_fields, "messages")}
        chat = ChatRequest.unchecked(model=self.model, tools=self.tools, **fields)
        return replace(chat.to_call(context), endpoint=Endpoint.COUNT_TOKENS, max_tokens=0)


class DetokenizeRequest(Body):
    """Body of a request for the text of tokens, with vLLM's fields."""

    max_values: ClassVar[int] = 2**18

    model: Annotated[str, Field(min_length=1, max_length=256)]
    tokens: list[TokenId]
