"""Thinking is separated from the answer, however the text is cut into tokens."""

import json
import random
import re
import time
from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses import Response
from tokenizers import AddedToken, Tokenizer

from lorikeet.apis.answer import Answer
from lorikeet.protocol.messages import Call, Endpoint, FinalUsage, Thinking, ToolUse
from lorikeet.text.detokenizer import Vocabulary
from lorikeet.text.reasoning import ReasoningParser, thinking_behind, thinking_within
from lorikeet.text.tools.syntax import HERMES
from lorikeet_engine.request import FinishReason, SamplingParams, TokenLogprobs, Tokens
from tests.apis.test_chat_answer import official
from tests.apis.test_responses_answer import events as response_events
from tests.apis.typed_events import kinds

CHAT = Call("r1", Endpoint.CHAT, 1_700_000_000, "acme", "m", None)
RESPONSE = replace(
    CHAT,
    endpoint=Endpoint.RESPONSES,
    request_fields=b'"parallel_tool_calls":true,"tool_choice":"auto","tools":[]',
)
TOOL = {"type": "function", "function": {"name": "time"}}
NOW = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
THOUGHT = "Two and two,\n\nso < 5?"
TEXT = f"<think>\n{THOUGHT}\n</think>\n\nIt is 4."
STEPS = (1, 2, 3, 100)


def split(text: str, thinking: Thinking) -> tuple[str, str]:
    """Split a whole text into thinking and answer."""
    if thinking is Thinking.POSSIBLE:
        opening = re.match(r"\s*<think>", text)
        if opening is None:
            return "", text
        text = text[opening.end() :]
    thought, _, answer = text.partition("</think>")
    return thought.strip("\n"), answer.lstrip("\n")


@pytest.mark.parametrize("thinking", [Thinking.POSSIBLE, Thinking.BEGUN])
def test_any_text_in_any_pieces_is_parsed_like_the_whole_text(thinking: Thinking) -> None:
    dice = random.Random(0)
    words = ("<think>", "</think>", "<thi", "</th", "ink>", "<", "\n", "\n\n", " ", "a", "é")
    for _ in range(3000):
        text = "".join(dice.choices(words, k=dice.randrange(9)))
        parser, thought, answer, rest = ReasoningParser(thinking), "", "", text
        while rest:
            cut = dice.randrange(1, len(rest) + 1)
            answer += parser.push(rest[:cut])
            thought += parser.take()
            rest = rest[cut:]
        answer += parser.push("", last=True)
        thought += parser.take()
        assert (thought, answer) == split(text, thinking), repr(text)


def test_whitespace_before_a_tag_costs_the_same_however_much_came_before() -> None:
    parser, took_s = ReasoningParser(Thinking.POSSIBLE), []
    for _ in range(8):
        began_s = time.thread_time()
        for _ in range(500):
            assert parser.push(" " * 100) == ""
        took_s.append(time.thread_time() - began_s)
    assert took_s[-1] < 5 * took_s[0]
    assert parser.push("word") == " " * 400_000 + "word"


def test_text_that_cannot_begin_a_tag_is_not_held_back() -> None:
    parser = ReasoningParser(Thinking.BEGUN)
    sent = []
    for piece in ("so ", "a <", " b", "\n", "c</th", "is\n\n", "</think>", "\n", "x"):
        answer = parser.push(piece)
        sent.append((parser.take(), answer))
    assert sent == [
        *(("so ", ""), ("a ", ""), ("< b", ""), ("", ""), ("\nc", ""), ("</this", "")),
        *(("", ""), ("", ""), ("", "x")),
    ]


@pytest.mark.parametrize(
    ("prompt", "thinking"),
    [
        ("<|user|>What does <think> mean?<|assistant|>", Thinking.POSSIBLE),
        ("<|assistant|><think>\n", Thinking.BEGUN),
        ("<|assistant|><think>\n\n</think>\n\n", Thinking.NEVER),
    ],
)
def test_the_end_of_a_prompt_decides_whether_thinking_has_begun(
    prompt: str, thinking: Thinking
) -> None:
    assert thinking_behind(prompt) is thinking


