"""Completions with logprobs of their prompts, byte for byte, also of special tokens."""

import json
import time
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from lorikeet.apis.answer import Answer
from lorikeet.protocol.messages import Call, Endpoint
from lorikeet.text.detokenizer import Vocabulary
from lorikeet.text.prompt_echoes import PromptEchoes
from lorikeet_engine.request import (
    FinishReason,
    PromptLogprobs,
    SamplingParams,
    TokenLogprobs,
    Tokens,
)

SAMPLING = SamplingParams(logprobs=1, prompt_logprobs=1, keep_stop_token=True)
CALL = Call(
    request_id="r1",
    endpoint=Endpoint.COMPLETIONS,
    created=7,
    tenant="acme",
    model="acme/support",
    adapter=None,
    echo=True,
    sampling=SAMPLING,
)
GOLDEN = (
    '{"id":"cmpl-r1","object":"text_completion","created":7,"model":"acme/support","choices":['
    '{"index":0,"text":"h\\u00e9! a","logprobs":{'
    '"tokens":["h","\\\\xc3","\\\\xa9","!"," ","a"],'
    '"token_logprobs":[null,-1.5,-0.25,-9999.0,-2.5,-0.5],'
    '"top_logprobs":[null,{"h":-0.125,"\\\\xc3":-1.5},{"\\\\xa9":-0.25},{"a":-0.75,"!":-9999.0},'
    '{"b":-0.125," ":-2.5},{"a":-0.5}],'
    '"text_offset":[0,1,1,2,3,4]},"finish_reason":"length"}],'
    '"usage":{"prompt_tokens":4,"completion_tokens":2,"total_tokens":6,'
    '"prompt_tokens_details":{"cached_tokens":0}}}'
)


def ids(tokenizer, text):
    return tuple(tokenizer.encode(text).ids)


def test_echoed_prompt_and_answer_have_logprobs_as_one_text(tokenizer):
    h, c3, a9, bang = ids(tokenizer, "hé!")
    space, a, b = ids(tokenizer, " ab")
    echoes = PromptEchoes(("hé!",))
    answer = Answer(CALL, [(h, c3, a9, bang)], Vocabulary(tokenizer), echoes=echoes)
    first = (TokenLogprobs(-1.5, ((h, -0.125),)), TokenLogprobs(-0.25, ((a9, -0.25),)))
    last = TokenLogprobs(-float("inf"), ((a, -0.75),))
    assert answer.take([PromptLogprobs("r1", 0, first)]) == []
    assert answer.take([PromptLogprobs("r1", 0, (last,))]) == []
    said = TokenLogprobs(-2.5, ((b, -0.125),)), TokenLogprobs(-0.5, ((a, -0.5),))
    _, body = answer.take([Tokens("r1", 0, (space, a), FinishReason.LENGTH, said)])
    assert body.decode() == GOLDEN


def test_each_choice_has_its_own_prompts_logprobs_and_each_field_its_own_number(tokenizer):
    echoes = PromptEchoes(("ab", "c"))
    prompts = [ids(tokenizer, text) for text in echoes.texts]
    call = replace(CALL, n=2, prompt_logprobs=0)
    answer = Answer(call, prompts, Vocabulary(tokenizer), echoes=echoes)
    (b, c) = ids(tokenizer, "bc")
    answer.take([PromptLogprobs("r1", 0, (TokenLogprobs(-3.0, ((c, -0.5),), 4),))])
    certain = (TokenLogprobs(0.0),)
    outputs = [Tokens("r1", i, (b,), FinishReason.LENGTH, certain) for i in range(4)]
    (*_, body) = answer.take(outputs)
    choices = json.loads(body)["choices"]
    assert [choice["text"] for choice in choices] == ["abb", "abb", "cb", "cb"]
    assert [c["logprobs"]["token_logprobs"] for c in choices] == [[None, -3.0, 0.0]] * 2 + [
        [None, 0.0]
    ] * 2
    assert choices[0]["logprobs"]["top_logprobs"][1] == {"c": -0.5, "b": -3.0}
    told = {str(b): {"logprob": -3.0, "rank": 4, "decoded_token": "b"}}
    assert [choice["prompt_logprobs"] for choice in choices] == [[None, told]] * 2 + [[None]] * 2


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS])
def test_ranks_order_the_most_likely_tokens(tokenizer, endpoint):
    sampling = replace(SAMPLING, logprobs=None, prompt_logprobs=2, keep_stop_token=False)
    call = replace(CALL, endpoint=endpoint, echo=False, sampling=sampling, prompt_logprobs=2)
    a, b, c = ids(tokenizer, "abc")
    answer = Answer(call, [(a, b)], Vocabulary(tokenizer))
    answer.take([PromptLogprobs("r1", 0, (TokenLogprobs(-0.5, ((c, -0.25), (b, -0.5)), 2),))])
    (*_, body) = answer.take([Tokens("r1", 0, (c,), FinishReason.STOP)])
    parsed = json.loads(body)
    told = (parsed if endpoint is Endpoint.CHAT else parsed["choices"][0])["prompt_logprobs"]
    assert told == [
        None,
        {
            str(b): {"logprob": -0.5, "rank": 2, "decoded_token": "b"},
            str(c): {"logprob": -0.25, "rank": 1, "decoded_token": "c"},
        },
    ]


def test_special_tokens_and_the_stop_token_have_logprobs_but_no_text(tokenizer):
    own = Tokenizer.from_str(tokenizer.to_str())
    own.add_special_tokens(["<|bos|>", "<|eos|>"])
    bos, eos = own.token_to_id("<|bos|>"), own.token_to_id("<|eos|>")
    (a, stop) = ids(own, "az")
    certain = TokenLogprobs(0.0)
    for last, name in ((eos, "<|eos|>"), (stop, "z")):
        call = replace(
            CALL, prompts=("a",), sampling=replace(SAMPLING, stop_token_ids=(stop,), max_tokens=1)
        )
        answer = Answer(call, [(bos, a)], Vocabulary(own), echoes=PromptEchoes(("a",)))
        answer.take([PromptLogprobs("r1", 0, (certain,))])
        (*_, body) = answer.take([Tokens("r1", 0, (last,), FinishReason.STOP, (certain,))])
        (choice,) = json.loads(body)["choices"]
        assert choice["text"] == "a"
        assert choice["logprobs"]["tokens"] == ["<|bos|>", "a", name]
        assert choice["logprobs"]["text_offset"] == [0, 0, 1]


def test_the_end_of_a_long_prompt_blocks_no_stream(tokenizer):
    """Encoding at the end runs in one callback of the event loop that all streams share."""
    (a,) = ids(tokenizer, "a")
    call = replace(CALL, prompt_logprobs=1)
    likely = (TokenLogprobs(-0.5, ((a, -0.5),), 1),) * 100
    echoes = PromptEchoes(("a" * 5001,))
    answer = Answer(call, [(a,) * 5001], Vocabulary(tokenizer), echoes=echoes)
    began_s = time.thread_time()
    for _ in range(50):
        answer.take([PromptLogprobs("r1", 0, likely)])
    grew_s = time.thread_time() - began_s
    (*_, body) = answer.take([Tokens("r1", 0, (a,), FinishReason.LENGTH, likely[:1])])
    ended_s = time.thread_time() - began_s - grew_s
    assert len(json.loads(body)["choices"][0]["logprobs"]["tokens"]) == 5002
    assert ended_s < grew_s / 5
