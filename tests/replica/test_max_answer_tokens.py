"""Limits of an answer: the engine's context, the caller's limit, and the body's size."""

from array import array
from dataclasses import replace

import pytest

from lorikeet.errors import InvalidInput
from lorikeet.protocol.messages import Call, EncodedCall, Endpoint
from lorikeet.replica.request_builder import (
    check_echo,
    count_prompt_logprobs,
    max_answer_tokens,
    max_tokens_in_body,
)
from lorikeet.text.prompt_echoes import PromptEchoes
from lorikeet_engine.request import SamplingParams

ENGINE = 100
PROMPTS = (array("i", [1] * 7), array("i", [1] * 30))  # the longest counts


def call(max_tokens: int | None, max_context: int | None, at: Endpoint = Endpoint.CHAT) -> Call:
    return Call("r", at, 0, "acme", "tiny", None, max_tokens=max_tokens, max_context=max_context)


@pytest.mark.parametrize(
    ("max_context", "room"), [(None, 70), (1000, 70), (100, 70), (99, 69), (50, 20), (31, 1)]
)
def test_an_answer_without_max_tokens_is_cut_to_the_remaining_context(max_context, room):
    assert max_answer_tokens(EncodedCall(call(None, max_context), PROMPTS), ENGINE) == room


def test_requests_beyond_the_engines_context_are_left_to_the_engine():
    full = EncodedCall(call(None, None), (array("i", [1] * ENGINE),))
    assert max_answer_tokens(full, ENGINE) == 1


def with_logprobs(
    logprobs: int | None, max_tokens: int | None = None, *, stream: bool = False
) -> Call:
    asked = call(max_tokens, None)
    return replace(asked, sampling=SamplingParams(logprobs=logprobs), stream=stream)


def test_a_body_of_too_many_log_probabilities_is_refused_and_says_how_to_ask():
    assert max_tokens_in_body(with_logprobs(20, 1560), 16, 131_072) == 1560
    with pytest.raises(InvalidInput, match=r"16 × 1561 tokens with 21 .* Set stream") as raised:
        max_tokens_in_body(with_logprobs(20, 1561), 16, 131_072)
    assert raised.value.param == "logprobs"


def test_max_tokens_beyond_the_context_count_as_the_remaining_context():
    assert max_tokens_in_body(with_logprobs(20, 131_072), 16, 1000) == 1000


def test_an_answer_without_max_tokens_is_cut_to_the_capacity_of_one_body():
    assert max_tokens_in_body(with_logprobs(5), 1, 131_072) == 2**19 // 6
    assert max_tokens_in_body(with_logprobs(20), 16, 131_072) == 1560
    assert max_tokens_in_body(with_logprobs(5), 1, 4096) == 4096


def test_prompt_logprobs_count_toward_a_body():
    prompts = [(1,) * 1000] * 3
    echoing = replace(with_logprobs(1), echo=True, n=2, endpoint=Endpoint.COMPLETIONS)
    assert count_prompt_logprobs(echoing, prompts) == 3000 * 2 * 2
    assert max_tokens_in_body(echoing, 6, 131_072, 12_000) == (2**19 - 12_000) // 12
    telling = replace(echoing, prompt_logprobs=20)
    assert count_prompt_logprobs(telling, prompts) == 3000 * (2 * 2 + 2 * 21)
    chatting = replace(telling, endpoint=Endpoint.CHAT, echo=False)
    assert count_prompt_logprobs(chatting, prompts[:1]) == 1000 * 21
    assert count_prompt_logprobs(with_logprobs(20), prompts) == 0


def test_prompt_logprobs_beyond_a_body_are_refused():
    telling = replace(with_logprobs(None), prompt_logprobs=20)
    assert count_prompt_logprobs(telling, [(1,) * 24_966]) == 24_966 * 21
    with pytest.raises(InvalidInput, match=r"24967 tokens with 21 .* 524288") as raised:
        count_prompt_logprobs(telling, [(1,) * 24_967])
    assert raised.value.param == "prompt_logprobs"


@pytest.mark.parametrize("call", [with_logprobs(None), with_logprobs(20, stream=True)])
def test_streams_and_texts_may_be_of_any_size(call):
    assert max_tokens_in_body(call, 128, 131_072) == 131_072


def test_a_streamed_response_repeats_its_logprobs_so_it_holds_a_quarter() -> None:
    streamed = replace(with_logprobs(5), endpoint=Endpoint.RESPONSES, stream=True)
    assert max_tokens_in_body(streamed, 1, 131_072) == 2**19 // (6 * 4)
    assert max_tokens_in_body(replace(streamed, stream=False), 1, 131_072) == 2**19 // 6


def test_repeated_prompts_must_fit_one_body():
    asked = replace(call(1, None, Endpoint.COMPLETIONS), echo=True, n=128)
    check_echo(asked, PromptEchoes(texts=("x" * 2**15,)))
    with pytest.raises(InvalidInput, match="128 choices that begin with the 32769") as raised:
        check_echo(asked, PromptEchoes(texts=("x" * 2**14, "y" * (2**14 + 1))))
    assert raised.value.param == "echo"
