"""Schemas are held to their meaning: by keywords, by random values, and by random answers."""

import asyncio
import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from lorikeet.errors import InvalidInput
from lorikeet.protocol.messages import Call, Endpoint, Format, ToolUse
from lorikeet.replica.grammar_matcher import ModelGrammars
from lorikeet.replica.grammar_sandbox import GrammarSandbox
from lorikeet.text.grammars.format_grammar import schema_grammar
from lorikeet.text.grammars.held_schema import held_schema
from lorikeet.text.grammars.patterns import other_texts, without_lookaheads
from lorikeet.text.grammars.schema_check import broken_keyword
from lorikeet.text.grammars.schema_faults import ignored_keywords
from lorikeet_engine.errors import InvalidRequest
from tests.replica.schema_keywords import (
    CHECKED,
    HELD,
    IGNORED,
    KEYWORDS,
    REFUSED,
    WHOLE,
    table,
)

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "model"
CALL = Call("r", Endpoint.CHAT, 0, "acme", "demo", None)


@pytest.fixture(scope="module")
def grammars():
    return ModelGrammars(DEMO)


@pytest.fixture(scope="module")
def sandbox():
    sandbox = GrammarSandbox(DEMO)
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture
def accepts(grammars, tokenizer):
    """Return a function that tells if a text is a whole allowed answer."""

    def accepts(schema, text, **options):
        matcher = grammars.compile(schema_grammar(json.dumps(schema), **options))
        try:
            for token in tokenizer.encode(text, add_special_tokens=False).ids:
                matcher.accept(token)
        except InvalidRequest:
            return False
        return matcher.may_end

    return accepts


@pytest.fixture
def says(accepts):
    """Return a function that tells if a JSON value is a whole allowed answer."""
    return lambda schema, value, **options: accepts(schema, json.dumps(value), **options)


def refusal(sandbox, call, grammar):
    with pytest.raises(InvalidInput) as refused:
        asyncio.run(sandbox.check(call, grammar))
    return refused.value


def refusal_of(sandbox, schema):
    text = json.dumps(schema)
    return refusal(sandbox, replace(CALL, format=Format(text)), schema_grammar(text)).message


class TestKeywords:
    @pytest.mark.parametrize("keyword", [*HELD, *IGNORED], ids=lambda keyword: keyword.name)
    def test_answers_are_held_to_a_keyword(self, says, keyword):
        for value in (*keyword.right, *keyword.wrong):
            matches = value in keyword.right
            checker = jsonschema.FormatChecker(["date"])
            asked = jsonschema.Draft202012Validator(keyword.schema, format_checker=checker)
            assert asked.is_valid(value) == matches
            assert says(keyword.schema, value) == matches, value

    def test_a_name_with_a_needless_escape_is_held_in_a_closed_object_alone(self, accepts):
        """As docs/openai.md says; findings/llguidance_escaped_names.sh."""
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        closed = {**schema, "additionalProperties": False}
        for spelt in ("a", "\\u0061"):
            assert not accepts(closed, f'{{"{spelt}": "x"}}')
            assert accepts(schema, f'{{"{spelt}": "x"}}') == (spelt != "a")

    @pytest.mark.parametrize("keyword", KEYWORDS, ids=lambda keyword: keyword.name)
    def test_ignored_keywords_are_named(self, keyword):
        call = replace(CALL, format=Format(json.dumps(keyword.schema)))
        assert bool(ignored_keywords(call)) == (keyword in IGNORED)

    @pytest.mark.parametrize("keyword", CHECKED, ids=lambda keyword: keyword.name)
    def test_keywords_that_are_let_go_are_named_and_checked(self, says, keyword):
        assert held_schema(keyword.schema, lets_go=True).let_go
        for value in (*keyword.right, *keyword.wrong):
            assert says(keyword.schema, value, lets_go=True), value
            found = broken_keyword(keyword.schema, json.dumps(value))
            assert (found is None) == (value in keyword.right), (value, found)

    @pytest.mark.parametrize(
        "keyword", [*CHECKED, *WHOLE, *REFUSED], ids=lambda keyword: keyword.name
    )
    def test_a_refusal_names_the_place_and_the_remedy(self, sandbox, keyword):
        schema = {"$defs": {"it": keyword.schema}, "properties": {"a b": {"$ref": "#/$defs/it"}}}
        message = refusal_of(sandbox, schema)
        assert "the JSON schema of response_format cannot be followed: at $" in message
        assert "$.$defs.it" in message
        assert ("With strict: false the" in message) == (keyword not in REFUSED)
        assert re.search(r": (use|write|remove|let|copy|leave|want) \S", message), message
        for word in ("coerce", "lenient", "Unimplemented", "whole"):
            assert word not in message

    def test_the_documentation_lists_the_keywords(self):
        page = (ROOT / "docs" / "openai.md").read_text()
        assert table() in page, f"put this into docs/openai.md:\n{table()}"