@pytest.mark.parametrize(
    ("said", "thinking"),
    [
        ("<think>so far", Thinking.BEGUN),
        ("<think>so</think>It", Thinking.NEVER),
        ("It is", Thinking.NEVER),
        ("", Thinking.POSSIBLE),
    ],
)
def test_a_continued_message_decides_whether_thinking_goes_on(
    said: str, thinking: Thinking
) -> None:
    assert thinking_within(said) is thinking


def with_tags(tokenizer: Tokenizer, tags: str) -> Tokenizer:
    """The tokenizer, to which the tags are text, tokens that are text, or special tokens."""
    own = Tokenizer.from_str(tokenizer.to_str())
    if tags != "letters":
        for tag in ("<think>", "</think>"):
            own.add_tokens([AddedToken(tag, normalized=False, special=tags == "special")])
    own.add_special_tokens(["<|other|>"])
    return own


def answered(
    tokenizer: Tokenizer,
    call: Call,
    text: str,
    step: int = 1,
    finish: FinishReason | None = FinishReason.STOP,
    thinking: Thinking = Thinking.POSSIBLE,
) -> tuple[list[bytes], FinalUsage | None]:
    """Sent bytes and usage of a text fed `step` tokens at a time."""
    answer = Answer(call, [(1,)], Vocabulary(tokenizer), HERMES, thinking)
    ids = tokenizer.encode(text).ids
    sent: list[Any] = []
    for at in range(0, len(ids), step):
        part = tuple(ids[at : at + step])
        known = tuple(TokenLogprobs(-(at + i) / 10, ()) for i in range(len(part)))
        for choice in range(call.n):
            end = finish if at + step >= len(ids) else None
            sent += answer.take([Tokens("r1", choice, part, end, known)])
    usage = next((item for item in sent if isinstance(item, FinalUsage)), None)
    return [item for item in sent if isinstance(item, bytes)], usage


def deltas(sent: list[bytes], choice: int = 0) -> list[dict[str, Any]]:
    lines = b"".join(sent).decode().split("\n\n")
    read = [json.loads(line[6:]) for line in lines if line and "[DONE]" not in line]
    choices = [each for event in read for each in event["choices"]]
    return [each["delta"] for each in choices if each["index"] == choice]


def joined(sent: list[bytes], field: str, choice: int = 0) -> str:
    return "".join(delta.get(field) or "" for delta in deltas(sent, choice))


