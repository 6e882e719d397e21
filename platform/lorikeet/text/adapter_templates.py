"""Encoders of prompts with adapters' own chat templates, and the check of a template."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeVar

from lorikeet.errors import InvalidInput, Overloaded
from lorikeet.protocol.messages import Call, Endpoint, ToolUse
from lorikeet.request_defaults import RequestDefaults
from lorikeet.text.prompts import PromptEncoder
from lorikeet.text.template_server import (
    ServerBusy,
    TemplateOverrun,
    TemplateProcesses,
    TemplateRefusal,
)
from lorikeet.text.tenant_threads import TenantThreads

T = TypeVar("T")
Chat = tuple[Mapping[str, Any], ...]

_THREADS = 4
_MAX_ENCODERS = 256
"""Maximum number of encoders that are kept, each for a tenant and a template."""
_BUSY_RETRY_S = 5.0
_WHOSE = "the adapter's own chat template"
_ASKED = "Is the parcel here?"
_CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "find", "arguments": {"parcel": "12"}},
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find a parcel.",
        "parameters": {"type": "object", "properties": {"parcel": {"type": "string"}}},
    },
}
_USER: Mapping[str, Any] = {"role": "user", "content": _ASKED}
_ANSWER = {"role": "assistant", "content": "I shall look. " * 40}
_CHATS: Sequence[Chat] = ((_USER,), (_USER, _ANSWER, _USER), (*(_USER, _ANSWER) * 100, _USER))
_TOOL_CHAT: Chat = (
    _USER,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call00000", "content": "It is."},
)


class AdapterTemplates:
    """Threads that encode prompts with adapters' own chat templates. For one event loop.

    One tenant occupies one thread and one process that renders (template_server.py).
    """

    def __init__(self) -> None:
        self._processes, self._threads = TemplateProcesses(), TenantThreads(_THREADS, 1)
        self._encoder = lru_cache(_MAX_ENCODERS)(self._new_encoder)

    async def run(
        self,
        tenant: str,
        encoder: PromptEncoder,
        template: str,
        work: Callable[[PromptEncoder], T],
        max_wait_s: float | None = None,
    ) -> T:
        """Return the result of `work`, called in a thread with an encoder that has a template.

        tenant: tenant whose process renders the template.
        encoder: encoder of the base model.
        template: the adapter's own chat template.
        max_wait_s: limit on the seconds until the result; None: no limit.

        Raises InvalidInput if the template exceeds a limit, Overloaded if there was no time for it,
        and the exceptions of `work`.
        """

        def encode() -> T:
            return work(self._encoder(tenant, encoder, template))

        try:
            async with asyncio.timeout(max_wait_s):
                return await self._threads.run(tenant, encode)
        except TemplateOverrun as error:
            raise InvalidInput(f"{_WHOSE} {error} for these messages", param="messages") from None
        except (ServerBusy, TimeoutError) as error:
            raise Overloaded(
                f"there was no time to render {_WHOSE} ({error or 'others are rendered first'}): "
                "send the request again",
                retry_after_s=_BUSY_RETRY_S,
            ) from None

    def close(self) -> None:
        """End the processes that render. Safe to call twice."""
        self._processes.close()

    def _new_encoder(self, tenant: str, encoder: PromptEncoder, template: str) -> PromptEncoder:
        processes, special_tokens = self._processes, encoder.special_tokens
        own = _AdapterTemplate(template, special_tokens, partial(processes.render, tenant))
        own.names = own.checked(processes.names, tenant, template)
        return encoder.with_template(own)


class _AdapterTemplate:
    """Chat template of an adapter, rendered in a process of its tenant: a ChatTemplate."""

    def __init__(
        self, text: str, special_tokens: Mapping[str, str], render: Callable[..., str]
    ) -> None:
        self.texts: Sequence[str] = (text,)
        self.text_with_tools = text
        self.names = frozenset[str]()
        self._special_tokens, self._render = special_tokens, render

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        given = {**self._special_tokens, **variables, "messages": messages}
        return self.checked(self._render, self.text_with_tools, given)

    @staticmethod
    def checked(ask: Callable[..., T], *arguments: Any) -> T:
        """Return the result of `ask`, which renders or reads a template in a tenant's process.

        Raises InvalidInput if the template fails.
        """
        try:
            return ask(*arguments)
        except TemplateRefusal as error:
            problem = f"{_WHOSE} refuses these messages: {error}"
            raise InvalidInput(problem, param="messages") from None


def check_defaults(defaults: RequestDefaults, encoder: PromptEncoder) -> None:
    """Check an adapter's own chat template and system prompt with a few chats.

    encoder: encoder with the adapter's template, or the base model's if it has none.

    Raises InvalidInput if a chat cannot be rendered, or is rendered without its message or the
    system prompt.
    """
    chats: list[tuple[Chat, ToolUse | None]] = [(messages, None) for messages in _CHATS]
    if encoder.takes_tools:
        chats += [((_USER,), ToolUse((_TOOL,))), (_TOOL_CHAT, ToolUse((_TOOL,)))]
    for messages, tools in chats:
        call = Call("check", Endpoint.CHAT, 0, "", "", None, messages=messages, tools=tools)
        text = encoder.prompt_text(replace(call, defaults=defaults))
        if _ASKED not in text:
            raise InvalidInput(f"{_WHOSE} does not show the user's message", param="chat_template")
        system_prompt = (defaults.system_prompt or "").strip()
        if system_prompt not in text:
            raise InvalidInput(
                "the chat template does not show the system prompt", param="system_prompt"
            )
