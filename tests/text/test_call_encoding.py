"""Encoding of calls: refusals by the context, echoes, and calls that are encoded at once."""

from dataclasses import replace
from pathlib import Path

import pytest

from lorikeet.errors import ContextLengthExceeded
from lorikeet.protocol.messages import Call, Endpoint, ToolUse
from lorikeet.text.prompts import PromptEncoder, check_context, encode_call, is_short
from tests.text.test_prompts import CHAT, TOOL

DEMO = PromptEncoder(Path("demo/model"))
ENGINE = 100
PROMPTS = ((1,) * 7, (1,) * 30)  # the longest counts
COMPLETION = replace(CHAT, endpoint=Endpoint.COMPLETIONS, messages=())
ASSISTANT = {"role": "assistant", "content": ""}


def call(max_tokens: int | None, max_context: int | None) -> Call:
    return replace(CHAT, max_tokens=max_tokens, max_context=max_context)


def test_prompt_and_answer_may_take_the_whole_limit_but_not_exceed_it() -> None:
    check_context(call(20, 50), PROMPTS, ENGINE)
    with pytest.raises(
        ContextLengthExceeded, match="maximum context length is 50 tokens"
    ) as raised:
        check_context(call(21, 50), PROMPTS, ENGINE)
    assert raised.value.param == "max_tokens"


def test_a_prompt_that_leaves_no_room_in_a_limit_is_named() -> None:
    with pytest.raises(ContextLengthExceeded, match="for this tenant or key") as raised:
        check_context(call(None, 30), PROMPTS, ENGINE)
    assert raised.value.param == "prompt"


def test_a_prompt_leaves_room_for_one_token_in_the_engines_context() -> None:
    check_context(call(1000, None), PROMPTS, 31)
    with pytest.raises(ContextLengthExceeded, match="the prompt has 30, and"):
        check_context(call(1, None), PROMPTS, 30)


def test_tokens_are_counted_beyond_the_context() -> None:
    counted = replace(CHAT, endpoint=Endpoint.COUNT_TOKENS)
    length = encode_call(counted, DEMO, 4096).work.prompt_tokens
    assert encode_call(counted, DEMO, length).work.prompt_tokens == length
    with pytest.raises(ContextLengthExceeded):
        encode_call(CHAT, DEMO, length)


def test_an_echo_repeats_texts_as_sent_and_ids_as_their_text() -> None:
    ids = tuple(DEMO.backend.encode("two words", add_special_tokens=False).ids)
    asked = replace(COMPLETION, prompts=("one ", ids), n=2)
    assert encode_call(asked, DEMO, 4096).echoed == ()
    encoded = encode_call(replace(asked, echo=True), DEMO, 4096)
    assert encoded.echoed == ("one ", "two words")
    assert tuple(encoded.prompts[1]) == ids


def test_a_call_is_sent_without_the_texts_of_its_prompts() -> None:
    given = replace(CHAT, template_args={"secret": 1}, template_defaults={"enable_thinking": True})
    encoded = encode_call(given, DEMO, 4096)
    sent = encoded.to_send()
    assert sent.call.request_id == given.request_id
    assert sent.prompts == encoded.prompts
    assert (sent.call.messages, sent.call.template_args, sent.call.template_defaults) == (
        (),
        {},
        {},
    )
    assert sent.ignored == ("secret",)


@pytest.mark.parametrize(
    ("given", "short"),
    [
        (CHAT, True),
        (replace(CHAT, messages=({"role": "user", "content": "x" * 1100},)), False),
        (replace(CHAT, messages=CHAT.messages * 100), False),
        (replace(CHAT, tools=ToolUse((TOOL,))), False),
        (replace(CHAT, template_args={"times": 1_000_000}), False),
        (replace(CHAT, messages=({**ASSISTANT, "reasoning_content": "x" * 1100},)), False),
        (replace(CHAT, messages=({**ASSISTANT, "tool_calls": [{"id": "x" * 9999}]},)), False),
        (replace(COMPLETION, prompts=("hello", (1, 2, 3))), True),
        (replace(COMPLETION, prompts=(tuple(range(1100)),)), False),
        (replace(COMPLETION, prompts=("x",) * 100), False),
    ],
)
def test_only_few_and_short_texts_are_encoded_on_the_event_loop(given: Call, short: bool) -> None:
    assert is_short(given) is short
