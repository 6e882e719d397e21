"""Answers under a JSON schema's grammar match the schema."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import psutil
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from tokenizers import Tokenizer

from loadtest.engine.random_model import write_config
from loadtest.real_service.random_models import random_vocabulary
from lorikeet.errors import InvalidInput
from lorikeet.protocol.messages import Call, Endpoint, Format, Refusal, ToolUse
from lorikeet.replica import grammar_sandbox
from lorikeet.replica.grammar_matcher import ModelGrammars
from lorikeet.replica.grammar_sandbox import GrammarSandbox
from lorikeet.replica.replica import Replica
from lorikeet.settings import Settings
from lorikeet.text.grammars.format_grammar import format_grammar, schema_grammar
from lorikeet_engine.engine import Engine, EngineSettings
from lorikeet_engine.errors import EngineOverloaded, InvalidRequest
from lorikeet_engine.request import FinishReason, Request, SamplingParams, SchedulingParams
from tests.engine.blobs import Shelf
from tests.engine.engine_driver import Answers
from tests.replica.schemas import SCHEMAS as FORMS
from tests.serving.local_gateway import answer_of

DEMO = Path(__file__).parents[2] / "demo" / "model"
EOS = 1
SCHEMAS = {
    "nested": {
        "type": "object",
        "properties": {
            "who": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 12},
                    "age": {"type": "integer", "minimum": 0, "maximum": 130},
                },
                "required": ["name"],
                "additionalProperties": False,
            },
            "mood": {"enum": ["glad", "sad", None, 7]},
        },
        "required": ["who", "mood"],
        "additionalProperties": False,
    },
    "arrays": {
        "type": "object",
        "properties": {
            "scores": {
                "type": "array",
                "items": {"type": "number", "minimum": -1, "maximum": 1},
                "minItems": 1,
                "maxItems": 3,
            },
            "tags": {
                "type": "array",
                "items": {"enum": ["red", "green", "blue"]},
                "maxItems": 4,
            },
        },
        "required": ["scores"],
        "additionalProperties": False,
    },
    "options": {
        "$defs": {"point": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
        "type": "object",
        "properties": {
            "at": {"$ref": "#/$defs/point"},
            "flag": {"type": "boolean"},
            "shape": {
                "anyOf": [
                    {"type": "string", "pattern": "^[a-f]{2,5}$"},
                    {"type": "object", "properties": {"r": {"const": 2}}, "required": ["r"]},
                ]
            },
        },
        "additionalProperties": False,
    },
}


IDLE = [
    {"uniqueItems": False},
    {"contains": {"type": "null"}, "minContains": 0},
    {"minContains": 2, "maxContains": 3},
    {"unevaluatedItems": True},
    {"unevaluatedProperties": {}},
    {"propertyNames": True},
    {"propertyNames": {"propertyNames": {}}},
    {"dependentRequired": {}},
    {"dependentRequired": {"a": []}},
    {"dependentSchemas": {"a": {"uniqueItems": False}}},
    {"dependencies": {"a": [], "b": True}},
    {"if": {"required": ["b"]}},
    {"if": {"required": ["b"]}, "then": {}, "else": True},
    {"then": False, "else": False},
    {"not": False},
    {"minItems": 0, "minLength": 0, "minProperties": 0, "required": [], "patternProperties": {}},
    {"readOnly": True, "deprecated": True, "$comment": "c", "examples": [1], "default": 1},
]
"""Schemas that allow any value."""


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars():
    return ModelGrammars(DEMO)


@pytest.fixture(scope="module")
def sandbox():
    sandbox = GrammarSandbox(DEMO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_sandbox, "_WALL_S", 100.0)  # other tests may take the machine's time
        yield sandbox
    sandbox.close()


@pytest.fixture
def says(grammars, tokenizer):
    """Return a function that tells if a text is a whole allowed answer."""

    def says(schema, text):
        matcher = grammars.compile(schema_grammar(json.dumps(schema)))
        for token in tokenizer.encode(text, add_special_tokens=False).ids:
            try:
                matcher.accept(token)
            except InvalidRequest:
                return False
        return matcher.may_end

    return says


def possible(grammars, matcher, vocabulary=264):
    """The tokens that may follow. vocabulary: how many there are, or more."""
    bits = np.zeros((1, -(-vocabulary // 8)), np.uint8)
    assert grammars.fill_bitmasks([matcher], bits) == [None]
    return set(np.flatnonzero(np.unpackbits(bits[0], bitorder="little")).tolist())


class TestEngine:
    """The demo model at temperature 1, which says what it likes where nothing holds it."""

    @pytest.fixture
    def answer(self, tmp_path):
        def answer(requests, overlap):
            torch.set_num_threads(1)
            sizes = {"kv_bytes": 64 << 20, "max_batch_tokens": 256, "max_running": 64}
            cache = tmp_path / "cache"
            settings = EngineSettings(model=DEMO, cache_dir=cache, overlap=overlap, **sizes)
            shelf = Shelf(tmp_path / "blobs")
            answers = Answers(Engine(settings, shelf, grammars=ModelGrammars(DEMO)))
            for request in requests:
                answers.submit(request)
            answers.until(lambda: not answers.pending, timeout_s=240)
            answers.engine.close()
            return answers

        return answer

    def test_answers_of_many_seeds_match_their_schemas(self, answer, tokenizer):
        prompt = tuple(tokenizer.encode("Tell me about it.").ids)
        bound, plain = [], []
        for seed in range(12):
            name = list(SCHEMAS)[seed % len(SCHEMAS)]
            params = SamplingParams(
                600, seed=seed, grammar=schema_grammar(json.dumps(SCHEMAS[name]))
            )
            bound.append(Request(f"{name} {seed}", (prompt,), params))
        for seed in range(4):
            params = SamplingParams(60, seed=seed, ignore_eos=True, top_p=0.95)
            plain.append(Request(f"plain {seed}", (prompt,), params))
        both = answer([*bound, *plain], overlap=True)
        for request in bound:
            key = (request.request_id, 0)
            assert both.finish[key] is FinishReason.STOP
            said = json.loads(tokenizer.decode(both.tokens[key]))
            jsonschema.validate(said, SCHEMAS[request.request_id.split()[0]])
        assert len({tuple(tokens) for tokens in both.tokens.values()}) > 14
        assert both.tokens == answer([*bound, *plain], overlap=False).tokens
        alone = answer(plain, overlap=True).tokens
        assert alone == {key: both.tokens[key] for key in alone}

    def test_max_tokens_may_end_it_in_the_middle(self, answer):
        grammar = schema_grammar(json.dumps(SCHEMAS["nested"]))
        answers = answer([Request("r", ((5, 6),), SamplingParams(4, grammar=grammar))], True)
        assert answers.finish["r", 0] is FinishReason.LENGTH
        assert len(answers.of("r")) == 4


class TestGrammars:
    def test_no_schema_is_any_object_and_nothing_else(self, says):
        assert says({}, '{"a": [1, {"b": null}], "c": "d"}')
        assert says({}, "{}")
        for text in ("[]", "1", '"{}"', "null", "", "{", " {}", "{} "):
            assert not says({}, text), text

    def test_whitespace_in_json_is_limited(self, says):
        value = {"a": [1, {"b": "c"}], "d": True}
        for indent in (None, 4, "\t"):
            assert says({}, json.dumps(value, indent=indent))
        assert says({}, json.dumps(value, separators=(",", ":")))
        for text in ('{"a":  1}', '{"a":\n\n1}', '{"a":\n' + " " * 41 + "1}"):
            assert not says({}, text), text

    @pytest.mark.parametrize("idle", IDLE, ids=json.dumps)
    def test_a_keyword_without_effect_is_not_refused(self, says, sandbox, idle):
        closed = {"properties": {"a": {"type": "array"} | idle}, "additionalProperties": False}
        for schema in ({"type": "object"} | closed | idle, {"anyOf": [closed | idle, False]}):
            assert sandbox._problem(schema_grammar(json.dumps(schema))) is None
            assert sandbox._problem(format_grammar(Format(json.dumps(schema)))) is None
            assert says(schema, '{"a": [1, 1]}')
            assert not says(schema, '{"b": 1}')

    def test_a_property_named_like_a_removed_keyword_stays(self, says):
        named = {"uniqueItems": {"type": "integer"}, "not": {"const": {"uniqueItems": False}}}
        schema = {"type": "object", "properties": named, "additionalProperties": False}
        assert says(schema, '{"uniqueItems": 3, "not": {"uniqueItems": false}}')
        assert not says(schema, '{"uniqueItems": "a"}')
        assert not says(schema, '{"not": {}}')
        for form in ({"enum": [{"uniqueItems": False}]}, {"const": {"uniqueItems": False}}):
            assert says(form, '{"uniqueItems": false}')
            assert not says(form, "{}")

    def test_a_schema_cannot_change_the_layout(self, sandbox):
        loose = {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}
        assert "uniqueItems" in sandbox._problem(schema_grammar(json.dumps(loose)))

    def test_a_schema_cannot_ask_for_invalid_json(self, says):
        schema = {"type": "object", "required": ["a", "b"], "additionalProperties": False}
        schema["properties"] = {"a": {"type": "integer"}, "b": {"type": "integer"}}
        schema["x-guidance"] = {"item_separator": ";", "key_separator": "="}
        assert says(schema, '{"a": 1, "b": 2}')
        assert not says(schema, '{"a"=1;"b"=2}')

    def test_the_end_of_the_sequence_is_left_to_the_engine(self, grammars, tokenizer):
        matcher = grammars.compile(schema_grammar('{"type": "integer"}'))
        digits = set(tokenizer.encode("0123456789", add_special_tokens=False).ids)
        minus = tokenizer.encode("-", add_special_tokens=False).ids[0]
        assert possible(grammars, matcher) == digits | {minus}
        assert not matcher.may_end
        matcher.accept(max(digits))
        assert possible(grammars, matcher) == digits
        assert matcher.may_end
        assert not matcher.must_end
        assert EOS not in digits

    def test_a_copied_matcher_is_independent(self, grammars, tokenizer):
        first = grammars.compile(schema_grammar('{"enum": ["ab", "ac"]}'))
        for token in tokenizer.encode('"a', add_special_tokens=False).ids:
            first.accept(token)
        second = first.copy()
        b, c, quote = tokenizer.encode('bc"', add_special_tokens=False).ids
        assert possible(grammars, first) == {b, c}
        first.accept(b)
        assert possible(grammars, first) == {quote}
        assert possible(grammars, second) == {b, c}
        first.accept(quote)
        assert first.must_end
        assert not second.may_end

    @pytest.mark.parametrize("vocabulary", [256, 264, 320])
    def test_a_models_vocabulary_may_be_smaller_or_larger(self, grammars, vocabulary):
        matcher = grammars.compile(schema_grammar("{}"))
        assert possible(grammars, matcher, vocabulary) == possible(grammars, matcher)

    def test_a_mask_near_a_max_length_takes_no_longer(self, tmp_path):
        size = 60_000
        words = random_vocabulary(size)
        words.save(str(tmp_path / "tokenizer.json"))
        write_config(tmp_path, {"eos_token_id": size - 1})
        grammars = ModelGrammars(tmp_path)

        def took_s(text):
            matcher = grammars.compile(schema_grammar('{"type": "string", "maxLength": 100}'))
            for token in words.encode('"' + text).ids:
                matcher.accept(token)
            rows, bits = [matcher.copy() for _ in range(16)], np.zeros((16, size // 8), np.uint8)
            allowed = possible(grammars, matcher, size)
            assert max(len(words.decode([token])) for token in allowed) == 5
            began_s = time.process_time()
            grammars.fill_bitmasks(rows, bits)
            return time.process_time() - began_s

        free_s, *ending_s = (
            min(took_s("x" * length) for _ in range(3)) for length in (10, 91, 93, 95)
        )
        assert max(ending_s) < 3 * free_s, (free_s, ending_s)

    @pytest.mark.parametrize("schema", FORMS.values(), ids=FORMS)
    def test_a_mask_equals_one_without_slices(self, tmp_path, schema):
        size, dice = 4000, np.random.default_rng(7)
        random_vocabulary(size).save(str(tmp_path / "tokenizer.json"))
        write_config(tmp_path, {"eos_token_id": size - 1})
        grammars, grammar = ModelGrammars(tmp_path), schema_grammar(json.dumps(schema))
        walked = LLTokenizer(str(tmp_path / "tokenizer.json"), eos_token=[size - 1], slices=[])
        ours, theirs = grammars.compile(grammar), LLMatcher(walked, grammar)
        texts = 0
        while not ours.must_end:
            words = np.zeros((1, size // 32), np.int32)
            fill_next_token_bitmask(theirs, words)
            allowed = possible(grammars, ours, size)
            bits = np.unpackbits(words.view(np.uint8)[0], bitorder="little")
            assert allowed == set(np.flatnonzero(bits)) - {size - 1}
            if not allowed:
                break
            texts += len(allowed) > 3000
            token = int(dice.choice(sorted(allowed)))
            ours.accept(token)
            assert theirs.consume_token(token)
        assert texts > 0 or schema is FORMS["enums"]

    def test_errors_do_not_quote_sampled_text(self, grammars, tokenizer):
        matcher = grammars.compile(schema_grammar('{"enum": ["planted secret"]}'))
        for token in tokenizer.encode('"planted s', add_special_tokens=False).ids:
            matcher.accept(token)
        with pytest.raises(InvalidRequest) as refused:
            matcher.accept(5)
        assert "plant" not in str(refused.value)


def chain(links):
    """A schema of few bytes a level, and as many levels as links."""
    defs = {
        f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["x"]}
        for i in range(links)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{links}": {"type": "integer"}}}


def stop(sandbox):
    """Stop the sandbox's process: on a busy machine its threads run on for a while."""
    os.kill(sandbox._process.pid, signal.SIGSTOP)
    process, deadline = psutil.Process(sandbox._process.pid), time.monotonic() + 20
    while any(psutil.Process(thread.id).status() != "stopped" for thread in process.threads()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


class TestRefusals:
    BAD = (
        ({"type": "nope"}, "nope"),
        ({"enum": []}, "no value matches it"),
        ({"not": {"pattern": "a"}}, "what is allowed"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {}, "minContains": 0, "maxContains": 1}, "contains"),
        ({"if": {"pattern": "b"}, "then": {"required": ["c"]}}, "write the cases as anyOf"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        ({"$ref": "#/$defs/none"}, "names no part"),
        ({"pattern": "(a)\\1"}, "references back"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum"),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "use anyOf"),
        ({"properties": {"a": {}}, "minProperties": 2}, "beside optional properties"),
        ({"patternProperties": {"^a": True, "b$": True}}, "exclude each other"),
    )
    EXPLODING = (
        chain(2000),  # more stack than there is
        {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]},  # minutes
        {"type": "string", "pattern": "^(a{1000}){1000}$"},  # hundreds of megabytes
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}},
    )
    CALL = Call("r", Endpoint.CHAT, 0, "acme", "demo", None)

    def refused(self, sandbox, schema, call=CALL):
        with pytest.raises(InvalidInput) as refused:
            asyncio.run(sandbox.check(call, schema_grammar(json.dumps(schema))))
        return refused.value

    @pytest.mark.parametrize(("schema", "reason"), BAD, ids=lambda value: str(value)[:20])
    def test_a_schema_that_cannot_be_followed_is_refused_with_the_reason(
        self, sandbox, schema, reason
    ):
        error = self.refused(sandbox, schema)
        assert error.param == "response_format"
        assert reason in error.message

    @pytest.mark.parametrize("schema", EXPLODING, ids=lambda value: str(value)[:20])
    def test_a_schema_that_costs_too_much_is_refused_and_hurts_nobody(self, sandbox, schema):
        assert "too much time or memory" in self.refused(sandbox, schema).message
        asyncio.run(sandbox.check(self.CALL, schema_grammar(json.dumps(SCHEMAS["nested"]))))

    def test_a_schema_that_cannot_be_followed_beyond_its_first_token_is_refused(self, sandbox):
        form = {"type": "object", "additionalProperties": False}
        form["properties"] = {f"field_{i}": {"type": "string"} for i in range(2000)}
        message = self.refused(sandbox, form).message
        # on a busy machine the limit of time is reached first
        assert "too complex to follow on" in message or "takes too much time" in message

    def test_the_sandbox_works_under_a_hard_memory_limit(self):
        code = (
            "import resource, pathlib\n"
            "from lorikeet.replica.grammar_sandbox import GrammarSandbox\n"
            "resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))\n"
            f"sandbox = GrammarSandbox(pathlib.Path({str(DEMO)!r}))\n"
            "assert sandbox._problem('start: /a/') is None\n"
            "print(resource.prlimit(sandbox._process.pid, resource.RLIMIT_DATA)[1])\n"
            "sandbox.close()"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert int(done.stdout) == 8 << 30

    def test_a_grammar_is_tried_once(self, sandbox):
        bad, good = {"type": "nobody"}, {"type": "integer", "minimum": 77}
        first = self.refused(sandbox, bad).message
        asyncio.run(sandbox.check(self.CALL, schema_grammar(json.dumps(good))))
        impatient = replace(self.CALL, scheduling=SchedulingParams(max_queue_s=5))
        stop(sandbox)  # a second trial would not end
        try:
            assert self.refused(sandbox, bad, impatient).message == first
            asyncio.run(sandbox.check(impatient, schema_grammar(json.dumps(good))))
        finally:
            os.kill(sandbox._process.pid, signal.SIGCONT)

    def test_a_busy_machine_is_not_the_grammars_fault(self, sandbox, monkeypatch):
        asyncio.run(sandbox.check(self.CALL, "start: /c/"))  # starts its process
        with monkeypatch.context() as patch:
            patch.setattr(grammar_sandbox, "_WALL_S", 0.2)
            stop(sandbox)
            with pytest.raises(EngineOverloaded, match="send it again"):
                asyncio.run(sandbox.check(self.CALL, "start: /d/"))
        asyncio.run(sandbox.check(self.CALL, "start: /d/"))

    def test_a_call_does_not_wait_longer_than_it_may(self, sandbox):
        asyncio.run(sandbox.check(self.CALL, "start: /a/"))  # starts its process
        impatient = replace(self.CALL, scheduling=SchedulingParams(max_queue_s=0.05))
        stop(sandbox)
        try:
            with pytest.raises(
                EngineOverloaded, match=r"within the 0\.05 s .* send it again"
            ) as late:
                asyncio.run(sandbox.check(impatient, "start: /b/"))
            assert late.value.fields["retry_after_s"] == 0.05
        finally:
            os.kill(sandbox._process.pid, signal.SIGCONT)
        asyncio.run(sandbox.check(self.CALL, "start: /b/"))

    @pytest.mark.parametrize(("schema", "reason"), BAD, ids=lambda value: str(value)[:20])
    def test_the_reason_does_not_mention_the_grammar_around_a_schema(self, sandbox, schema, reason):
        alone = self.refused(sandbox, schema).message
        with pytest.raises(InvalidInput) as refused:
            asyncio.run(sandbox.check(self.CALL, f"start: a\na: %json {json.dumps(schema)}\n"))
        assert refused.value.message == alone
        assert reason in alone

    def test_a_tools_parameters_are_refused_by_their_name(self, sandbox):
        for tools in (ToolUse((), ("look",)), ToolUse(())):
            call = replace(self.CALL, tools=tools)
            assert self.refused(sandbox, {"type": "nope"}, call).param == "tools"
        call = replace(call, format=Format('{"type": "nope"}'))
        assert self.refused(sandbox, {"type": "nope"}, call).param == "response_format"

    @pytest.mark.parametrize("text", ["nonsense", "[]", "true", "[" * 5000, '{"a":' * 200 + "1"])
    def test_a_text_that_is_no_schema_is_refused(self, text):
        with pytest.raises(InvalidInput) as refused:
            schema_grammar(text)
        assert refused.value.param == "response_format"

    def test_a_schema_that_is_too_long_is_refused(self):
        with pytest.raises(InvalidInput, match="characters"):
            schema_grammar(json.dumps({"enum": ["x" * 300_000]}))


def test_a_replica_answers_in_the_format_that_a_call_asks_for(tmp_path):
    given = {
        "LORIKEET_BASE_MODELS": f"demo={DEMO}",
        "LORIKEET_CATALOG": str(tmp_path / "catalog"),
        "LORIKEET_CACHE_DIR": str(tmp_path / "cache"),
        "LORIKEET_MAX_RUNNING": "4",
        "LORIKEET_MAX_BATCH_TOKENS": "64",
    }
    asked = Call(
        request_id="r",
        endpoint=Endpoint.CHAT,
        created=0,
        tenant="acme",
        model="demo",
        adapter=None,
        messages=({"role": "user", "content": "Tell me about it."},),
        max_tokens=600,
        sampling=SamplingParams(seed=4),
        format=Format(json.dumps(SCHEMAS["nested"])),
    )

    async def inside():
        replica = Replica("r0", "demo", Settings.from_env(given))
        try:
            bad = replace(asked, request_id="bad", format=Format('{"type": "nope"}'))
            return [[i async for i in answer_of(replica, call)] for call in (asked, bad)]
        finally:
            replica.close()

    answer, refusal = asyncio.run(inside())
    body = json.loads(b"".join(item for item in answer if isinstance(item, bytes)))
    content = json.loads(body["choices"][0]["message"]["content"])
    jsonschema.validate(content, SCHEMAS["nested"])
    assert isinstance(refusal[-1], Refusal)
    assert (refusal[-1].code, refusal[-1].param) == ("invalid_value", "response_format")
