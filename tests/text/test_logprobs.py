"""Logprobs are sent together with their tokens' text, for exactly these tokens."""

import json
import sys
from dataclasses import replace

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence
from tokenizers.models import BPE

from lorikeet.apis.answer import Answer
from lorikeet.protocol.messages import Call, Endpoint, ToolUse
from lorikeet.text.detokenizer import Vocabulary
from lorikeet.text.tools.syntax import HERMES
from lorikeet_engine.request import FinishReason, SamplingParams, TokenLogprobs, Tokens

CHAT = Call("r1", Endpoint.CHAT, 0, "acme", "m", None, sampling=SamplingParams(logprobs=2))
COMPLETION = replace(CHAT, endpoint=Endpoint.COMPLETIONS)
TEXT = "zażółć 🦜!"


def logprobs_of(tokenizer, text):
    ids = tokenizer.encode(text).ids
    e, t = (tokenizer.encode(letter).ids[0] for letter in "et")
    return ids, [TokenLogprobs(-at / 10, ((e, -0.5), (t, -1.5))) for at in range(len(ids))]


def items(tokenizer, call, text, step, finish=FinishReason.LENGTH, syntax=None):
    """Sent items of a text fed `step` tokens at a time; finish None leaves the answer open."""
    answer = Answer(call, [(1,)], Vocabulary(tokenizer), syntax)
    ids, logprobs = logprobs_of(tokenizer, text)
    sent = []
    for at in range(0, len(ids), step):
        part = slice(at, at + step)
        end = finish if at + step >= len(ids) else None
        sent += answer.take([Tokens("r1", 0, tuple(ids[part]), end, tuple(logprobs[part]))])
    assert answer.ended == (finish is not None or bool(answer.stopped))
    return [item for item in sent if isinstance(item, bytes)]


def choices(sent):
    """The choices of all events of a stream."""
    events = b"".join(sent).decode().split("\n\n")
    read = [json.loads(event[6:]) for event in events if event and "[DONE]" not in event]
    return [choice for event in read for choice in event["choices"]]


@pytest.mark.parametrize(
    "call",
    [
        replace(CHAT, stream=True),
        CHAT,
        COMPLETION,
        replace(CHAT, stream=True, return_token_ids=True),
    ],
)
def test_sent_logprobs_are_not_kept(tokenizer, call):
    answer = Answer(call, [(1,)], Vocabulary(tokenizer))
    ids, logprobs = logprobs_of(tokenizer, 20 * TEXT)
    before = [sys.getrefcount(known) for known in logprobs]
    for token, known in zip(ids, logprobs, strict=True):
        answer.take([Tokens("r1", 0, (token,), None, (known,))])
    del known
    after = [sys.getrefcount(known) for known in logprobs]
    assert sum(now - then for now, then in zip(after, before, strict=True)) < 8


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_a_chat_stream_sends_logprobs_with_their_text(tokenizer, step):
    told = []
    for choice in choices(items(tokenizer, replace(CHAT, stream=True), TEXT, step)):
        text = choice["delta"].get("content", "")
        tokens = (choice["logprobs"] or {"content": []})["content"]
        assert b"".join(bytes(token["bytes"]) for token in tokens) == text.encode()
        told += tokens
    ids, logprobs = logprobs_of(tokenizer, TEXT)
    assert [token["logprob"] for token in told] == [known.logprob for known in logprobs]
    assert len(told) == len(ids)


def test_a_chat_body_has_the_logprobs_of_its_stream(tokenizer):
    body = json.loads(items(tokenizer, CHAT, TEXT, 2)[0])
    tokens = body["choices"][0]["logprobs"]["content"]
    streamed = choices(items(tokenizer, replace(CHAT, stream=True), TEXT, 2))
    assert tokens == [t for c in streamed if c["logprobs"] for t in c["logprobs"]["content"]]
    assert tokens[0] == {
        "token": "z",
        "logprob": 0.0,
        "bytes": [122],
        "top_logprobs": [
            {"token": "e", "logprob": -0.5, "bytes": [101]},
            {"token": "t", "logprob": -1.5, "bytes": [116]},
        ],
    }
    parrot = [token["token"] for token in tokens[-5:-1]]
    assert parrot == [r"\xf0", r"\x9f", r"\xa6", r"\x9c"]


