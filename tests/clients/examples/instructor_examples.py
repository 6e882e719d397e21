"""Instructor: a fine-tune's answer as a pydantic model, in each of its modes."""

import asyncio
from typing import Any

import anthropic
import instructor
import openai
import pytest
from instructor import Mode
from orders import ANTHROPIC_URL, KEY, ORDER, ORDERS_MODEL, PROMPT, Order
from pydantic import BaseModel, Field, field_validator

MESSAGES = [{"role": "user", "content": PROMPT}]
ASKED = {"model": ORDERS_MODEL, "messages": MESSAGES, "max_retries": 0}
BY_FORMAT = [Mode.JSON_SCHEMA]
BY_TOOL = [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.RESPONSES_TOOLS]


class Several(BaseModel):
    """Some orders, not more than two."""

    orders: list[Order] = Field(min_length=1, max_length=2)


def client(mode: Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", [*BY_FORMAT, *BY_TOOL])
def test_a_model_is_extracted(mode: Mode) -> None:
    order = client(mode).chat.completions.create(response_model=Order, **ASKED)
    assert isinstance(order, Order)
    if mode in BY_FORMAT:
        assert order.model_dump() == ORDER.model_dump()  # Instructor makes a class of its own


@pytest.mark.parametrize("mode", [*BY_FORMAT, *BY_TOOL])
def test_partial_models_are_streamed(mode: Mode) -> None:
    partial = client(mode).chat.completions.create_partial(response_model=Order, **ASKED)
    *_, last = partial
    assert isinstance(last.amount, int)


@pytest.mark.parametrize("mode", [*BY_FORMAT, *BY_TOOL])
def test_a_bounded_list_and_its_completion(mode: Mode) -> None:
    found, completion = client(mode).chat.completions.create_with_completion(
        response_model=Several, **ASKED
    )
    assert 1 <= len(found.orders) <= 2
    assert completion.usage.total_tokens > 0


@pytest.mark.parametrize("mode", [*BY_FORMAT, *BY_TOOL])
def test_an_invalid_answer_is_requested_again(mode: Mode) -> None:
    tried = []

    class Late(BaseModel):
        """A city."""

        city: str = Field(max_length=5)

        @field_validator("city")
        @classmethod
        def second_time(cls, city: str) -> str:
            tried.append(city)
            if len(tried) == 1:
                raise ValueError("say it again")
            return city

    again = {**ASKED, "max_retries": 2}
    client(mode).chat.completions.create(response_model=Late, **again)
    assert len(tried) >= 2


def test_a_provider_is_chosen_by_name() -> None:
    order = instructor.from_provider(f"openai/{ORDERS_MODEL}").create(
        response_model=Order, messages=MESSAGES
    )
    assert isinstance(order, Order)


def test_async() -> None:
    chats = instructor.from_openai(openai.AsyncOpenAI(), mode=Mode.JSON_SCHEMA).chat
    order = asyncio.run(chats.completions.create(response_model=Order, **ASKED))
    assert order.model_dump() == ORDER.model_dump()


def test_anthropic() -> None:
    claude = anthropic.Anthropic(base_url=ANTHROPIC_URL, api_key=KEY, max_retries=0)
    order = instructor.from_anthropic(claude).messages.create(
        response_model=Order, max_tokens=200, **ASKED
    )
    assert isinstance(order, Order)
