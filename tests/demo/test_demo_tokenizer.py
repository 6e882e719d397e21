"""The demo's tokenizer: every byte is a token, and a chat is what the template writes."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerFast as Tokenizer


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text().filter(lambda text: "<|" not in text))
def test_any_text_comes_back_from_its_bytes(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == [byte + 6 for byte in text.encode()]
    assert tokenizer.decode(ids) == text


def test_plain_text_begins_with_one_bos(tokenizer: Tokenizer) -> None:
    assert tokenizer("hi")["input_ids"] == [0, 6 + ord("h"), 6 + ord("i")]


def test_a_chat_is_rendered_turn_by_turn(tokenizer: Tokenizer) -> None:
    turns = [("system", "Be brief."), ("user", " hi \n there "), ("assistant", "Hello!")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|bos|><|system|>Be brief.<|eos|><|user|>hi \n there<|eos|><|assistant|>Hello!<|eos|>"
    )


def test_a_generation_prompt_opens_the_assistants_turn(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|user|>hi<|eos|><|assistant|>"


def test_an_unknown_role_is_refused_by_name(tokenizer: Tokenizer) -> None:
    with pytest.raises(TemplateError, match="function"):
        tokenizer.apply_chat_template([{"role": "function", "content": "x"}], tokenize=False)


def test_tools_calls_and_results_are_rendered_in_hermes_syntax(
    tokenizer: Tokenizer,
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "blue"},
    ]
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
    written = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
    shown, said = text.split("<|user|>", 1)
    assert '{"name": "look", "parameters": {}}' in shown
    assert said == (
        f"hi<|eos|><|assistant|>{written}\n{written}<|eos|>"
        "<|user|><tool_response>\nblue\n</tool_response><|eos|>"
    )
