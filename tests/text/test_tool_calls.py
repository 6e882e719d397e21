"""Tool calls are parsed from models' output, whole and in deltas, and forced by grammars."""

import json
import re
import time

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerFast

from lorikeet.protocol.messages import Format, ToolUse
from lorikeet.text.detokenizer import Vocabulary
from lorikeet.text.grammars.tool_grammar import call_grammar
from lorikeet.text.tools.calls import ForcedCallParser, ToolCallParser
from lorikeet.text.tools.forced_gemma_calls import ForcedGemmaParser
from lorikeet.text.tools.forced_xml_calls import ForcedXmlParser
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
    CallStyle,
    syntax_of,
)

PLACE = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOLS = (
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "time"}},
)
USE = ToolUse(TOOLS)
PARIS = '{"name": "weather", "arguments": {"place": "Paris {}]"}}'
NOW = '{"name": "time", "arguments": {}}'
PARIS_LLAMA, NOW_LLAMA = (text.replace('"arguments"', '"parameters"') for text in (PARIS, NOW))
BOTH = [("weather", {"place": "Paris {}]"}), ("time", {})]
WRITTEN = {
    "hermes": (
        HERMES,
        f"Let me look.\n<tool_call>\n{PARIS}\n</tool_call>\n<tool_call>{NOW}</tool_call>",
    ),
    "hermes, arguments first": (
        HERMES,
        'Let me look. <tool_call>{"arguments": {"place": "Paris {}]"}, "name": "weather"}'
        f"</tool_call><tool_call>{NOW}</tool_call>\n",
    ),
    "mistral": (MISTRAL, f"Let me look.[TOOL_CALLS] [{PARIS}, {NOW}]"),
    "ministral": (
        MINISTRAL,
        'Let me look.\n[TOOL_CALLS]weather[ARGS]{"place": "Paris {}]"}[TOOL_CALLS]time[ARGS]{}',
    ),
    "ministral, spaced": (
        MINISTRAL,
        'Let me look.[TOOL_CALLS] weather[ARGS] {"place": "Paris {}]"}\n[TOOL_CALLS]time[ARGS]{}\n',
    ),
    "granite": (GRANITE, f"Let me look.<|tool_call|>[{PARIS}, {NOW}]"),
    "nemotron": (NEMOTRON, f"Let me look.<TOOLCALL>[{PARIS}, {NOW}]</TOOLCALL>"),
    "phi": (
        PHI,
        f"Let me look.<|tool_call|>{PARIS}<|/tool_call|><|tool_call|>{NOW}<|/tool_call|>",
    ),
    "functools": (FUNCTOOLS, f"Let me look. functools[{PARIS}, {NOW}]"),
    "llama": (LLAMA, f"{PARIS_LLAMA}; {NOW_LLAMA}"),
    "olmo": (
        OLMO,
        'Let me look.<function_calls>weather(place="Paris {}]")\ntime()</function_calls>',
    ),
    "tool_code": (
        TOOL_CODE,
        "Let me look.\n```tool_code\nweather(place='Paris {}]')\ntime()\n```\n",
    ),
    "a list in Python": (PYTHON_LIST, "[weather(place='Paris {}]'), time()]"),
    "qwen's xml": (
        QWEN_XML,
        "Let me look.\n\n<tool_call>\n<function=weather>\n<parameter=place>\nParis {}]\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n"
        "</tool_call>",
    ),
    "seed's xml": (
        SEED,
        "Let me look.\n<seed:tool_call>\n<function=weather>\n<parameter=place>Paris {}]"
        "</parameter>\n</function>\n</seed:tool_call>"
        "<seed:tool_call><function=time></function></seed:tool_call>\n",
    ),
    "glm 4.7": (
        GLM,
        "Let me look.<tool_call>weather<arg_key>place</arg_key><arg_value>Paris {}]</arg_value>"
        "</tool_call><tool_call>time</tool_call>",
    ),
    "glm 4.5": (
        GLM_4_5,
        "Let me look.\n<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>Paris {}]"
        "</arg_value>\n</tool_call>\n<tool_call>time\n</tool_call>",
    ),
    "functiongemma": (
        FUNCTION_GEMMA,
        "Let me look.<start_function_call>call:weather{place:<escape>Paris {}]<escape>}"
        "<end_function_call><start_function_call>call:time{}<end_function_call>",
    ),
    "gemma 4": (
        GEMMA_4,
        'Let me look.<|tool_call>call:weather{place:<|"|>Paris {}]<|"|>}<tool_call|>'
        "<|tool_call>call:time{}<tool_call|>",
    ),
}
UNMARKED = (LLAMA, PYTHON_LIST)


