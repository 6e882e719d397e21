import json
import time
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from lorikeet.apis.answer import Answer
from lorikeet.protocol.messages import Call, Endpoint, FinalUsage, Refusal, ToolUse
from lorikeet.text.detokenizer import Vocabulary
from lorikeet.text.prompt_echoes import PromptEchoes
from lorikeet.text.tools.syntax import HERMES
from lorikeet_engine.errors import AdapterLoadFailed, StepFailed
from lorikeet_engine.request import (
    EngineTimings,
    Failed,
    FinishReason,
    PromptLogprobs,
    SamplingParams,
    TokenLogprobs,
    Tokens,
)

CALL = Call(
    request_id="r1",
    endpoint=Endpoint.COMPLETIONS,
    created=0,
    tenant="acme",
    model="acme/support",
    adapter=None,
)


def tokens(tokenizer, text, choice=0, finish=None):
    return Tokens("r1", choice, tuple(tokenizer.encode(text).ids), finish)


def events(items):
    raw = b"".join(item for item in items if isinstance(item, bytes))
    lines = raw.decode().split("\n\n")
    data = [line.removeprefix("data: ") for line in lines if line]
    return [event if event == "[DONE]" else json.loads(event) for event in data]


def test_one_body_holds_every_choice_and_the_usage(tokenizer):
    prompts = [tuple(tokenizer.encode(text).ids) for text in ("ab", "cde")]
    answer = Answer(replace(CALL, n=2), prompts, Vocabulary(tokenizer))
    assert answer.take([tokens(tokenizer, f"text {i}", i) for i in range(4)]) == []
    found = (3, 2, 0, 2)  # the first choice of a prompt computes what the others find
    ends = [
        Tokens("r1", i, (), FinishReason.LENGTH, timings=EngineTimings(cached_tokens=found[i]))
        for i in range(4)
    ]
    usage, raw = answer.take(ends)
    body = json.loads(raw)
    assert [choice["text"] for choice in body["choices"]] == [f"text {i}" for i in range(4)]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 24,
        "total_tokens": 29,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert usage == FinalUsage(
        5, 2, 24, tuple(EngineTimings(cached_tokens=count) for count in found)
    )
    assert answer.ended


def test_queued_outputs_leave_as_one_chunk(tokenizer):
    answer = Answer(replace(CALL, stream=True), [(1,)], Vocabulary(tokenizer))
    outputs = [tokens(tokenizer, word) for word in ("one ", "two ", "three")]
    assert len(answer.take(outputs)) == 1


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS])
def test_continuous_usage_is_in_each_event_if_asked_for(tokenizer, endpoint):
    call = replace(CALL, endpoint=endpoint, stream=True, include_usage=True, continuous_usage=True)
    answer = Answer(replace(call, n=2), [(1,) * 3], Vocabulary(tokenizer))
    outputs = [tokens(tokenizer, "ab", 0), tokens(tokenizer, "cde", 1)]
    outputs += [tokens(tokenizer, "f", i, FinishReason.STOP) for i in range(2)]
    *shown, last, _ = events(answer.take(outputs))
    made = {0: [], 1: []}
    for event in shown:
        usage = event["usage"]
        assert usage["prompt_tokens"] == 3
        assert usage["total_tokens"] == 3 + usage["completion_tokens"]
        made[event["choices"][0]["index"]].append(usage["completion_tokens"])
    assert {index: sorted(set(counts)) for index, counts in made.items()} == {0: [2, 3], 1: [3, 4]}
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("stream", [True, False])
def test_a_message_has_its_stop_string_and_cached_tokens(tokenizer, stream):
    call = replace(
        CALL, endpoint=Endpoint.MESSAGES, stop=("?", "!", "!!"), stream=stream, max_tokens=20
    )
    answer = Answer(call, [(1, 2, 3)], Vocabulary(tokenizer))
    output = replace(tokens(tokenizer, "stop! no"), timings=EngineTimings(cached_tokens=2))
    items = answer.take([output])
    assert answer.ended
    if stream:
        read = [json.loads(line[6:]) for line in items[-1].split(b"\n") if line[:5] == b"data:"]
        started, delta = read[0]["message"], read[-2]
        assert delta["delta"]["stop_sequence"] == "!"
        assert started["usage"]["cache_read_input_tokens"] == 2
    else:
        delta = json.loads(items[-1])
        assert (delta["stop_reason"], delta["stop_sequence"]) == ("stop_sequence", "!")
    assert (delta["usage"]["input_tokens"], delta["usage"]["cache_read_input_tokens"]) == (1, 2)