ZOD_UUID = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-f]{12}$"
OF_TOOLS = {
    "a zod record": {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "number"},
    },
    "a zod record by enum": {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["a", "b"]},
        "additionalProperties": {"type": "number"},
        "required": ["a", "b"],
    },
    "a zod record by uuid": {
        "type": "object",
        "propertyNames": {"type": "string", "format": "uuid", "pattern": ZOD_UUID},
        "additionalProperties": {},
    },
    "a zod never": {"type": "object", "properties": {"a": {"not": {}}}},
    "a zod duration": {
        "type": "string",
        "format": "duration",
        "pattern": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
        r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
    },
    "a zod hostname": {
        "type": "string",
        "format": "hostname",
        "pattern": r"^(?=.{1,253}\.?$)[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.?$",
    },
    "a pydantic dictionary by enum": {
        "$defs": {"Color": {"enum": ["red", "green"], "title": "Color", "type": "string"}},
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/Color"},
        "additionalProperties": {"type": "integer"},
    },
    "a part of an OpenAPI page": {
        "$ref": "#/components/schemas/Pet",
        "components": {"schemas": {"Pet": {"type": "string", "format": "byte", "maxLength": 4}}},
    },
    "options by references": {
        "definitions": {"a": {"type": "string"}, "b": {"type": "null"}},
        "oneOf": [{"$ref": "#/definitions/a"}, {"$ref": "#/definitions/b"}],
    },
    "a Notion parent, with options that overlap": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"page_id": {"type": "string", "format": "uuid"}},
                "required": ["page_id"],
            },
            {
                "type": "object",
                "properties": {"type": {"const": "workspace"}},
                "required": ["type"],
            },
        ]
    },
    "an expression or one of some words": {
        "oneOf": [{"enum": ["HTTP", "HTTPS"]}, {"type": "string", "pattern": r"^\[[^\[]*\]$"}]
    },
    "a reference into an option": {
        "type": "array",
        "items": {
            "oneOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/items/oneOf/0"}}]
        },
    },
    "a pointer with quoted characters": {
        "patternProperties": {"^a/b~c": {"type": "integer"}},
        "properties": {"x": {"$ref": "#/patternProperties/%5Ea~1b~0c"}},
    },
}


def random_answer(grammars, tokenizer, schema, dice):
    """Random tokens that the schema's grammar allows, as a value; None if they do not end."""
    from tests.replica.test_grammar import possible

    matcher, said = grammars.compile(schema_grammar(json.dumps(schema))), []
    ends = {tokenizer.encode(text, add_special_tokens=False).ids[0] for text in '"}]'}
    while not matcher.must_end and len(said) < 400:
        allowed = possible(grammars, matcher)
        if not allowed or (matcher.may_end and dice.random() < 0.3):
            break
        liked = sorted(allowed & ends)
        token = dice.choice(liked if liked and dice.random() < 0.5 else sorted(allowed))
        matcher.accept(token)
        said.append(token)
    return json.loads(tokenizer.decode(said)) if matcher.may_end else None


@pytest.mark.parametrize(
    "schema",
    [*OF_TOOLS.values(), *(keyword.schema for keyword in (*HELD, *IGNORED))],
    ids=[*OF_TOOLS, *(keyword.name for keyword in (*HELD, *IGNORED))],
)
@settings(deadline=None)  # a busy machine may pause the sandbox
@given(dice=st.randoms(use_true_random=False))
def test_random_answers_match_their_schema(grammars, tokenizer, schema, dice):
    answer = random_answer(grammars, tokenizer, schema, dice)
    if answer is not None:
        jsonschema.Draft202012Validator(schema).validate(answer)