def read(parser, text, size):
    """(what is said, the calls) of a text that comes in deltas of a size."""
    said, deltas = "", []
    for at in range(0, len(text), size):
        more, called = parser.push(text[at : at + size])
        said, deltas = said + more, deltas + called
    more, called = parser.push("", last=True)
    return said + more, calls_of([*deltas, *called])


def calls_of(deltas):
    names, arguments = {}, {}
    for delta in deltas:
        assert bool(delta.name) == (delta.index not in names)
        names.setdefault(delta.index, delta.name)
        arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
    assert list(names) == list(range(len(names)))
    return [(names[index], json.loads(arguments[index])) for index in names]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("written", WRITTEN)
def test_calls_are_parsed_however_the_text_is_cut(written, size):
    syntax, text = WRITTEN[written]
    said, calls = read(ToolCallParser(syntax, USE), text, size)
    assert said == ("" if syntax in UNMARKED else "Let me look.")
    assert calls == BOTH


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        (HERMES, "no call at all  \n"),
        (HERMES, "a < b and <tool_cal"),
        (HERMES, '<tool_call>{"name": "weather", "arguments": {"place": </tool_call>'),
        (HERMES, f"<tool_call>{PARIS}"),
        (HERMES, f"<tool_call>{PARIS}\n</tool_ca"),
        (HERMES, f"<tool_call>{PARIS} and so on</tool_call>"),
        (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": ["time"], "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "time", "arguments": "now"}</tool_call>'),
        (HERMES, "<tool_call>[1, 2]</tool_call>"),
        (MISTRAL, "[TOOL_CALLS] [1"),
        (MISTRAL, f"{PARIS}"),
        (MINISTRAL, "[TOOL_CALLS]time{}"),
        (MINISTRAL, "[TOOL_CALLS]time[ARGS]"),
        (MINISTRAL, "[TOOL_CALLS]time[ARGS][]"),
        (MINISTRAL, "[TOOL_CALLS]unknown[ARGS]{}"),
        (MINISTRAL, f"[TOOL_CALLS] [{NOW}]"),
        (MINISTRAL, "time[ARGS]{}"),
        (MINISTRAL, '[TOOL_CALLS]time[ARGS]{"at": NaN}'),
        (LLAMA, f"I would call {PARIS_LLAMA}"),
        (LLAMA, '{"city": "Paris"}'),
        (LLAMA, "{not JSON}"),
        (HERMES, '<tool_call>{"name": "time", "arguments": {"at": NaN}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "time", "arguments": {"at": 1e999}}</tool_call>'),
    ],
)
def test_malformed_calls_stay_text(syntax, text, size):
    assert read(ToolCallParser(syntax, USE), text, size) == (text, [])


def test_text_that_cannot_become_a_call_is_not_held_back():
    parser = ToolCallParser(HERMES, USE)
    assert parser.push("so far") == ("so far", [])
    assert parser.push(" <tool") == ("", [])
    assert parser.push("box>") == (" <toolbox>", [])


def test_a_call_after_a_malformed_one_is_parsed():
    broken = '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'
    said, calls = read(ToolCallParser(HERMES, USE), f"{broken}<tool_call>{NOW}</tool_call>", 3)
    assert (said, calls) == (broken, [("time", {})])