def message(sent: list[bytes]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(sent[-1])["choices"][0]["message"]
    return read


@pytest.mark.parametrize("tags", ["letters", "tokens", "special"])
@pytest.mark.parametrize("step", STEPS)
def test_a_chat_streams_thinking_before_the_answer(
    tokenizer: Tokenizer, tags: str, step: int
) -> None:
    own = with_tags(tokenizer, tags)
    sent, usage = answered(own, replace(CHAT, stream=True, n=2), TEXT + "<|other|>", step)
    for choice in range(2):
        kinds = [next(iter(delta), None) for delta in deltas(sent, choice)]
        assert kinds == sorted(kinds, key=["role", "reasoning_content", "content", None].index)
        assert joined(sent, "reasoning_content", choice) == THOUGHT
        assert joined(sent, "content", choice) == "It is 4."
    whole, _ = answered(own, CHAT, TEXT, step)
    assert message(whole) == {
        "role": "assistant",
        "content": "It is 4.",
        "refusal": None,
        "reasoning_content": THOUGHT,
    }
    assert usage is not None
    thought = own.encode(TEXT[: TEXT.index("</think>") + len("</think>")]).ids
    assert usage.reasoning_tokens == 2 * len(thought)
    assert usage.completion_tokens == 2 * len(own.encode(TEXT + "<|other|>").ids)


def test_without_thinking_the_answer_is_unchanged(tokenizer: Tokenizer) -> None:
    for text in ("\n It is <think>no</think>", "<thinking>", " \n", ""):
        sent, usage = answered(tokenizer, CHAT, text + " ")
        assert message(sent) == {"role": "assistant", "content": text + " ", "refusal": None}
        assert usage is not None
        assert usage.reasoning_tokens == 0


def test_empty_thinking_is_no_reasoning(tokenizer: Tokenizer) -> None:
    sent, usage = answered(tokenizer, CHAT, "<think>\n\n</think>\n\nYes.")
    assert message(sent) == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert usage is not None
    assert usage.reasoning_tokens == len("<think>\n\n</think>")


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_may_end_within_thinking(tokenizer: Tokenizer, stream: bool) -> None:
    call = replace(CHAT, stream=stream, tools=ToolUse((TOOL,), forced=("time",)))
    text = f"\nI call {NOW}</th"
    sent, usage = answered(
        tokenizer, call, text, finish=FinishReason.LENGTH, thinking=Thinking.BEGUN
    )
    thought = joined(sent, "reasoning_content") if stream else message(sent)["reasoning_content"]
    assert thought == text.strip()
    content = joined(sent, "content") if stream else message(sent)["content"]
    assert content == ""
    assert usage is not None
    assert usage.reasoning_tokens == usage.completion_tokens == len(text)


@pytest.mark.parametrize("step", STEPS)
def test_calls_are_parsed_only_after_the_thinking(tokenizer: Tokenizer, step: int) -> None:
    call = replace(CHAT, tools=ToolUse((TOOL,)))
    sent, _ = answered(tokenizer, call, f"<think>{NOW}?</think>\n{NOW}", step)
    told = message(sent)
    assert told["reasoning_content"] == f"{NOW}?"
    assert told["content"] is None
    assert len(told["tool_calls"]) == 1


@pytest.mark.parametrize("step", STEPS)
def test_stop_strings_do_not_apply_to_thinking(tokenizer: Tokenizer, step: int) -> None:
    call = replace(CHAT, stream=True, stop=("two", "\n\n", "think"))
    sent, _ = answered(tokenizer, call, f"{TEXT} And two more", step, None)
    assert joined(sent, "reasoning_content") == THOUGHT
    assert joined(sent, "content") == "It is 4. And "


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("tags", ["letters", "tokens", "special"])
@pytest.mark.parametrize("called", ["", NOW])
def test_only_the_answers_tokens_have_logprobs(
    tokenizer: Tokenizer, step: int, tags: str, called: str
) -> None:
    own = with_tags(tokenizer, tags)
    call = replace(CHAT, stream=True, sampling=SamplingParams(logprobs=1), tools=ToolUse((TOOL,)))
    sent, _ = answered(own, call, f"{TEXT}{called} é", step)
    lines = b"".join(sent).decode().split("\n\n")
    for line in lines[:-2]:
        (choice,) = json.loads(line[6:])["choices"]
        told = (choice["logprobs"] or {"content": []})["content"]
        said = choice["delta"].get("content") or ""
        assert b"".join(bytes(token["bytes"]) for token in told) == said.encode()
    assert joined(sent, "content") == "It is 4. é"


def test_a_token_across_thinking_and_answer_has_a_logprob(tokenizer: Tokenizer) -> None:
    own = Tokenizer.from_str(tokenizer.to_str())
    own.add_tokens([AddedToken(">\n\nI", normalized=False)])
    call = replace(CHAT, sampling=SamplingParams(logprobs=1), tools=ToolUse((TOOL,)))
    sent, usage = answered(own, call, TEXT)
    told = json.loads(sent[-1])["choices"][0]["logprobs"]["content"]
    assert "".join(token["token"] for token in told) == ">\n\nIt is 4."
    assert usage is not None
    assert usage.reasoning_tokens == len(TEXT) - len("\n\nIt is 4.")


def test_an_incomplete_character_within_thinking_has_no_logprob(tokenizer: Tokenizer) -> None:
    call = replace(CHAT, sampling=SamplingParams(logprobs=1))
    answer = Answer(call, [(1,)], Vocabulary(tokenizer), None, Thinking.BEGUN)
    ids = tuple(tokenizer.encode("a🦜").ids[:-1])
    known = (TokenLogprobs(-1.0, ()),) * len(ids)
    *_, body = answer.take([Tokens("r1", 0, ids, FinishReason.LENGTH, known)])
    assert isinstance(body, bytes)
    assert json.loads(body)["choices"][0]["logprobs"]["content"] == []


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_in_the_possible_beginning_of_a_tag_ends_the_answer(
    tokenizer: Tokenizer, stream: bool
) -> None:
    call = replace(CHAT, stop=("hin",), stream=stream, sampling=SamplingParams(logprobs=0))
    answer = Answer(call, [(1,)], Vocabulary(tokenizer), None, Thinking.POSSIBLE)
    ids = tuple(tokenizer.encode("<thin").ids)
    known = (TokenLogprobs(-1.0),) * len(ids)
    items = answer.take([Tokens("r1", 0, ids, FinishReason.LENGTH, known)])
    sent = b"".join(item for item in items if isinstance(item, bytes)).decode()
    assert answer.stop_string(0) == "hin"
    assert '"content":"<t"' in sent
    assert '"finish_reason":"stop"' in sent
    assert sent.count('"top_logprobs"') == len("<t")


PART = ["response.output_item.added", "response.content_part.added"]
REASONING = ["response.reasoning_text.done", "response.content_part.done"]
MESSAGE = ["response.output_text.done", "response.content_part.done"]
CALLED = ["response.function_call_arguments.delta", "response.function_call_arguments.done"]
DONE = "response.output_item.done"


@pytest.mark.parametrize("step", [3, 100])
@pytest.mark.parametrize("called", ["", NOW])
def test_a_response_has_reasoning_as_its_first_item(
    tokenizer: Tokenizer, step: int, called: str
) -> None:
    call = replace(RESPONSE, stream=True, tools=ToolUse((TOOL,)))
    sent, usage = answered(tokenizer, call, f"<think>{THOUGHT}</think>It is 4.{called}", step)
    read = response_events(b"".join(sent))
    thought = [event for event in read if event["type"] == "response.reasoning_text.delta"]
    assert "".join(event["delta"] for event in thought) == THOUGHT
    assert {(event["output_index"], event["content_index"]) for event in thought} == {(0, 0)}
    deltas = ("response.reasoning_text.delta", "response.output_text.delta")
    assert [kind for kind in kinds(read)[2:-1] if kind not in deltas] == [
        *(*PART, *REASONING, DONE, *PART, *MESSAGE, DONE),
        *((PART[0], *CALLED, DONE) if called else ()),
    ]
    last = official(Response, read[-1]["response"])
    assert last.output_text == "It is 4."
    assert last.usage is not None
    assert usage is not None
    assert last.usage.output_tokens_details.reasoning_tokens == usage.reasoning_tokens > 0
    first = read[-1]["response"]["output"][0]
    assert first["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert {event["item_id"] for event in thought} == {first["id"]}
    assert len({item["id"] for item in read[-1]["response"]["output"]}) == len(last.output)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (f"<think>{THOUGHT}</think>It is 4.", ["reasoning", "message"]),
        (f"<think>{THOUGHT}</think>{NOW}", ["reasoning", "function_call"]),
        (f"<think>{THOUGHT}", ["reasoning"]),
        ("<think></think>Yes", ["message"]),
        ("<think></think>", ["message"]),
    ],
)
@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_whole_response_equals_the_last_event_of_its_stream(
    tokenizer: Tokenizer, text: str, kinds: list[str], finish: FinishReason
) -> None:
    call = replace(RESPONSE, tools=ToolUse((TOOL,)))
    sent, _ = answered(tokenizer, call, text, finish=finish)
    body = json.loads(sent[-1])
    official(Response, body)
    assert [item["type"] for item in body["output"]] == kinds
    *before, last = [item["status"] for item in body["output"]]
    assert last == ("completed" if finish is FinishReason.STOP else "incomplete")
    assert set(before) <= {"completed"}
    streamed, _ = answered(tokenizer, replace(call, stream=True), text, finish=finish)
    ended = response_events(b"".join(streamed))[-1]["response"]
    for response in (body, ended):
        for item in response["output"]:
            item.pop("call_id", None)  # is drawn
    assert ended == body