@pytest.mark.parametrize("stream", [True, False])
def test_an_adapters_own_stop_string_ends_a_choice_like_the_models_end(tokenizer, stream):
    call = replace(CALL, endpoint=Endpoint.MESSAGES, stop=("?",), own_stop=("!",), stream=stream)
    answer = Answer(call, [(1, 2, 3)], Vocabulary(tokenizer))
    (*_, body) = answer.take([tokens(tokenizer, "stop! no")])
    assert answer.ended
    assert b'"stop"' in body
    assert b'"stop_reason":"end_turn","stop_sequence":null' in body


def test_a_stop_string_ends_its_choice_and_asks_for_an_abort(tokenizer):
    answer = Answer(replace(CALL, stream=True, stop=("!",), n=2), [(1,)], Vocabulary(tokenizer))
    first = answer.take([tokens(tokenizer, "stop! no", 0), tokens(tokenizer, "go on", 1)])
    assert answer.stopped == [0]
    assert not answer.ended
    late = answer.take([tokens(tokenizer, "late", 0)])
    last = answer.take([tokens(tokenizer, "", 1, FinishReason.STOP)])
    seen = events([*first, *late, *last])
    texts = {0: "", 1: ""}
    for event in seen[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "stop", 1: "go on"}
    assert seen[-1] == "[DONE]"
    assert answer.ended


def test_a_failure_is_a_refusal(tokenizer):
    answer = Answer(replace(CALL, stream=True), [(1,)], Vocabulary(tokenizer))
    failure = Failed("r1", AdapterLoadFailed("acme/support@1: digest mismatch"))
    assert answer.take([failure]) == [
        Refusal("adapter_load_failed", "acme/support@1: digest mismatch", "model")
    ]
    assert answer.ended


def test_a_failure_within_a_stream_follows_the_bytes_before_it(tokenizer):
    answer = Answer(replace(CALL, stream=True), [(1,)], Vocabulary(tokenizer))
    failure = Failed("r1", StepFailed("the step failed"))
    chunk, refusal = answer.take([tokens(tokenizer, "some"), failure])
    assert events([chunk])[-1]["choices"][0]["text"] == "some"
    assert refusal == Refusal("generation_failed", "the step failed")


def test_a_failure_of_a_body_is_always_a_refusal(tokenizer):
    answer = Answer(CALL, [(1,)], Vocabulary(tokenizer))
    answer.take([tokens(tokenizer, "some")])
    (refusal,) = answer.take([Failed("r1", StepFailed("the step failed"))])
    assert refusal == Refusal("generation_failed", "the step failed")


def test_the_end_of_a_large_body_blocks_no_stream(tokenizer):
    """Encoding at the end runs in one callback of the event loop that all streams share."""
    call = replace(CALL, sampling=SamplingParams(logprobs=20))
    likely = TokenLogprobs(-0.5, tuple((token, -0.5) for token in range(20)))
    answer = Answer(call, [(1,)], Vocabulary(tokenizer))
    began_s = time.thread_time()
    for _ in range(1000):
        answer.take([Tokens("r1", 0, (1,), logprobs=(likely,))])
    grew_s = time.thread_time() - began_s
    usage, body = answer.take([Tokens("r1", 0, (), FinishReason.LENGTH)])
    ended_s = time.thread_time() - began_s - grew_s
    assert len(json.loads(body)["choices"][0]["logprobs"]["tokens"]) == usage.completion_tokens
    assert ended_s < grew_s / 5


TOOL = {"type": "function", "function": {"name": "time"}}
NOW = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


def chat(**fields):
    return replace(CALL, endpoint=Endpoint.CHAT, **fields)


def marked(tokenizer):
    """The tokenizer with tokens that mark calls, as special ones, and one that means nothing."""
    own = Tokenizer.from_str(tokenizer.to_str())
    own.add_special_tokens(["<tool_call>", "</tool_call>", "<|other|>"])
    return own


