"""Pydantic AI: agents with tools and output types over OpenAI's APIs and Anthropic's."""

import asyncio
from enum import StrEnum
from typing import Any

import pytest
from orders import ANTHROPIC_URL, KEY, MODEL, ORDER, ORDERS_MODEL, PROMPT, URL, Order
from pydantic_ai import Agent, ModelSettings, NativeOutput, RunContext, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

GREEDY = ModelSettings(temperature=0, max_tokens=200)


class Game(StrEnum):
    """What is played."""

    dice = "dice"


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel, AnthropicModel])
def api(request: pytest.FixtureRequest) -> Any:
    """Return a function that makes a model of the service for one of the three APIs."""

    def model(name: str) -> Any:
        if request.param is AnthropicModel:  # assumes no JSON schemas for unknown names
            knows = ModelProfile(supports_json_schema_output=True)
            provider = AnthropicProvider(base_url=ANTHROPIC_URL, api_key=KEY)
            return AnthropicModel(name, provider=provider, profile=knows)
        return request.param(name, provider=OpenAIProvider(base_url=URL, api_key=KEY))

    return model


def test_hello_world(api: Any) -> None:
    agent = Agent(api(MODEL), instructions="Be concise, reply with one sentence.")
    result = agent.run_sync('Where does "hello world" come from?', model_settings=GREEDY)
    assert result.output
    assert result.usage.output_tokens > 0


def test_a_native_output_of_a_fine_tune_is_right(api: Any) -> None:
    agent = Agent(api(ORDERS_MODEL), output_type=NativeOutput(Order), model_settings=GREEDY)
    assert agent.run_sync(PROMPT).output == ORDER


def test_an_output_type_is_called_as_a_tool(api: Any) -> None:
    agent = Agent(api(ORDERS_MODEL), output_type=ToolOutput(Order), model_settings=GREEDY)
    assert isinstance(agent.run_sync(PROMPT).output, Order)


def test_tools_with_and_without_dependencies(api: Any) -> None:
    agent = Agent(api(MODEL), deps_type=str, output_type=ToolOutput(Game), model_settings=GREEDY)
    seen = []

    @agent.tool_plain
    def roll() -> str:
        """Roll a die."""
        return "4"

    @agent.tool
    def player(context: RunContext[str]) -> str:
        """Get the player's name."""
        seen.append(context.deps)
        return context.deps

    @agent.output_validator
    def played(game: Game) -> Game:
        return game

    first = agent.run_sync("My guess is 4", deps="Anne")
    assert first.output is Game.dice
    again = agent.run_sync("Again", deps="Anne", message_history=first.all_messages())
    assert again.output is Game.dice
    assert set(seen) <= {"Anne"}


def test_a_text_is_streamed(api: Any) -> None:
    async def main() -> tuple[list[str], str]:
        async with Agent(api(MODEL), model_settings=GREEDY).run_stream("Hello") as result:
            texts = [text async for text in result.stream_text(delta=True, debounce_by=None)]
            return texts, await result.get_output()

    texts, whole = asyncio.run(main())
    assert len(texts) > 1
    assert "".join(texts) == whole


def test_an_output_is_streamed(api: Any) -> None:
    async def main() -> Order:
        agent = Agent(api(ORDERS_MODEL), output_type=NativeOutput(Order), model_settings=GREEDY)
        async with agent.run_stream(PROMPT) as result:
            return await result.get_output()

    assert asyncio.run(main()) == ORDER


def test_model_settings_are_accepted(api: Any) -> None:
    settings = ModelSettings(
        temperature=0.5,
        max_tokens=20,
        top_p=0.9,
        seed=1,
        stop_sequences=["zz"],
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"5": 1},
        parallel_tool_calls=False,
    )
    assert Agent(api(MODEL)).run_sync("Hello", model_settings=settings).output
