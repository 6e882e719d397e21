"""OpenAI's chat and completion answers as server-sent events or one JSON body. Pure functions.

Bytes are ASCII JSON: clients that split lines like Python's str.splitlines would split an event at
a raw U+2028.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from lorikeet.apis.errors import openai_error_body
from lorikeet.protocol.messages import Call, Endpoint, FinalUsage
from lorikeet.text.choice import Choice, Ending, SchemaCheck, ToolCallPart
from lorikeet.text.compact_json import dump
from lorikeet.text.logprobs import LogprobsJson, SampledToken
from lorikeet_engine.adapter import Composition

DONE = b"data: [DONE]\n\n"


def schema_check_member(checks: Sequence[SchemaCheck]) -> bytes:
    """Return an answer's JSON member `schema_check`, with a comma before; b"" without checks."""
    return b',"schema_check":' + dump(list(map(asdict, checks))) if checks else b""


class EventStream:
    """Server-sent events of one streamed chat completion or completion.

    Call `delta` for each delta of text, then `end` once. `delta` puts a chat's role chunk before a
    choice's first delta.

    Constructor arguments:
    choice_usage: function that returns the usage of a choice so far, for each event; None
        leaves the usage out.
    prompts: JSON of each prompt's token ids, for the first event of a chat or of each choice of
        a completion; empty if not asked for.
    """

    def __init__(
        self,
        call: Call,
        choice_usage: Callable[[int], FinalUsage] | None = None,
        prompts: Sequence[bytes] = (),
    ) -> None:
        self._unsent_prompts = {i: prompts[i // call.n] for i in range(len(prompts) * call.n)}
        self._chat = call.endpoint is Endpoint.CHAT
        self._functions = _has_functions(call)
        self._include_usage, self._choice_usage = call.include_usage, choice_usage
        self._adapter = adapter_member(call)
        self._started: set[int] = set()
        head = _head(call, "chat.completion.chunk" if self._chat else "text_completion")
        self._open = b"data: " + dump(head)[:-1] + b',"choices":['
        usage = b',"usage":null' if call.include_usage else b""
        self._close = b"]" + usage + b"}\n\n"

    def delta(
        self,
        choice: int,
        text: str,
        finish: Ending | None = None,
        calls: Sequence[ToolCallPart] = (),
        logprobs: Sequence[SampledToken] | None = None,
        reasoning: str = "",
        token_ids: Sequence[int] = (),
    ) -> bytes:
        """Return events for new text and tool calls of a choice and, with `finish`, its end.

        The result is b"" if there is nothing to send.

        choice: index of the choice in the answer, prompt_index * n + j.
        text: new text, possibly empty.
        finish: reason for the choice's end; None while the choice goes on.
        calls: new parts of tool calls.
        logprobs: log probabilities of this text's tokens.
        reasoning: new thinking, which comes before the text.
        token_ids: new tokens, if asked for.
        """
        if not self._chat:
            if not (text or finish or logprobs or token_ids):
                return b""
            known = _logprobs(Endpoint.COMPLETIONS, logprobs)
            return self._event(choice, dump(text), finish, known, token_ids)
        events = b""
        if choice not in self._started:
            self._started.add(choice)
            content = b"null" if calls and not text else b'""'
            role = b'{"role":"assistant","content":' + content + b',"refusal":null}'
            events += self._event(choice, role)
        if reasoning:
            events += self._event(choice, b'{"reasoning_content":' + dump(reasoning) + b"}")
        if text or logprobs or token_ids:
            known = _logprobs(Endpoint.CHAT, logprobs)
            content = b'{"content":' + dump(text) + b"}"
            events += self._event(choice, content, None, known, token_ids)
        for call in calls:
            events += self._event(choice, dump(_tool_call_delta(call, functions=self._functions)))
        if finish is not None:
            events += self._event(choice, b"{}", finish)
        return events

    def end(self, usage: FinalUsage, checks: Sequence[SchemaCheck] = ()) -> bytes:
        """Return the last events: an event without choices, with the usage if the client asked for
        it and with the checks if there are any, then [DONE].

        checks: one check for each choice; empty if the answer is not checked.
        """
        checked = schema_check_member(checks)
        if self._include_usage:
            return self._open + self._close_with(usage, self._adapter + checked) + DONE
        return self._open + b"]" + checked + b"}\n\n" + DONE if checked else DONE

    def _event(
        self,
        choice: int,
        delta: bytes,
        finish: Ending | None = None,
        logprobs: bytes = b"null",
        token_ids: Sequence[int] = (),
    ) -> bytes:
        field = b',"delta":' if self._chat else b',"text":'
        reason = b"null" if finish is None else dump(_reason(finish, functions=self._functions))
        event = b'{"index":%d' % choice, field, delta, b',"logprobs":', logprobs
        close = self._close
        if self._choice_usage is not None:
            close = self._close_with(self._choice_usage(choice))
        ids = _member("token_ids", dump(token_ids) if token_ids else None)
        if self._unsent_prompts:
            ids, close = self._with_prompt(choice, ids, close)
        return b"".join((self._open, *event, b',"finish_reason":', reason, ids, b"}", close))

    def _with_prompt(self, choice: int, of_choice: bytes, close: bytes) -> tuple[bytes, bytes]:
        """Add the prompt's token ids to an event, unless they were sent already.

        A chat has them once, beside its choices; a completion has them in each choice. Returns
        `of_choice` and `close`, one of them with the ids.

        choice: index of the choice that the event is about.
        of_choice: JSON members of the event's choice.
        close: JSON text that ends the event.
        """
        prompt = _member("prompt_token_ids", self._unsent_prompts.pop(choice, None))
        if not self._chat:
            return of_choice + prompt, close
        self._unsent_prompts.clear()  # all choices of a chat share one prompt
        return of_choice, close[:1] + prompt + close[1:]

    def _close_with(self, usage: FinalUsage, adapter: bytes = b"") -> bytes:
        return b"]" + adapter + b',"usage":' + dump(_usage(usage, chat=self._chat)) + b"}\n\n"


def json_body(
    call: Call,
    choices: Sequence[Choice],
    usage: FinalUsage,
    checks: Sequence[SchemaCheck] = (),
) -> bytes:
    """Return the JSON body of a chat completion or completion without `stream`.

    choices: finished choices, in order of index; choice i continues prompt i // n.
    checks: one check for each choice; empty if the answer is not checked.
    """
    chat = call.endpoint is Endpoint.CHAT
    head = dump(_head(call, "chat.completion" if chat else "text_completion"))
    functions = _has_functions(call)
    bodies = [_choice(chat, functions, index, choice) for index, choice in enumerate(choices)]
    used = dump(_usage(usage, chat=chat))
    prompt = _prompt_members(choices[0]) if chat else b""
    more = adapter_member(call) + schema_check_member(checks)
    known = (head[:-1], b",".join(bodies), prompt, more, used)
    return b'%s,"choices":[%s]%s%s,"usage":%s}' % known


def adapter_member(call: Call) -> bytes:
    """Return an answer's JSON member `adapter`, or `adapters` of a composition; b"" for the base
    model.
    """
    adapter = call.adapter
    if adapter is None:
        return b""
    known = [
        {
            "name": f"{ref.tenant}/{ref.name}",
            "version": ref.version if call.is_recorded else None,
            "digest": ref.digest,
        }
        for ref in adapter.members
    ]
    if not isinstance(adapter, Composition):
        return b',"adapter":' + dump(known[0])
    pairs = zip(known, adapter.weights, strict=True)
    return b',"adapters":' + dump([each | {"weight": weight} for each, weight in pairs])


def failed_completion_event(code: str, message: str, param: str | None = None) -> bytes:
    """Return the error event that ends a failed stream of a chat completion or completion."""
    return b"data: " + dump(openai_error_body(code, message, param)) + b"\n\n"


def _has_functions(call: Call) -> bool:
    """Return True if the client sent tools as OpenAI's deprecated `functions`, whose calls have a
    shape of their own in answers.
    """
    return call.tools is not None and call.tools.functions


def _choice(chat: bool, functions: bool, index: int, choice: Choice) -> bytes:
    text = (
        b'"message":' + dump(_message(choice, functions))
        if chat
        else b'"text":' + dump(choice.text)
    )
    logprobs = b"null" if choice.logprobs is None else choice.logprobs.json()
    reason = dump(_reason(choice.finish, functions=functions))
    prompt = b"" if chat else _prompt_members(choice)
    ids = None if choice.token_ids is None else dump(choice.token_ids)
    known = (index, text, logprobs, prompt, reason, _member("token_ids", ids))
    return b'{"index":%d,%s,"logprobs":%s%s,"finish_reason":%s%s}' % known


def _prompt_members(choice: Choice) -> bytes:
    known = choice.prompt_logprobs
    scored = b"" if known is None else b',"prompt_logprobs":' + known
    return scored + _member("prompt_token_ids", choice.prompt_token_ids)


def _logprobs(endpoint: Endpoint, tokens: Sequence[SampledToken] | None) -> bytes:
    """Return the `logprobs` object of a delta as JSON; null without tokens."""
    return LogprobsJson(endpoint, tokens).json() if tokens else b"null"


def _member(name: str, token_ids: bytes | None) -> bytes:
    """Return token ids as a JSON member with a comma before it; b"" for None."""
    return b"" if token_ids is None else b",%s:%s" % (dump(name), token_ids)


def _message(choice: Choice, functions: bool) -> dict[str, Any]:
    content = None if choice.calls and not choice.text else choice.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls and functions:
        message["function_call"] = _whole_call(choice.calls)["function"]
    elif choice.calls:
        calls = groupby(choice.calls, lambda delta: delta.index)
        message["tool_calls"] = [_whole_call(list(deltas)) for _, deltas in calls]
    return message


def _whole_call(deltas: Sequence[ToolCallPart]) -> dict[str, Any]:
    arguments = "".join(delta.arguments for delta in deltas)
    function = {"name": deltas[0].name, "arguments": arguments}
    return {"id": deltas[0].id, "type": "function", "function": function}


def _tool_call_delta(delta: ToolCallPart, *, functions: bool) -> dict[str, Any]:
    call: dict[str, Any] = {"function": {"arguments": delta.arguments}}
    if delta.id is not None:
        call = _whole_call([delta])
    return {"function_call": call["function"]} if functions else _tool_calls(delta.index, call)


def _tool_calls(index: int, call: dict[str, Any]) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, **call}]}


def _usage(usage: FinalUsage, *, chat: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if chat:
        shown["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return shown


def _reason(finish: Ending, *, functions: bool) -> str:
    called = finish is Ending.TOOL_CALLS
    return "function_call" if called and functions else finish.value


def _head(call: Call, kind: str) -> dict[str, Any]:
    chat = call.endpoint is Endpoint.CHAT
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{call.request_id}",
        "object": kind,
        "created": call.created,
        "model": call.model,
        **({"service_tier": call.service_tier} if chat else {}),
    }
