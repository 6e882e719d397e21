"""How long an answer may be: by the engine's context, and by a limit of the caller's."""

import pytest

from lorikeet.errors import ContextLengthExceeded
from lorikeet.protocol.messages import Call, Endpoint
from lorikeet.replica.prompts import max_answer_tokens

ENGINE = 100
PROMPTS = ((1,) * 7, (1,) * 30)  # the longest counts


def call(max_tokens: int | None, max_context: int | None, at: Endpoint = Endpoint.CHAT) -> Call:
    return Call("r", at, 0, "acme", "tiny", None, max_tokens=max_tokens, max_context=max_context)


@pytest.mark.parametrize(
    ("max_context", "room"), [(None, 70), (1000, 70), (100, 70), (99, 69), (50, 20), (31, 1)]
)
def test_an_answer_without_max_tokens_is_cut_to_what_is_left(max_context, room):
    assert max_answer_tokens(call(None, max_context), PROMPTS, ENGINE) == room


def test_prompt_and_answer_may_take_the_whole_limit_and_no_more():
    assert max_answer_tokens(call(20, 50), PROMPTS, ENGINE) == 20
    with pytest.raises(ContextLengthExceeded, match="50 together is the limit") as raised:
        max_answer_tokens(call(21, 50), PROMPTS, ENGINE)
    assert raised.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("endpoint", "param"), [(Endpoint.CHAT, "messages"), (Endpoint.COMPLETIONS, "prompt")]
)
def test_a_prompt_that_leaves_no_room_is_named(endpoint, param):
    with pytest.raises(ContextLengthExceeded) as raised:
        max_answer_tokens(call(None, 30, endpoint), PROMPTS, ENGINE)
    assert raised.value.param == param


def test_what_the_engine_cannot_hold_is_left_for_it_to_refuse():
    assert max_answer_tokens(call(None, None), ((1,) * 100,), ENGINE) == 1