def test_without_parallel_calls_the_first_call_ends_the_choice():
    for syntax, text in WRITTEN.values():
        parser = ToolCallParser(syntax, ToolUse(TOOLS, parallel=False))
        assert read(parser, text, 1)[1] == BOTH[:1]
        assert parser.done


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        ("{{ '<tool_call>\\n' + call | tojson + '\\n</tool_call>' }}", HERMES),
        ("""{{ '<tool_call>{"name": ' + name | tojson + '}</tool_call>' }}""", EXAONE),
        ("{{ '<tool_call>\\n<function=' + call.name + '>' }}", None),
        ("{{ '<tool_call>\\n<function=' + name + '>\\n<parameter=' + key + '>' }}", QWEN_XML),
        ("{{ '<seed:tool_call>\\n<function=' + name + '><parameter=' + key + '>' }}", SEED),
        ("{{ '[TOOL_CALLS] ' + calls | tojson }}", MISTRAL),
        ("{{ 'Call with <|tool_call|> followed by a JSON list.' }}", GRANITE),
        ("{{ 'Call as <TOOLCALL>[{…}]</TOOLCALL>.' }}", NEMOTRON),
        ("{{ '<|tool_call|>' + call | tojson + '<|/tool_call|>' }}", PHI),
        ("{{ 'Call as functools[...], a JSON list.' }}", FUNCTOOLS),
        ("{{ '[TOOL_CALLS]' + call.name + '[ARGS]' }}", MINISTRAL),
        ("{{ '[TOOL_CALLS]' + call.name + '[CALL_ID]' + call.id + '[ARGS]' }}", None),
        ("""{{- '{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}""", LLAMA),
        ("{{ message.content }}", None),
        ("""{{ '"parameters": ' + tool | tojson }}<m:parameter name="{{ key }}">""", None),
        ("{{ '<function_calls>' + name + '(' + arguments + ')' }}", OLMO),
        ("{{ '<function_calls><invoke name=' + name + '>' }}", None),
        ("{{ '<start_function_call>call:' + name + '{' }}", FUNCTION_GEMMA),
        ("""{{ '<|tool_call>call:' + name + '{' + key + ':<|"|>' }}""", GEMMA_4),
        ("{{ '<tool_call>' + name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}", GLM),
        ("{{ '<tool_call>' + name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}", GLM_4_5),
        ("{{ '```tool_code\\n' + name + '(' }}", TOOL_CODE),
        ("{{ 'you must respond with a python list of the function calls' }}", PYTHON_LIST),
    ],
)
def test_the_syntax_follows_from_the_template(template, syntax):
    assert syntax_of(template) is syntax


@pytest.fixture(scope="module")
def demo():
    return PreTrainedTokenizerFast.from_pretrained("demo/model")


def forced(syntax, *calls):
    """The calls as the grammar wants them, without special tokens."""
    if syntax.style is CallStyle.XML:
        said = syntax.between.join(in_xml(name, given, syntax.tags) for name, given in calls)
        return syntax.before + said + syntax.after
    if syntax.style is CallStyle.PYTHON:
        pairs = [
            (name, ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items()))
            for name, arguments in calls
        ]
        said = syntax.between.join(f"{name}({given})" for name, given in pairs)
        return syntax.before + said + syntax.after
    if syntax.style is CallStyle.NAMED:
        written = [name + syntax.arguments + json.dumps(given) for name, given in calls]
    elif syntax.style is CallStyle.GEMMA:
        written = [f"call:{name}{in_gemmas(given, syntax.quote)}" for name, given in calls]
    else:
        written = [json.dumps({"name": name, syntax.arguments: given}) for name, given in calls]
    return syntax.before + syntax.between.join(written) + syntax.after


def in_xml(name, arguments, tags):
    """A call as a family's chat template writes it in XML."""
    texts = [
        (key, value if isinstance(value, str) else json.dumps(value))
        for key, value in arguments.items()
    ]
    gap = tags.space if tags.value[0] else ""
    said = "".join(
        f"{key.join(tags.key)}{gap}{f'{tags.pad}{text}{tags.pad}'.join(tags.value)}{tags.space}"
        for key, text in texts
    )
    return f"{name.join(tags.name)}{tags.space}{said}{tags.end}"


