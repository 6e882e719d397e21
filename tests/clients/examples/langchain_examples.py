"""LangChain: ChatOpenAI over both of OpenAI's APIs, ChatAnthropic, and an agent."""

import asyncio
from enum import StrEnum
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from orders import ANTHROPIC_URL, KEY, MODEL, ORDER, ORDERS_MODEL, PROMPT, Order
from pydantic import BaseModel, Field

LOOP = asyncio.new_event_loop()
"""LangChain's clients share connections, which work in one event loop only."""
CHAT = [("system", "You are a helpful translator."), ("human", "I love programming.")]


class Place(StrEnum):
    """A city whose weather is known."""

    boston = "Boston, MA"


class GetWeather(BaseModel):
    """Get the current weather in a given location."""

    location: Place = Field(description="The city and state")


def chat(model: str = MODEL, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model=model, temperature=0, max_retries=0, max_tokens=200, **more)


def responses(model: str = MODEL) -> ChatOpenAI:
    return chat(model, use_responses_api=True)


def messages(model: str = MODEL) -> ChatAnthropic:
    return ChatAnthropic(
        model=model,
        base_url=ANTHROPIC_URL,
        api_key=KEY,
        temperature=0,
        max_retries=0,
        max_tokens=200,
    )


every_api = pytest.mark.parametrize("api", [chat, responses, messages])


@every_api
def test_a_chat_is_invoked_and_counted(api: Any) -> None:
    answer = api().invoke(CHAT)
    assert answer.text
    usage = answer.usage_metadata
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]


@every_api
def test_a_chat_is_streamed_with_its_usage(api: Any) -> None:
    llm = api().model_copy(update={"stream_usage": True})
    first, *rest = llm.stream(CHAT)
    for chunk in rest:
        first += chunk
    assert first.text
    assert first.usage_metadata["output_tokens"] > 1


@every_api
def test_async_and_batches(api: Any) -> None:
    assert LOOP.run_until_complete(api().ainvoke(CHAT)).text
    assert len(api().batch([CHAT, CHAT])) == 2


@every_api
def test_a_bound_tool_is_called_and_its_result_is_sent_back(api: Any) -> None:
    llm = api().bind_tools([GetWeather], tool_choice="any", parallel_tool_calls=False)
    asked = HumanMessage("What is the weather like in Boston?")
    called = llm.invoke([asked])
    (call,) = called.tool_calls
    assert call["args"] == {"location": "Boston, MA"}
    said = api().invoke([asked, called, ToolMessage("sunny", tool_call_id=call["id"])])
    assert said.text


@every_api
def test_a_tool_call_is_streamed(api: Any) -> None:
    first, *rest = api().bind_tools([GetWeather], tool_choice="GetWeather").stream("Boston?")
    for chunk in rest:
        first += chunk
    assert first.tool_calls[0]["args"] == {"location": "Boston, MA"}


@every_api
def test_structured_output_of_a_fine_tune_is_right(api: Any) -> None:
    llm = api(ORDERS_MODEL).with_structured_output(Order, method="json_schema")
    assert llm.invoke(PROMPT) == ORDER
    assert list(llm.stream(PROMPT))[-1] == ORDER


@every_api
def test_structured_output_by_a_function(api: Any) -> None:
    llm = api(ORDERS_MODEL).with_structured_output(Order, method="function_calling")
    assert isinstance(llm.invoke(PROMPT), Order)


def test_json_mode() -> None:
    llm = chat(ORDERS_MODEL).with_structured_output(Order, method="json_mode")
    assert llm.invoke(PROMPT) == ORDER


def test_log_probabilities() -> None:
    answer = chat().bind(logprobs=True).invoke(CHAT)
    tokens = answer.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == answer.text


def test_completions() -> None:
    llm = OpenAI(model=MODEL, temperature=0, max_tokens=10, max_retries=0)
    assert llm.invoke("Once upon a") == "".join(llm.stream("Once upon a"))


@every_api
def test_an_agent_calls_its_tool_and_answers_in_a_format(api: Any) -> None:
    def get_weather(city: Place) -> str:
        """Get weather for a given city."""
        return f"It's always sunny in {city}!"

    agent = create_agent(api(), tools=[get_weather], system_prompt="Be brief.")
    asked = {"role": "user", "content": "What is the weather in Boston?"}
    result = agent.invoke({"messages": [asked]}, {"recursion_limit": 10})
    assert result["messages"][-1].type == "ai"
    formed = create_agent(api(ORDERS_MODEL), response_format=Order)
    answer = formed.invoke({"messages": [{"role": "user", "content": PROMPT}]})
    assert isinstance(answer["structured_response"], Order)
