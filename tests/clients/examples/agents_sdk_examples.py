"""OpenAI's Agents SDK: its examples of agents, tools, streams, outputs, handoffs and sessions."""

import asyncio
from enum import StrEnum
from typing import Any

import pytest
from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrailTripwireTriggered,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    input_guardrail,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from orders import MODEL, ORDER, ORDERS_MODEL, PROMPT, Order

set_tracing_disabled(True)
GREEDY = ModelSettings(temperature=0, max_tokens=200)
FORCED = ModelSettings(temperature=0, max_tokens=200, tool_choice="required")


class Place(StrEnum):
    """A city whose weather is known."""

    tokyo = "Tokyo"


@function_tool
def get_weather(city: Place) -> str:
    """Say the weather of a city."""
    return f"The weather in {city} is sunny"


@pytest.fixture(params=[OpenAIResponsesModel, OpenAIChatCompletionsModel])
def api(request: pytest.FixtureRequest) -> Any:
    """Return a function that makes a model of the service for one of OpenAI's two APIs."""

    def model(name: str) -> Any:
        return request.param(name, AsyncOpenAI(max_retries=0))

    return model


def kinds(result: Any) -> list[str]:
    return [item.type for item in result.new_items]


def test_hello_world(api: Any) -> None:
    agent = Agent("Assistant", "Be brief.", model=api(MODEL), model_settings=GREEDY)
    result = asyncio.run(Runner.run(agent, "Tell me about recursion"))
    assert result.final_output
    assert result.context_wrapper.usage.output_tokens > 0


def test_the_default_model_is_used_by_name() -> None:
    result = Runner.run_sync(Agent("Assistant", model=MODEL), "Hello!")
    assert result.final_output


def test_a_function_tool_is_called_and_its_output_is_sent_back(api: Any) -> None:
    agent = Agent(
        "Hello world", "Help.", model=api(MODEL), tools=[get_weather], model_settings=FORCED
    )
    result = asyncio.run(Runner.run(agent, "The weather in Tokyo?"))
    assert kinds(result)[:2] == ["tool_call_item", "tool_call_output_item"]
    assert result.new_items[1].output == "The weather in Tokyo is sunny"
    assert kinds(result)[-1] == "message_output_item"


def test_a_run_is_streamed(api: Any) -> None:
    async def main() -> tuple[Any, list[str]]:
        agent = Agent("Joker", model=api(MODEL), tools=[get_weather], model_settings=FORCED)
        result = Runner.run_streamed(agent, input="Tell me 5 jokes.")
        return result, [
            event.data.type
            async for event in result.stream_events()
            if event.type == "raw_response_event"
        ]

    result, events = asyncio.run(main())
    assert "response.function_call_arguments.delta" in events
    assert "response.output_text.delta" in events
    assert events[-1] == "response.completed"
    assert result.final_output


def test_an_answer_follows_the_output_type(api: Any) -> None:
    agent = Agent("Orders", model=api(ORDERS_MODEL), output_type=Order, model_settings=GREEDY)
    assert asyncio.run(Runner.run(agent, PROMPT)).final_output == ORDER


def test_a_handoff_is_called_as_a_tool(api: Any) -> None:
    tutor = Agent("Tutor", handoff_description="History.", model=api(MODEL), model_settings=GREEDY)
    triage = Agent("Triage", handoffs=[tutor], model=api(MODEL), model_settings=FORCED)
    result = asyncio.run(Runner.run(triage, "Who was the first president?"))
    assert result.last_agent is tutor
    assert result.final_output


def test_a_session_remembers_earlier_turns(api: Any) -> None:
    async def main() -> list[Any]:
        agent = Agent("Assistant", model=api(MODEL), model_settings=GREEDY)
        session = SQLiteSession("conversation")
        await Runner.run(agent, "What city?", session=session)
        await Runner.run(agent, "What state?", session=session)
        return await session.get_items()

    assert [item["role"] for item in asyncio.run(main())] == ["user", "assistant"] * 2


def test_a_guardrail_asks_its_own_agent(api: Any) -> None:
    taker = Agent("Orders", model=api(ORDERS_MODEL), output_type=Order, model_settings=GREEDY)

    @input_guardrail
    async def no_orders(context: Any, _: Any, asked: Any) -> GuardrailFunctionOutput:
        order = (await Runner.run(taker, asked, context=context.context)).final_output
        return GuardrailFunctionOutput(order, tripwire_triggered=order.amount > 10)

    agent = Agent("Assistant", model=api(MODEL), input_guardrails=[no_orders])
    with pytest.raises(InputGuardrailTripwireTriggered):
        asyncio.run(Runner.run(agent, PROMPT))