@pytest.mark.parametrize("stream", [True, False])
def test_calls_are_separated_from_text(tokenizer, stream):
    own = marked(tokenizer)
    call = chat(tools=ToolUse((TOOL,)), stream=stream)
    answer = Answer(call, [(1,)], Vocabulary(own), HERMES)
    items = answer.take([tokens(own, f"Let me look.<|other|>{NOW}\n{NOW}", 0, FinishReason.STOP)])
    if stream:
        choices = [event["choices"][0] for event in events(items)[:-1]]
        said = "".join(choice["delta"].get("content") or "" for choice in choices)
        calls = [c for choice in choices for c in choice["delta"].get("tool_calls", [])]
        assert [call["function"]["arguments"] for call in calls] == ["", "{}", "", "{}"]
        finish = choices[-1]["finish_reason"]
    else:
        (choice,) = json.loads(items[-1])["choices"]
        said = choice["message"]["content"]
        assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["time"] * 2
        finish = choice["finish_reason"]
    assert (said, finish) == ("Let me look.", "tool_calls")


def test_without_tools_a_call_is_text(tokenizer):
    answer = Answer(chat(), [(1,)], Vocabulary(tokenizer), HERMES)
    items = answer.take([tokens(tokenizer, NOW, 0, FinishReason.STOP)])
    message = json.loads(items[-1])["choices"][0]["message"]
    assert message == {"role": "assistant", "content": NOW, "refusal": None}


@pytest.mark.parametrize("finish", [None, FinishReason.LENGTH])
def test_a_single_allowed_call_ends_its_choice(tokenizer, finish):
    call = chat(tools=ToolUse((TOOL,), parallel=False))
    answer = Answer(call, [(1,)], Vocabulary(tokenizer), HERMES)
    items = answer.take([tokens(tokenizer, f"{NOW} and more", 0, finish)])
    assert answer.stopped == ([0] if finish is None else [])
    body = json.loads(items[-1])
    (choice,) = body["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    called = tokens(tokenizer, NOW).token_ids
    assert body["usage"]["completion_tokens"] == len(called)  # none of those behind the call


FORCED = chat(tools=ToolUse((TOOL,), forced=("time",)), stop=("END",))
CALLED = '<tool_call>\n{"name": "time", "arguments": {"at": "noon"}}\n</tool_call>'
BEGUN = '<tool_call>\n{"name": "time", "arguments": {"at": "no'


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("text", "arguments", "finish"),
    [
        (BEGUN, ['{"at": "no'], "stop"),
        (f"{CALLED}\n{BEGUN}", ['{"at": "noon"}', '{"at": "no'], "stop"),
        (BEGUN.partition('{"at')[0], [], "stop"),
        (CALLED.partition("}\n")[0], ['{"at": "noon"}'], "tool_calls"),
        (f"{CALLED}\n<tool_call>", ['{"at": "noon"}'], "tool_calls"),
    ],
)
@pytest.mark.parametrize("by", ["a stop string", "a stop token", "the limit"])
def test_a_cut_off_call_does_not_finish_with_tool_calls(
    tokenizer, stream, text, arguments, finish, by
):
    answer = Answer(replace(FORCED, stream=stream), [(1,)], Vocabulary(tokenizer), HERMES)
    if by == "a stop string":
        items = answer.take([tokens(tokenizer, f"{text}END")])
    else:
        end = FinishReason.STOP if by == "a stop token" else FinishReason.LENGTH
        items = answer.take([tokens(tokenizer, text, 0, end)])
    if stream:
        choices = [event["choices"][0] for event in events(items)[:-1]]
        calls = [c for choice in choices for c in choice["delta"].get("tool_calls", [])]
        told = {call["index"]: "" for call in calls}
        for call in calls:
            told[call["index"]] += call["function"]["arguments"]
        assert list(told.values()) == arguments
        assert choices[-1]["delta"] == {}
    else:
        choices = json.loads(items[-1])["choices"]
        message = choices[0]["message"]
        told = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
        assert told == arguments
    assert choices[-1]["finish_reason"] == ("length" if by == "the limit" else finish)


