"""An adapter's own chat template: its prompts, and answers in its syntax, as a base model's."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lorikeet.errors import InvalidInput, Overloaded
from lorikeet.protocol.messages import Call, EncodedCall, ToolUse
from lorikeet.replica.request_builder import RequestBuilder
from lorikeet.request_defaults import RequestDefaults
from lorikeet.text.adapter_templates import AdapterTemplates
from lorikeet.text.prompts import PromptEncoder, encode_call
from tests.replica.test_family_templates import SHOWN, TURNS, USE
from tests.text.test_prompts import CHAT, DEMO, PLAIN, encoder

Own = Callable[[Call, str], EncodedCall]
THINKS = "{% for m in messages %}<|user|>{{ m.content.split('</think>')[-1] }}{% endfor %}<think>\n"


@pytest.fixture(scope="module")
def demo() -> PromptEncoder:
    return PromptEncoder(DEMO)


@pytest.fixture(scope="module")
def own(demo: PromptEncoder) -> Iterator[Own]:
    """Encode a call with an adapter's own chat template."""
    templates = AdapterTemplates()

    def encode(call: Call, template: str) -> EncodedCall:
        call = replace(call, defaults=RequestDefaults(template))
        work = partial(encode_call, call, max_context=4096)
        return asyncio.run(templates.run("acme", demo, template, work))

    yield encode
    templates.close()


@pytest.mark.parametrize("family", SHOWN)
def test_prompts_and_syntax_are_those_of_a_base_model_with_the_template(
    own: Own, demo: PromptEncoder, tmp_path: Path, family: str
) -> None:
    template = SHOWN[family].text + TURNS
    base = encoder(tmp_path, template)
    forced = replace(CHAT, tools=replace(USE, forced=("look",)))
    for call in (CHAT, replace(CHAT, tools=USE), forced):
        encoded, expected = own(call, template), encode_call(call, base, 4096)
        assert encoded.prompts == expected.prompts
        assert encoded.thinking is expected.thinking
    answering = demo.with_marks(encoded.marks)
    assert answering.syntax is base.syntax
    assert answering.think_tags == base.think_tags
    assert encoded.to_send().call.defaults is None


def test_a_replica_holds_forced_calls_to_the_syntax_of_the_template(
    own: Own, demo: PromptEncoder, tmp_path: Path
) -> None:
    template = SHOWN["Mistral"].text + TURNS
    forced = replace(CHAT, tools=replace(USE, forced=("look",)), max_tokens=9)

    def grammar(encoded: EncodedCall, of: PromptEncoder) -> str | None:
        builder = RequestBuilder(of, DEMO, 4096)
        try:
            return asyncio.run(builder.build(encoded)).request.sampling.grammar
        finally:
            builder.close()

    base = encoder(tmp_path, template)
    expected = grammar(encode_call(forced, base, 4096), base)
    assert expected is not None
    assert grammar(own(forced, template), demo) == expected
    assert grammar(encode_call(forced, demo, 4096), demo) != expected


def test_thinking_that_the_template_begins_is_known(own: Own) -> None:
    encoded = own(CHAT, THINKS)
    assert (encoded.thinking.name, encoded.marks and encoded.marks.tags[0]) == ("BEGUN", "<think>")


def test_a_message_is_continued_and_unread_variables_are_named(own: Own) -> None:
    said = {"role": "assistant", "content": "Once upon "}
    call = replace(CHAT, messages=(*CHAT.messages, said), continue_final=True)
    call = replace(call, generation_prompt=False, template_args={"mood": 1})
    encoded = own(call, PLAIN)
    text = PromptEncoder(DEMO).backend.decode(list(encoded.prompts[0]))
    assert text == "user: hi\nassistant: Once upon "
    assert encoded.ignored == ("mood",)


def test_a_base_model_without_a_template_chats_by_the_adapters(tmp_path: Path, own: Own) -> None:
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    bare, templates = PromptEncoder(tmp_path), AdapterTemplates()
    with pytest.raises(InvalidInput, match="no chat template"):
        bare.encode(CHAT, 4096)
    ids = asyncio.run(templates.run("acme", bare, PLAIN, lambda own: own.encode(CHAT, 4096)))
    assert ids == own(CHAT, PLAIN).prompts
    templates.close()


def test_a_tenants_calls_wait_for_each_other_no_longer_than_they_may(demo: PromptEncoder) -> None:
    async def scenario() -> list[Any]:
        templates, go_on = AdapterTemplates(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def hold(_: PromptEncoder) -> str:
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
            return "held"

        holding = asyncio.create_task(templates.run("acme", demo, PLAIN, hold))
        await asyncio.sleep(0.05)
        other = await templates.run("globex", demo, PLAIN, lambda own: "other")
        with pytest.raises(Overloaded, match="no time to render the adapter's own") as refused:
            await templates.run("acme", demo, PLAIN, hold, 0.1)
        assert refused.value.retry_after_s
        go_on.set()
        said = [other, await holding, await templates.run("acme", demo, PLAIN, hold, 5.0)]
        templates.close()
        return said

    assert asyncio.run(scenario()) == ["other", "held", "held"]


def test_tools_that_the_template_does_not_show_are_refused(own: Own) -> None:
    with pytest.raises(InvalidInput, match="leave tools out"):
        own(replace(CHAT, tools=ToolUse(USE.tools)), PLAIN)