NAMES = st.sampled_from(["a", "b"])
LITERALS = st.sampled_from([None, True, False, 0, 1, 1.5, "", "a", "b", "ab"])
VALUES = st.recursive(
    LITERALS,
    lambda part: st.lists(part, max_size=2) | st.dictionaries(NAMES, part, max_size=2),
    max_leaves=4,
)
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]
BOUNDS = ["minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems", "minProperties"]
LEAVES = (
    st.sampled_from([{"type": "string", "pattern": "^a"}, {"pattern": "^b$"}, {"format": "date"}])
    | st.booleans()
    | st.fixed_dictionaries({"type": st.sampled_from(TYPES)})
    | st.fixed_dictionaries({"type": st.lists(st.sampled_from(TYPES), min_size=1, unique=True)})
    | st.fixed_dictionaries({"enum": st.lists(LITERALS, max_size=3)})
    | st.fixed_dictionaries({"const": LITERALS})
    | st.fixed_dictionaries({"required": st.lists(NAMES, max_size=2, unique=True)})
    | st.dictionaries(st.sampled_from(BOUNDS), st.integers(0, 2), max_size=2)
    | st.just({"$ref": "#/$defs/x"})
)


def _schemas(part):
    some = st.lists(part, min_size=1, max_size=3)
    named = st.dictionaries(NAMES, part, max_size=2)
    keywords = {
        "allOf": some,
        "anyOf": some,
        "oneOf": some,
        "not": part,
        "if": part,
        "then": part,
        "else": part,
        "properties": named,
        "additionalProperties": part,
        "unevaluatedProperties": st.booleans(),
        "dependentSchemas": named,
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, unique=True), max_size=2),
        "propertyNames": st.sampled_from(
            [{"enum": ["a"]}, {"pattern": "a"}, {"minLength": 2}, {"type": "string"}, False]
        ),
        "type": st.sampled_from(TYPES),
        "required": st.lists(NAMES, max_size=2, unique=True),
        "minProperties": st.integers(0, 2),
        "maxProperties": st.integers(0, 2),
        "items": part,
        "minItems": st.integers(0, 2),
        "maxItems": st.integers(0, 3),
        "uniqueItems": st.booleans(),
    }
    return st.fixed_dictionaries({}, optional=keywords)


@given(
    st.recursive(LEAVES, _schemas, max_leaves=6).filter(lambda part: isinstance(part, dict)),
    LEAVES.filter(lambda part: part != {"$ref": "#/$defs/x"}),
    st.lists(VALUES, min_size=5, max_size=20),
)
def test_a_held_schema_matches_the_values_that_the_schema_matches(schema, definition, values):
    whole = {**schema, "$defs": {"x": definition}}
    held = held_schema(whole).schema
    asked, kept = map(jsonschema.Draft202012Validator, (whole, held))
    for value in values:
        assert kept.is_valid(value) == asked.is_valid(value), (value, held)


@given(
    st.recursive(LEAVES, _schemas, max_leaves=6).filter(lambda part: isinstance(part, dict)),
    LEAVES.filter(lambda part: part != {"$ref": "#/$defs/x"}),
    st.lists(VALUES, min_size=5, max_size=20),
)
def test_a_schema_without_what_is_let_go_matches_all_values_of_the_schema(
    schema, definition, values
):
    whole = {**schema, "$defs": {"x": definition}}
    held = held_schema(whole, lets_go=True)
    asked, kept = map(jsonschema.Draft202012Validator, (whole, held.schema))
    for value in values:
        if asked.is_valid(value) or not held.let_go:
            assert kept.is_valid(value) == asked.is_valid(value), (value, held)


TEXTS = st.text("ab.-\n 1", max_size=6)


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(?!\.)(?!.*\.\.)[ab.]+$",
        "^(?!a)[ab]*$",
        "^(?!a$)[ab]*$",
        "^(?!(?:ab|b)$)[ab]*$",
        "^(?!ab)[ab]*$",
        r"^(?!\s*$)[ab\s]*$",
        "^(?!$)a*$",
        "^a(?!$)(b)?$",
        r"^(?=.*1)(?=.*[ab])[ab1]{2,}$",
        "^(?=.{1,3}$)[ab.]*$",
        "^(?!.*-a)[a-]*$",
        "^(?![^a])[ab]*$",
        r"^a\.(?=b)[ab]*",
    ],
)
@given(texts=st.lists(TEXTS, min_size=20, max_size=40))
def test_patterns_without_look_ahead_match_the_same_texts(pattern, texts):
    patterns = without_lookaheads(pattern)
    assert not any("(?=" in each or "(?!" in each for each in patterns)
    for text in texts:
        same = all(re.search(_of_javascript(each), text) for each in patterns)
        assert same == bool(re.search(_of_javascript(pattern), text)), text