def in_gemmas(value, quote):
    """A value as Gemma's chat templates write it."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: (key.lower(), key))
        bare = {
            key: key if re.fullmatch(r"[\w. -]+", key) else f"{quote}{key}{quote}" for key in keys
        }
        return "{" + ",".join(f"{bare[key]}:{in_gemmas(value[key], quote)}" for key in keys) + "}"
    if isinstance(value, list):
        return f"[{','.join(in_gemmas(each, quote) for each in value)}]"
    return json.dumps(value)


def allows(demo, grammar):
    """Return a function that tells if a grammar allows a text as a whole answer."""
    tokenizer = from_tokenizer(demo)

    def allowed(text):
        matcher = LLMatcher(tokenizer, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = demo(text, add_special_tokens=False)["input_ids"]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return allowed


HELD = {
    "hermes": HERMES,
    "exaone": EXAONE,
    "mistral": MISTRAL,
    "ministral": MINISTRAL,
    "granite": GRANITE,
    "nemotron": NEMOTRON,
    "llama": LLAMA,
    "olmo": OLMO,
    "tool_code": TOOL_CODE,
    "python": PYTHON_LIST,
    "functiongemma": FUNCTION_GEMMA,
    "gemma 4": GEMMA_4,
    "qwen's xml": QWEN_XML,
    "seed's xml": SEED,
    "glm 4.7": GLM,
    "glm 4.5": GLM_4_5,
}


STREAMED = {name: HELD[name] for name in ("hermes", "mistral", "ministral", "granite", "llama")}


@pytest.mark.parametrize("syntax", HELD.values(), ids=HELD)
def test_a_grammar_allows_calls_of_the_forced_tools_and_nothing_else(demo, syntax):
    grammar = call_grammar(
        ToolUse(TOOLS, forced=("weather", "time")), syntax, Vocabulary(demo.backend_tokenizer)
    )

    allowed = allows(demo, grammar)
    assert allowed(forced(syntax, *BOTH))
    assert allowed(forced(syntax, ("weather", {"place": "x", "days": 3})))
    assert not allowed(forced(syntax, ("weather", {"place": "x", "days": "three"})))
    assert not allowed(forced(syntax, ("weather", {"place": "x", "more": 3})))
    assert not allowed(forced(syntax, ("weather", {"days": 3})))
    assert not allowed(forced(syntax, ("other", {})))
    assert not allowed(forced(syntax, ("time", {"place": "x"})))
    assert not allowed("Hello")
    assert not allowed("")


@pytest.mark.parametrize(
    "syntax",
    [syntax for syntax in HELD.values() if syntax is not LLAMA],
    ids=[name for name in HELD if name != "llama"],
)
def test_calls_may_be_an_alternative_to_an_answer_in_a_format(demo, syntax):
    answer = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    vocabulary = Vocabulary(demo.backend_tokenizer)
    allowed = allows(demo, call_grammar(USE, syntax, vocabulary, Format(json.dumps(answer))))
    assert allowed('{"n": 3}')
    assert allowed(forced(syntax, *BOTH))
    assert not allowed('{"n": "three"}')
    assert not allowed("Hello")
    anything = allows(demo, call_grammar(USE, syntax, vocabulary, Format("{}")))
    assert anything('{"any": ["object"]}')
    assert not anything("[1]")


def test_without_parallel_calls_only_one_forced_call_is_allowed(demo):
    vocabulary = Vocabulary(demo.backend_tokenizer)
    grammar = call_grammar(ToolUse(TOOLS, ("time",), parallel=False), HERMES, vocabulary)
    matcher = LLMatcher(from_tokenizer(demo), grammar)
    once = demo(forced(HERMES, ("time", {})), add_special_tokens=False)["input_ids"]
    assert matcher.consume_tokens(once)
    assert matcher.is_stopped()
    matcher.reset()
    other = demo(forced(HERMES, BOTH[0]), add_special_tokens=False)["input_ids"]
    assert matcher.try_consume_tokens(other) < len(other)


def test_marks_that_are_special_tokens_are_forced_as_tokens(demo):
    demo.backend_tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    vocabulary = Vocabulary(demo.backend_tokenizer)
    mark = demo.backend_tokenizer.token_to_id("[TOOL_CALLS]")
    grammar = call_grammar(ToolUse(TOOLS, ("time",)), MISTRAL, vocabulary)
    assert f'<[{mark}]> " ["' in grammar
    assert mark not in vocabulary.special_except(MISTRAL.tokens)
    assert mark in vocabulary.special_except(HERMES.tokens)


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("syntax", STREAMED.values(), ids=STREAMED)
def test_forced_calls_are_streamed(syntax, size):
    assert read(ForcedCallParser(syntax), forced(syntax, *BOTH), size) == ("", BOTH)


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    "syntax", [QWEN_XML, SEED, GLM, GLM_4_5], ids=["qwen", "seed", "glm 4.7", "glm 4.5"]
)
def test_forced_calls_in_xml_are_streamed(syntax, size):
    parser = ForcedXmlParser(syntax, USE)
    assert read(parser, forced(syntax, *BOTH), size) == ("", BOTH)
    assert parser.called


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("syntax", [FUNCTION_GEMMA, GEMMA_4], ids=["functiongemma", "gemma 4"])
def test_forced_calls_of_gemma_are_streamed(syntax, size):
    parser = ForcedGemmaParser(syntax)
    deep = {"a b": 1, "c:d": '"{},:[]\\ \n<', "n": [-1.5e3, True, None, {}, [], {"x": [[""]]}]}
    calls = [*BOTH, ("note", deep), ("note", {"i": 7})]
    assert read(parser, forced(syntax, *calls), size) == ("", calls)
    assert parser.called


def test_arguments_of_a_forced_call_of_gemma_come_in_pieces():
    parser = ForcedGemmaParser(GEMMA_4)
    pieces = ["<|tool_call>call:f{a:", '<|"|>O', 'ne "2"\n<|', '"|>,b:4', "2", ".5,", "c:tr"]
    parts = [parser.push(piece).calls for piece in pieces]
    assert ["".join(part.arguments for part in each) for each in parts] == [
        '{"a": ',
        '"O',
        'ne \\"2\\"\\n',
        '", "b": ',
        "",
        "42.5, ",
        '"c": ',
    ]
    assert not parser.called
    assert "".join(part.arguments for part in parser.push("", last=True).calls) == "tr"


@pytest.mark.parametrize("syntax", STREAMED.values(), ids=STREAMED)
def test_a_cut_among_forced_calls_shows_whether_all_are_complete(syntax):
    text = forced(syntax, *BOTH)
    for end in range(len(text) + 1):
        parser, arguments = ForcedCallParser(syntax), {}
        for delta in parser.push(text[:end], last=True).calls:
            arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
        whole = [given in ('{"place": "Paris {}]"}', "{}") for given in arguments.values()]
        assert parser.called == (whole != [] and all(whole))
        assert "" not in arguments.values()


def test_deep_nesting_breaks_nothing():
    deep = '{"a": ' * 5000 + "1" + "}" * 5000
    text = f'<tool_call>{{"name": "time", "arguments": {deep}}}</tool_call>'
    assert read(ToolCallParser(HERMES, USE), text, 10_000) == (text, [])
    _, deltas = ForcedCallParser(HERMES).push(text)
    assert "".join(delta.arguments for delta in deltas).startswith(deep)


def test_arguments_of_a_forced_call_come_in_pieces():
    parser = ForcedCallParser(HERMES)
    _, deltas = parser.push('<tool_call>\n{"name": "weather", "arguments": {"place": "Par')
    assert [(p.name, p.arguments) for p in deltas] == [("weather", ""), (None, '{"place": "Par')]
    _, deltas = parser.push('is"}}\n</tool')
    assert [p.arguments for p in deltas] == ['is"}']


def cost_s(make_parser, text):
    """The least processor time in which a text is read character by character, of three."""
    costs = []
    for _ in range(3):
        parser, began_s = make_parser(), time.thread_time()
        for char in text:
            parser.push(char)
        parser.push("", last=True)
        costs.append(time.thread_time() - began_s)
    return min(costs)


LONG = {
    "spaces": lambda n: " " * n,
    "spaces before a call": lambda n: "a" + "\n" * n + "<tool_call>",
    "spaces in a call": lambda n: "<tool_call>" + " " * n,
    "spaces behind a call": lambda n: f"<tool_call>{NOW}" + " " * n,
    "brackets": lambda n: '<tool_call>{"name": "time", "arguments": {"a": [' + "[]," * (n // 3),
    "calls": lambda n: f"<tool_call>{NOW}</tool_call>" * (n // 50),
    "beginnings": lambda n: "<tool_call" * (n // 10),
}


@pytest.mark.parametrize("long", LONG)
def test_the_time_to_read_an_answer_is_linear_in_its_length(long):
    for make_parser in (lambda: ToolCallParser(HERMES, USE), lambda: ForcedCallParser(HERMES)):
        short, fourfold = (cost_s(make_parser, LONG[long](n)) for n in (4_000, 16_000))
        assert fourfold < 8 * short + 0.01, "16 times as long if it were quadratic"
