"""Encoders of calls, by base model, that do not block a gateway's event loop."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.types import Receive

from lorikeet.errors import InvalidInput
from lorikeet.gateway.client_connection import result_before_disconnect
from lorikeet.gateway.error_responses import Refused
from lorikeet.protocol.messages import Call, EncodedCall, Endpoint, Refusal, TokenIds
from lorikeet.request_defaults import RequestDefaults, TokenizerChanges
from lorikeet.settings import Settings
from lorikeet.text.adapter_templates import AdapterTemplates, check_defaults
from lorikeet.text.prompts import MAX_OWN_TOKENIZERS, PromptEncoder, encode_call, is_short
from lorikeet.text.tenant_threads import TenantThreads, ThreadCache

T = TypeVar("T")

_UNKNOWN_CONTEXT = 2**20
"""Context, in tokens, by which texts are encoded before a replica has told its own."""
_NO_TENANT = ""  # of texts that admins send


class CallEncoders:
    """Encoders of prompts by base model, and threads for long prompts. For one event loop.

    encoders: encoder of each base model.
    """

    def __init__(self, encoders: Mapping[str, PromptEncoder] = {}) -> None:
        self._base_encoders, self._threads = encoders, TenantThreads()
        make = PromptEncoder.with_tokenizer
        self._own = ThreadCache(make, MAX_OWN_TOKENIZERS, self._threads)
        self._templates = AdapterTemplates()

    async def encode(
        self, base_model: str, call: Call, max_context: int | None, receive: Receive
    ) -> EncodedCall:
        """Return a call with the token ids of its prompts.

        max_context: longest sequence that all replicas of the base model take, tokens; None if
            unknown.
        receive: source of the ASGI messages of the request, whose body has been read.

        Raises Refused if the prompts cannot be encoded or leave no room for an answer, naming the
        field at fault as the called endpoint does; ClientDisconnect if the client leaves before
        long prompts are encoded; Overloaded if the machine was too busy to render the adapter's own
        chat template.
        """
        encoder = await self._encoder(base_model, call.tenant, call.defaults)
        context = max_context or _UNKNOWN_CONTEXT
        own = call.defaults.chat_template if call.messages and call.defaults else None
        encoding: Coroutine[Any, Any, EncodedCall]
        try:
            if own is not None:
                encode = partial(encode_call, call, max_context=context)
                max_wait_s = call.scheduling.max_queue_s
                encoding = self._templates.run(call.tenant, encoder, own, encode, max_wait_s)
            elif is_short(call):
                return encode_call(call, encoder, context)
            else:
                encoding = self._threads.run(
                    call.tenant, partial(encode_call, call, encoder, context)
                )
            return await result_before_disconnect(receive, encoding)
        except InvalidInput as error:
            refusal = Refusal(error.code, error.message, error.param)
            raise Refused(refusal, call) from None

    async def encode_text(
        self,
        base_model: str,
        tenant: str,
        text: str,
        max_context: int | None,
        defaults: RequestDefaults | None,
        *,
        add_special_tokens: bool,
    ) -> TokenIds:
        """Return the token ids of a text.

        max_context: longest sequence that all replicas of the base model take, tokens; None if
            unknown.
        defaults: the adapter's own request defaults.
        add_special_tokens: add the tokenizer's special tokens, as to prompts of completions.

        Raises ContextLengthExceeded for texts far longer than the context.
        """
        encoder = await self._encoder(base_model, tenant, defaults)
        context = max_context or _UNKNOWN_CONTEXT
        encode = partial(encoder.encode_text, add_special_tokens=add_special_tokens)
        return await self._threads.run(tenant, lambda: encode(text, context))

    async def decode(
        self,
        base_model: str,
        tenant: str,
        tokens: Sequence[int],
        defaults: RequestDefaults | None,
    ) -> str:
        """Return the text of tokens, special tokens included.

        defaults: the adapter's own request defaults.

        Raises InvalidInput for a token that the vocabulary lacks.
        """
        encoder = await self._encoder(base_model, tenant, defaults)
        return await self._threads.run(tenant, lambda: encoder.decode(tokens))

    async def token_strings(
        self,
        base_model: str,
        tenant: str,
        tokens: Sequence[int],
        defaults: RequestDefaults | None,
    ) -> Sequence[str | None]:
        """Return each token's text in the vocabulary; None for a token that it lacks.

        defaults: the adapter's own request defaults.
        """
        encoder = await self._encoder(base_model, tenant, defaults)
        to_text = encoder.backend.id_to_token
        return await self._threads.run(tenant, lambda: [to_text(token) for token in tokens])

    async def encode_turns(
        self,
        base_model: str,
        texts: Sequence[str],
        max_context: int | None,
        defaults: RequestDefaults | None = None,
    ) -> tuple[TokenIds, ...]:
        """Return the token ids of prompts that each have only a user's message.

        texts: the messages.
        max_context: longest sequence that all replicas of the base model take, tokens; None if
            unknown.
        defaults: the adapter's own request defaults.

        Raises InvalidInput if a message cannot be encoded, Overloaded if the machine was too busy
        to render the adapter's own chat template.
        """
        context = max_context or _UNKNOWN_CONTEXT

        def encode(encoder: PromptEncoder) -> tuple[TokenIds, ...]:
            return tuple(encoder.encode_turn(text, context, defaults) for text in texts)

        return await self._run(_NO_TENANT, base_model, defaults, encode)

    async def encode_chats(
        self,
        base_model: str,
        tenant: str,
        chats: Sequence[Sequence[Mapping[str, Any]]],
        max_context: int | None,
        defaults: RequestDefaults | None = None,
    ) -> tuple[TokenIds, ...]:
        """Return the token ids of chats' prompts.

        chats: messages of each chat, with texts as contents.
        max_context: longest sequence that all replicas of the base model take, tokens; None if
            unknown.
        defaults: the adapter's own request defaults.

        Raises InvalidInput if the chat template refuses messages, Overloaded if the machine was too
        busy to render the adapter's own chat template.
        """
        context = max_context or _UNKNOWN_CONTEXT
        about = ("", Endpoint.CHAT, 0, tenant, base_model, None)
        calls = [Call(*about, messages=tuple(each), defaults=defaults) for each in chats]

        def encode(encoder: PromptEncoder) -> tuple[TokenIds, ...]:
            return tuple(encoder.encode(call, context)[0] for call in calls)

        return await self._run(tenant, base_model, defaults, encode)

    async def check(self, tenant: str, base_model: str, defaults: RequestDefaults) -> None:
        """Check an adapter's own chat template and system prompt with a few chats.

        tenant: owner of the adapter.

        Raises InvalidInput if a chat cannot be rendered, Overloaded if the machine was too
        busy.
        """
        if defaults.chat_template is not None or defaults.system_prompt is not None:
            await self._run(tenant, base_model, defaults, partial(check_defaults, defaults))

    async def encoder(
        self, base_model: str, tenant: str, tokenizer: TokenizerChanges | None = None
    ) -> PromptEncoder:
        """Return the encoder with a base model's tokenizer, or with an adapter's.

        tenant: tenant that occupies the thread in which an adapter's is made.
        tokenizer: differences of the adapter's tokenizer; None: no difference.

        Raises InvalidInput if the adapter's tokens do not have the ids behind the base model's.
        """
        encoder = self._base_encoders[base_model]
        return encoder if tokenizer is None else await self._own.get(tenant, encoder, tokenizer)

    def close(self) -> None:
        """End the processes that render adapters' own chat templates. Safe to call twice."""
        self._templates.close()

    async def _encoder(
        self, base_model: str, tenant: str, defaults: RequestDefaults | None
    ) -> PromptEncoder:
        tokenizer = None if defaults is None else defaults.tokenizer
        return await self.encoder(base_model, tenant, tokenizer)

    async def _run(
        self,
        tenant: str,
        base_model: str,
        defaults: RequestDefaults | None,
        work: Callable[[PromptEncoder], T],
    ) -> T:
        """Call `work` in a thread with an adapter's encoder; return the result.

        defaults: the adapter's own request defaults.
        """
        encoder = await self._encoder(base_model, tenant, defaults)
        if defaults is None or defaults.chat_template is None:
            return await self._threads.run(tenant, partial(work, encoder))
        return await self._templates.run(tenant, encoder, defaults.chat_template, work)


def read_encoders(settings: Settings) -> CallEncoders:
    """Read the tokenizer and chat template of every base model's folder.

    Raises InvalidSetting for a folder without tokenizer.json.
    """
    return CallEncoders({name: PromptEncoder(at) for name, at in settings.base_models.items()})