@pytest.mark.parametrize("text", [BEGUN, CALLED])
def test_a_message_stops_for_a_tool_only_if_the_call_is_complete(tokenizer, text):
    call = replace(FORCED, endpoint=Endpoint.MESSAGES, max_tokens=500)
    for stream in (True, False):
        answer = Answer(replace(call, stream=stream), [(1,)], Vocabulary(tokenizer), HERMES)
        items = answer.take([tokens(tokenizer, text, 0, FinishReason.STOP)])
        assert (b'"stop_reason":"tool_use"' in items[-1]) is (text == CALLED)


def test_forced_calls_stream_their_arguments_as_they_come(tokenizer):
    call = chat(tools=ToolUse((TOOL,), forced=("time",)), stream=True)
    answer = Answer(call, [(1,)], Vocabulary(tokenizer), HERMES)
    text = '<tool_call>\n{"name": "time", "arguments": {"at": 1}}\n</tool_call>'
    items = [item for letter in text for item in answer.take([tokens(tokenizer, letter)])]
    items += answer.take([Tokens("r1", 0, (), FinishReason.STOP)])
    deltas = [event["choices"][0]["delta"] for event in events(items)[:-1]]
    assert deltas[0] == {"role": "assistant", "content": None, "refusal": None}
    arguments = [c["function"]["arguments"] for d in deltas for c in d.get("tool_calls", [])]
    assert arguments == ["", *'{"at": 1}']


@pytest.mark.parametrize("stream", [True, False])
def test_an_echo_is_the_prompt_before_the_text(tokenizer, stream):
    prompts = [tuple(tokenizer.encode(text).ids) for text in ("one!", "two")]
    call = replace(CALL, n=2, echo=True, stream=stream, stop=("!",))
    echoes = PromptEchoes(("one!", "two"))
    answer = Answer(call, prompts, Vocabulary(tokenizer), echoes=echoes)
    items = answer.take([tokens(tokenizer, f" {i}", i, FinishReason.LENGTH) for i in range(4)])
    texts = {}
    for event in events(items)[:-1] if stream else [json.loads(items[-1])]:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "one! 0", 1: "one! 1", 2: "two 2", 3: "two 3"}


@pytest.mark.parametrize("stream", [True, False])
def test_a_body_ends_at_the_limit_on_bytes_of_logprobs(tokenizer, monkeypatch, stream):
    monkeypatch.setattr("lorikeet.apis.answer.MOST_LOGPROBS_BYTES", 10_000)
    (a,) = tokenizer.encode("a").ids
    likely = TokenLogprobs(-0.5, ((a, -0.5),) * 20)
    for endpoint in (Endpoint.CHAT, Endpoint.RESPONSES):
        sampling = SamplingParams(logprobs=20)
        call = replace(CALL, endpoint=endpoint, sampling=sampling, stream=stream)
        answer = Answer(call, [(1,)], Vocabulary(tokenizer))
        taken = 0
        while not answer.ended and taken < 100:
            items = answer.take([Tokens("r1", 0, (a,), None, (likely,))])
            taken += 1
        if stream and endpoint is Endpoint.CHAT:  # of which nothing is kept
            assert not answer.ended
            continue
        assert answer.stopped == [0]
        assert taken < 20
        assert (b'"length"' if endpoint is Endpoint.CHAT else b'"max_output_tokens"') in items[-1]


def test_prompt_logprobs_too_large_for_a_body_are_refused(tokenizer, monkeypatch):
    monkeypatch.setattr("lorikeet.apis.answer.MOST_LOGPROBS_BYTES", 10_000)
    (a,) = tokenizer.encode("a").ids
    sampling = SamplingParams(prompt_logprobs=1)
    call = replace(CALL, sampling=sampling, prompt_logprobs=1, n=2)
    answer = Answer(call, [(a,) * 1001], Vocabulary(tokenizer))
    scored = (TokenLogprobs(-0.5, ((a, -0.5),), 1),) * 1000
    (refusal,) = answer.take([PromptLogprobs("r1", 0, scored)])
    assert (refusal.code, refusal.param) == ("invalid_value", "prompt_logprobs")
    assert answer.ended
    assert answer.stopped == [0, 1]