@pytest.mark.parametrize("step", [1, 3, 100])
def test_a_completion_has_each_tokens_text_offset(tokenizer, step):
    stream = choices(items(tokenizer, replace(COMPLETION, stream=True), TEXT, step))
    known = [choice["logprobs"] for choice in stream if choice["logprobs"]]
    offsets = [offset for part in known for offset in part["text_offset"]]
    assert offsets == [at for at, character in enumerate(TEXT) for _ in character.encode()]
    assert known[0]["tokens"][0] == "z"
    assert known[0]["token_logprobs"][0] == 0.0
    assert known[0]["top_logprobs"][0] == {"e": -0.5, "t": -1.5, "z": 0.0}


@pytest.mark.parametrize("stream", [True, False])
def test_tokens_of_a_stop_string_have_no_logprobs(tokenizer, stream):
    call = replace(COMPLETION, stream=stream, stop=("END",))
    sent = items(tokenizer, call, "one EN two END three", 1, finish=None)
    told = choices(sent) if stream else json.loads(sent[0])["choices"]
    tokens = [t for choice in told if choice["logprobs"] for t in choice["logprobs"]["tokens"]]
    assert "".join(tokens) == "".join(choice["text"] for choice in told) == "one EN two "


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_tokens_of_calls_have_no_logprobs(tokenizer, step):
    tool = {"type": "function", "function": {"name": "time"}}
    call = replace(CHAT, stream=True, tools=ToolUse((tool,)))
    before, after = "zaż 🦜", " end <tool_"
    text = before + ' <tool_call>{"name": "time", "arguments": {}}</tool_call>' + after
    told = []
    for choice in choices(items(tokenizer, call, text, step, syntax=HERMES)):
        said = choice["delta"].get("content") or ""
        tokens = (choice["logprobs"] or {"content": []})["content"]
        assert b"".join(bytes(token["bytes"]) for token in tokens) == said.encode()
        told += tokens
    _, logprobs = logprobs_of(tokenizer, text)
    of_text = logprobs[: len(before.encode())] + logprobs[-len(after.encode()) :]
    assert [token["logprob"] for token in told] == [known.logprob for known in of_text]


def test_logprobs_are_only_sent_if_asked_for(tokenizer):
    call = replace(CHAT, sampling=SamplingParams())
    (body,) = [
        item
        for item in Answer(call, [(1,)], Vocabulary(tokenizer)).take(
            [Tokens("r1", 0, (5,), FinishReason.STOP)]
        )
        if isinstance(item, bytes)
    ]
    assert json.loads(body)["choices"][0]["logprobs"] is None


def test_special_tokens_are_no_text_and_have_no_bytes(tokenizer):
    own = Tokenizer.from_str(tokenizer.to_str())
    own.add_special_tokens([AddedToken("<|end|>", special=True)])
    vocabulary = Vocabulary(own)
    end = own.token_to_id("<|end|>")
    a = own.encode("a").ids[0]
    drawn = (TokenLogprobs(float("-inf"), ((end, -0.25),)), TokenLogprobs(-1.0, ()))
    answer = Answer(CHAT, [(1,)], vocabulary)
    body = json.loads(answer.take([Tokens("r1", 0, (a, end), FinishReason.LENGTH, drawn)])[-1])
    (only,) = body["choices"][0]["logprobs"]["content"]
    assert only["logprob"] == -9999.0
    assert only["top_logprobs"] == [{"token": "<|end|>", "logprob": -0.25, "bytes": None}]
    assert body["usage"]["completion_tokens"] == 2


def test_sentencepiece_tokens_are_named_by_their_text():
    words = {"▁lo": 0, "ri": 1, "<0xF0>": 2, "é": 3}
    tokenizer = Tokenizer(BPE(vocab=words, merges=[], byte_fallback=True))
    tokenizer.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse()])
    vocabulary = Vocabulary(tokenizer)
    assert [vocabulary.bytes_of(i) for i in range(4)] == [b" lo", b"ri", b"\xf0", "é".encode()]
    assert vocabulary.named(2).name == r"\xf0"
    assert (vocabulary.bytes_of(9), vocabulary.named(9).name) == (None, "")
