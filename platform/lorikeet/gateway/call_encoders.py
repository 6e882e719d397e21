"""Encoders of calls, by base model, that do not block a gateway's event loop."""

from collections.abc import Mapping, Sequence
from functools import partial

from starlette.types import Receive

from lorikeet.errors import InvalidInput
from lorikeet.gateway.client_disconnect import result_before_disconnect
from lorikeet.gateway.error_responses import Refused
from lorikeet.protocol.messages import Call, EncodedCall, Refusal, TokenIds
from lorikeet.settings import Settings
from lorikeet.text.call_encoding import encode_call, is_short
from lorikeet.text.prompts import PromptEncoder
from lorikeet.text.tenant_threads import TenantThreads

_UNKNOWN_CONTEXT = 2**20
"""Context, in tokens, by which texts are encoded before a replica has told its own."""
_NO_TENANT = ""  # of texts that admins send


class CallEncoders:
    """Encoders of prompts by base model, and threads for long prompts. For one event loop.

    encoders: encoder of each base model.
    """

    def __init__(self, encoders: Mapping[str, PromptEncoder] = {}) -> None:
        self._encoders, self._threads = encoders, TenantThreads()

    async def encode(
        self, base_model: str, call: Call, max_context: int | None, receive: Receive
    ) -> EncodedCall:
        """Return a call with the token ids of its prompts.

        max_context: longest sequence that all replicas of the base model take, tokens; None if
            unknown.
        receive: source of the ASGI messages of the request, whose body has been read.

        Raises Refused, with the name that the called endpoint gives the field at fault, if the
        prompts cannot be encoded or leave no room for an answer; ClientDisconnect if the client
        leaves before long prompts are encoded.
        """
        encoder, context = self._encoders[base_model], max_context or _UNKNOWN_CONTEXT
        try:
            if is_short(call):
                return encode_call(call, encoder, context)
            encoding = self._threads.run(call.tenant, partial(encode_call, call, encoder, context))
            return await result_before_disconnect(receive, encoding)
        except InvalidInput as error:
            refusal = Refusal(error.code, error.message, error.param)
            raise Refused(refusal, call.endpoint) from None

    async def encode_text(
        self,
        base_model: str,
        tenant: str,
        text: str,
        max_context: int | None,
        *,
        add_special_tokens: bool,
    ) -> TokenIds:
        """Return the token ids of a text.

        max_context: see `encode`.
        add_special_tokens: add the tokenizer's special tokens, as to prompts of completions.

        Raises ContextLengthExceeded for texts far longer than the context.
        """
        encoder, context = self._encoders[base_model], max_context or _UNKNOWN_CONTEXT
        encode = partial(encoder.encode_text, add_special_tokens=add_special_tokens)
        return await self._threads.run(tenant, lambda: encode(text, context))

    async def decode(self, base_model: str, tenant: str, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included.

        Raises InvalidInput for a token that the vocabulary lacks.
        """
        encoder = self._encoders[base_model]
        return await self._threads.run(tenant, lambda: encoder.decode(tokens))

    async def token_strings(
        self, base_model: str, tenant: str, tokens: Sequence[int]
    ) -> Sequence[str | None]:
        """Return each token's text in the vocabulary."""
        to_text = self._encoders[base_model].backend.id_to_token
        return await self._threads.run(tenant, lambda: [to_text(token) for token in tokens])

    async def encode_turns(
        self, base_model: str, texts: Sequence[str], max_context: int | None
    ) -> tuple[TokenIds, ...]:
        """Return the token ids of prompts that each have only a user's message.

        texts: the messages.
        max_context: see `encode`.

        Raises InvalidInput if a message cannot be encoded.
        """
        encoder, context = self._encoders[base_model], max_context or _UNKNOWN_CONTEXT
        return await self._threads.run(
            _NO_TENANT, lambda: tuple(encoder.encode_turn(text, context) for text in texts)
        )


def read_encoders(settings: Settings) -> CallEncoders:
    """Read the tokenizer and chat template of every base model's folder.

    Raises InvalidSetting for a folder without tokenizer.json.
    """
    return CallEncoders({name: PromptEncoder(at) for name, at in settings.base_models.items()})