def _of_javascript(pattern):
    """Return a pattern in which $ is the end alone, as in JSON schema."""
    return pattern.replace("$", r"\Z")


@pytest.mark.parametrize("pattern", ["(?=a)b", "^a(?=b)|c", "^[a-z](?!b)", "^(?!a+b+)c", "a(?<=b)"])
def test_other_look_ahead_stays(pattern):
    assert without_lookaheads(pattern) == [pattern]


@given(st.lists(TEXTS, min_size=1, max_size=4), st.lists(TEXTS, max_size=10))
def test_other_texts_are_all_except_the_named_texts(named, texts):
    other = re.compile(other_texts(named))
    for text in (*named, *texts):
        assert bool(other.fullmatch(text)) == (text not in named)


def tool(name, parameters, **more):
    function = {"name": name, "parameters": parameters, **more}
    return {"type": "function", "function": function}


BAD = {"type": "object", "properties": {"r": {"type": "array", "uniqueItems": True}}}
GOOD = {"type": "object", "properties": {"r": {"type": "string"}}}


EMPTY = {"type": "object", "required": ["a"], "properties": {"a": {"enum": []}}}


class TestPlaces:
    @pytest.mark.parametrize(
        ("use", "place"),
        [
            (ToolUse((tool("f", GOOD), tool("g", BAD)), ("f", "g")), "tools[1] (g)"),
            (ToolUse((tool("f", GOOD), tool("g", BAD, strict=True))), "tools[1] (g)"),
            (ToolUse((tool("f", BAD), tool("g", BAD)), ("g",)), "tools[1] (g)"),
            (ToolUse((tool("g", BAD),), ("g",), functions=True), "functions[0] (g)"),
            (ToolUse((tool("a.g", BAD),), ("a.g",)), "the tool a.g"),
        ],
    )
    def test_a_tool_is_named_by_its_place_and_name(self, sandbox, use, place):
        call = replace(CALL, tools=use)
        error = refusal(sandbox, call, schema_grammar(json.dumps(BAD)))
        assert error.param == "tools"
        assert error.message.startswith(
            f"the JSON schema of {place} cannot be followed: at $.properties.r: uniqueItems"
        )

    def test_a_tool_that_is_not_held_is_not_named(self, sandbox):
        use = ToolUse((tool("f", BAD), tool("g", GOOD, strict=True)))
        call = replace(CALL, tools=use, format=None)
        assert "of tools cannot" in refusal(sandbox, call, schema_grammar('{"type": "x"}')).message

    def test_a_tools_place_among_tools_that_were_left_out_is_not_said(self, sandbox):
        call = replace(CALL, tools=ToolUse((tool("g", BAD),), ("g",)), left_out=("web_search",))
        error = refusal(sandbox, call, schema_grammar(json.dumps(BAD)))
        assert "the JSON schema of the tool g cannot" in error.message

    @pytest.mark.parametrize(
        ("schema", "path"),
        [
            ({"items": {"anyOf": [{"type": "null"}, BAD]}}, "$.items.anyOf[1].properties.r"),
            ({"oneOf": [{"type": "null"}, BAD]}, "$.oneOf[1].properties.r"),
            ({"properties": {"a b": {"items": BAD}}}, '$.properties["a b"].items.properties.r'),
            ({"$defs": {"d": BAD}, "additionalProperties": {"$ref": "#/$defs/d"}}, "$.$defs.d"),
            ({"patternProperties": {"^x/y": BAD}}, '$.patternProperties["^x/y"].properties.r'),
            (EMPTY, "$.properties.a"),
            ({"properties": {"no": {"enum": []}, "a": BAD}}, "$.properties.a.properties.r"),
            ({"type": "nope"}, "$"),
        ],
    )
    def test_a_fault_is_named_by_its_innermost_place(self, sandbox, schema, path):
        assert f"at {path}" in refusal_of(sandbox, schema)

    def test_a_format_beside_tools_is_named_by_its_field(self, sandbox):
        use = ToolUse((tool("f", GOOD),))
        answer = Format(json.dumps(BAD), param="text.format")
        call = replace(CALL, tools=use, format=answer)
        error = refusal(sandbox, call, schema_grammar(json.dumps(BAD)))
        assert error.param == "text.format"
        assert error.message.startswith("the JSON schema of text.format cannot be followed: at $.")

    def test_a_schema_that_costs_too_much_is_named(self, sandbox):
        large = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}}
        use = ToolUse((tool("f", GOOD), tool("g", large)), ("f", "g"))
        error = refusal(sandbox, replace(CALL, tools=use), schema_grammar(json.dumps(large)))
        assert "of tools[1] (g) cannot be followed: it takes too much" in error.message


