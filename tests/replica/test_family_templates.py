"""Chat templates of each family: rendering of tools, and thinking.

The templates are ours, and as short as they can be; each does what is said of its family's.
"""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lorikeet.errors import UnsupportedParameter
from lorikeet.protocol.messages import Thinking, ToolUse
from lorikeet.replica.grammar_matcher import ModelGrammars
from lorikeet.text.prompts import PromptEncoder
from lorikeet.text.tools.calls import ToolCallParser
from lorikeet.text.tools.syntax import (
    EXAONE,
    FUNCTION_GEMMA,
    FUNCTOOLS,
    GEMMA_4,
    GLM,
    GLM_4_5,
    GRANITE,
    HERMES,
    LLAMA,
    MINISTRAL,
    MISTRAL,
    NEMOTRON,
    OLMO,
    PHI,
    PYTHON_LIST,
    QWEN_XML,
    SEED,
    TOOL_CODE,
)
from tests.text.test_prompts import CHAT, DEMO, encoder, text_of

USE = ToolUse(
    ({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},)
)
TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
EACH_TOOL = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class ToolTemplate:
    """A family's template with tools, its syntax, and a call in it."""

    text: str
    syntax: object
    call: str


CALL = '{"name": "look", "arguments": {"at": "it"}}'
SHOWN = {
    "Llama 3.x": ToolTemplate(
        EACH_TOOL + """{{ 'Answer as {"name": …, "parameters": {…}}.' if tools }}""",
        LLAMA,
        CALL.replace("arguments", "parameters"),
    ),
    "Mistral": ToolTemplate(
        "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "{% for m in messages if m.tool_calls %}[TOOL_CALLS] [{% endfor %}",
        MISTRAL,
        f"[TOOL_CALLS] [{CALL[:-1]}, " + '"id": "a1b2c3d4e"}]',
    ),
    "Ministral 3": ToolTemplate(
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "{% for m in messages if m.tool_calls %}[TOOL_CALLS]name[ARGS]{% endfor %}",
        MINISTRAL,
        '[TOOL_CALLS]look[ARGS]{"at": "it"}',
    ),
    "Qwen 2.5 and 3": ToolTemplate(
        EACH_TOOL + "{{ 'Call within <tool_call></tool_call>.' if tools }}",
        HERMES,
        f"<tool_call>\n{CALL}\n</tool_call>",
    ),
    "EXAONE 4": ToolTemplate(
        """{% for t in tools or [] %}<tool>{{ t | tojson }}</tool>{% endfor %}"""
        """{{ 'Call as <tool_call>{"name": …, "arguments": {…}}</tool_call>.' if tools }}""",
        EXAONE,
        f"<tool_call>{CALL}</tool_call>",
    ),
    "Granite 3": ToolTemplate(
        EACH_TOOL + "{{ 'Write <|tool_call|> and a JSON list of tools.' if tools }}",
        GRANITE,
        f"<|tool_call|>[{CALL}]",
    ),
    "Granite 4": ToolTemplate(
        EACH_TOOL + "{{ '<tool_call>\n{name, arguments}\n</tool_call>' if tools }}",
        HERMES,
        f"<tool_call>\n{CALL}\n</tool_call>",
    ),
    "SmolLM 3": ToolTemplate(
        "{% for t in xml_tools or [] %}{{ t | string }}{% endfor %}"
        "{{ 'Call within <tool_call></tool_call>.' if xml_tools }}",
        HERMES,
        f"<tool_call>\n{CALL}\n</tool_call>",
    ),
    "Phi-4-mini": ToolTemplate(
        "{% for t in tools or [] %}<|tool|>{{ t.function | tojson }}<|/tool|>{% endfor %}"
        "{{ 'Call as <|tool_call|>{}<|/tool_call|>' if tools }}",
        PHI,
        f"<|tool_call|>{CALL}<|/tool_call|>",
    ),
    "Phi-4-mini under vLLM's": ToolTemplate(
        EACH_TOOL + "{{ 'Prefix calls with functools: functools[…]' if tools }}",
        FUNCTOOLS,
        f"functools[{CALL}]",
    ),
    "OLMo 3": ToolTemplate(
        "{% if tools %}Call within <function_calls></function_calls>."
        "<functions>{{ tools | tojson }}</functions>{% endif %}",
        OLMO,
        '<function_calls>look(at="it")</function_calls>',
    ),
    "Gemma 3 under vLLM's": ToolTemplate(
        EACH_TOOL + "{{ 'Respond with a python list of the function calls.' if tools }}",
        PYTHON_LIST,
        "[look(at='it')]",
    ),
    "Gemma with blocks of code": ToolTemplate(
        EACH_TOOL + r"{% for m in messages if m.tool_calls %}{{ '```tool_code\n' }}{% endfor %}",
        TOOL_CODE,
        "```tool_code\nlook(at='it')\n```",
    ),
    "Qwen 3 Coder and 3.5": ToolTemplate(
        EACH_TOOL + "{{ '<tool_call><function=name><parameter=key>' if tools }}",
        QWEN_XML,
        "<tool_call>\n<function=look>\n<parameter=at>\nit\n</parameter>\n</function>\n</tool_call>",
    ),
    "Nemotron 3": ToolTemplate(
        "{% if tools %}<tools>{% for t in tools %}<function><name>{{ t.function.name }}</name>"
        "</function>{% endfor %}</tools>{% endif %}"
        "{{ '<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>' if tools }}",
        QWEN_XML,
        "<tool_call>\n<function=look>\n<parameter=at>\nit\n</parameter>\n</function>\n</tool_call>",
    ),
    "Nemotron Nano 2": ToolTemplate(
        "{% if tools %}<AVAILABLE_TOOLS>{{ tools | tojson }}</AVAILABLE_TOOLS>"
        "{{ 'Call as <TOOLCALL>[{…}]</TOOLCALL>.' }}{% endif %}",
        NEMOTRON,
        f"<TOOLCALL>[{CALL}]</TOOLCALL>",
    ),
    "Seed-OSS": ToolTemplate(
        EACH_TOOL + "{{ '<seed:tool_call><function=name><parameter=key>' if tools }}",
        SEED,
        "<seed:tool_call>\n<function=look>\n<parameter=at>it</parameter>\n</function>\n"
        "</seed:tool_call>",
    ),
    "FunctionGemma": ToolTemplate(
        "{% for t in tools or [] %}<start_function_declaration>declaration:"
        "{{ t.function.name }}<end_function_declaration>{% endfor %}"
        "{% for m in messages if m.tool_calls %}<start_function_call>call:{% endfor %}",
        FUNCTION_GEMMA,
        "<start_function_call>call:look{at:<escape>it<escape>}<end_function_call>",
    ),
}
SHOWN["GLM 4.7"] = ToolTemplate(
    EACH_TOOL + "{{ 'Call as <tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}"
    "</arg_value></tool_call>' if tools }}",
    GLM,
    "<tool_call>look<arg_key>at</arg_key><arg_value>it</arg_value></tool_call>",
)
SHOWN["GLM 4.5 and 4.6"] = ToolTemplate(
    EACH_TOOL + "{{ 'Call as <tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}"
    "</arg_value>\n</tool_call>' if tools }}",
    GLM_4_5,
    "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>it</arg_value>\n</tool_call>",
)
SHOWN["Gemma 4"] = ToolTemplate(
    "{% for t in tools or [] %}<|tool>declaration:{{ t.function.name }}{% endfor %}"
    """{% for m in messages if m.tool_calls %}<|tool_call>call:{{ '<|"|>' }}{% endfor %}""",
    GEMMA_4,
    '<|tool_call>call:look{at:<|"|>it<|"|>}<tool_call|>',
)
NOT_READ = {
    # the name on a line, JSON of the arguments on the next
    "GLM-4": EACH_TOOL + "{{ '## Tools: use JSON for the arguments.' if tools }}",
    "Mistral Small 3.2": EACH_TOOL + "{% for m in messages if m.tool_calls %}[TOOL_CALLS][CALL_ID]"
    "[ARGS]{% endfor %}",
    # the tools stand in the system message, under a name that OpenAI's API has not
    "Phi-4-mini's own": "{% for m in messages if m.tools %}<|tool|>{{ m.tools }}{% endfor %}",
    # calls of earlier turns are all that it shows, under a name that OpenAI's API has not
    "OLMo 3 Think": "{% for m in messages if m.function_calls %}<function_calls>"
    "{{ m.function_calls }}</function_calls>{% endfor %}",
    "OLMo 2, Phi-3, Phi-4 and Gemma's own": "",
}


@pytest.mark.parametrize("family", SHOWN)
def test_a_familys_calls_are_read_as_its_template_has_the_model_write_them(
    tmp_path: Path, family: str
) -> None:
    shown = SHOWN[family]
    with_tools = encoder(tmp_path, shown.text + TURNS)
    assert with_tools.syntax is shown.syntax
    prompt = text_of(with_tools, replace(CHAT, tools=USE))
    assert "look" in prompt
    assert "look" not in text_of(with_tools, CHAT)
    assert with_tools.syntax is not None
    said, calls = ToolCallParser(with_tools.syntax, USE).push(shown.call, last=True)
    assert said == ""
    assert "".join(call.name or "" for call in calls) == "look"
    assert json.loads("".join(call.arguments for call in calls)) == {"at": "it"}


@pytest.mark.parametrize("family", NOT_READ)
def test_tools_are_refused_where_calls_would_not_be_read(tmp_path: Path, family: str) -> None:
    without = encoder(tmp_path, NOT_READ[family] + TURNS)
    with pytest.raises(UnsupportedParameter) as refused:
        without.encode(replace(CHAT, tools=USE), 4096)
    assert refused.value.param == "tools"


def test_smollm_and_granite_think_as_their_switches_say(tmp_path: Path) -> None:
    for folder, template, off in (
        # SmolLM 3 closes what it would think; Granite 3.3 is told of the tags where it shall think
        ("smollm", "{{ '<think>\n\n</think>\n' if not enable_thinking }}", "enable_thinking"),
        ("qwen", "{{ '<think>\n\n</think>\n\n' if enable_thinking is false }}", "enable_thinking"),
    ):
        (tmp_path / folder).mkdir()
        thinks = encoder(tmp_path / folder, TURNS + template)
        call = replace(CHAT, template_args={off: False})
        assert thinks.thinking(call, thinks.encode(call, 4096)) is Thinking.NEVER
        call = replace(CHAT, template_args={off: True})
        assert thinks.thinking(call, thinks.encode(call, 4096)) is Thinking.POSSIBLE
    (tmp_path / "granite").mkdir()
    told = "{{ 'Think between <think></think>.' if thinking }}"
    granite = encoder(tmp_path / "granite", told + TURNS)
    call = replace(CHAT, template_args={"thinking": True})
    assert granite.thinking(call, granite.encode(call, 4096)) is Thinking.POSSIBLE


def test_nemotron_has_begun_to_think_unless_its_switch_is_off(tmp_path: Path) -> None:
    closed = "{{ '<think></think>' if enable_thinking is false else '<think>\n' }}"
    nemotron = encoder(tmp_path, TURNS + closed)
    for args, state in (
        ({}, Thinking.BEGUN),
        ({"enable_thinking": True}, Thinking.BEGUN),
        ({"enable_thinking": False}, Thinking.NEVER),
    ):
        call = replace(CHAT, template_args=args)
        assert nemotron.thinking(call, nemotron.encode(call, 4096)) is state


PARTS = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}"
    "{% endfor %}"
)


def test_a_template_that_renders_only_parts_gets_parts(tmp_path: Path) -> None:
    """LLaVA's: of a string it would show nothing."""
    assert text_of(encoder(tmp_path, PARTS), CHAT) == "[user]hi"


def test_the_template_of_a_processor_is_found(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path / name)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TURNS}))
    assert text_of(PromptEncoder(tmp_path), CHAT) == "[user]hi"


def test_a_grammar_knows_the_end_of_an_answer_from_the_text_part(tmp_path: Path) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path / "tokenizer.json")
    config = {"model_type": "mistral3", "text_config": {"model_type": "mistral", "eos_token_id": 7}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelGrammars(tmp_path).tokenizer("").eos_tokens == [7]