class TestIgnored:
    @pytest.mark.parametrize(
        ("schema", "names"),
        [
            ({"format": "path"}, ("format:path",)),
            ({"type": ["string", "null"], "format": "byte"}, ("format:byte",)),
            ({"items": {"format": "a b\r\nc"}}, ("format",)),
            ({"propertyNames": {"format": "uuid"}}, ("format:uuid",)),
            ({"type": "integer", "format": "int64"}, ()),
            ({"format": "date"}, ()),
            ({"properties": {"format": {"const": {"format": "x"}}}}, ()),
        ],
    )
    def test_formats_of_strings_that_are_not_held_are_named(self, schema, names):
        call = replace(CALL, format=Format(json.dumps(schema)))
        assert ignored_keywords(call) == names

    def test_many_are_named_only_in_part(self):
        schema = {"properties": {f"p{i}": {"format": f"f{i}"} for i in range(99)}}
        assert len(ignored_keywords(replace(CALL, format=Format(json.dumps(schema))))) == 16

    def test_formats_of_tools_count_only_where_calls_are_held(self):
        path = {"properties": {"a": {"type": "string", "format": "path"}}}
        for use, names in (
            (ToolUse((tool("f", path),)), ()),
            (ToolUse((tool("f", path, strict=True),)), ("format:path",)),
            (ToolUse((tool("f", path), tool("g", GOOD)), ("g",)), ()),
            (ToolUse((tool("f", path), tool("g", GOOD)), ("f", "g")), ("format:path",)),
        ):
            assert ignored_keywords(replace(CALL, tools=use)) == names


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": 3},
        {"oneOf": [3]},
        {"not": 3},
        {"if": 3, "then": []},
        {"dependentRequired": {"a": 3}},
        {"dependencies": [3]},
        {"propertyNames": {"type": 3}},
        {"propertyNames": {"enum": 3}},
        {"unevaluatedProperties": False, "allOf": 3},
        {"minProperties": "a", "properties": 3},
        {"uniqueItems": True, "maxItems": "a"},
        {"pattern": 3},
        {"pattern": "^(?=a"},
        {"pattern": "^(?=[a"},
        {"format": 3},
        {"type": [3], "format": "x"},
        {"$ref": 3},
        {"$ref": "#/oneOf/x", "oneOf": []},
        {"$id": 3, "$defs": 3, "$ref": "#/not", "not": {}},
        {"not": {"const": 1e400}, "$schema": "http://json-schema.org/draft-04/schema#"},
    ],
    ids=json.dumps,
)
def test_a_malformed_schema_is_refused_or_let_go_without_a_crash(sandbox, schema):
    sandbox._problem(schema_grammar(json.dumps(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"allOf": [{"$ref": "#/allOf/0"}], "unevaluatedProperties": False},
        {"not": {"$ref": "#/not"}},
        {"oneOf": [{"$ref": "#/oneOf/1"}, {"$ref": "#/oneOf/0"}]},
        {"oneOf": [{"$ref": "#"}, {"type": "null"}]},
    ],
    ids=json.dumps,
)
def test_references_in_a_circle_end(sandbox, schema):
    with suppress(InvalidInput):  # nested too deeply
        sandbox._problem(schema_grammar(json.dumps(schema)))


def test_logic_takes_bounded_time():
    option = {"properties": {f"p{i}": {"enum": [i]} for i in range(20)}}
    for _ in range(4):
        option = {"oneOf": [{"properties": {"x": option}}, {"properties": {"y": option}}] * 3}
    text = json.dumps(held_schema(option).schema)
    assert len(text) < 40 * len(json.dumps(option))
