"""A replica that goes on with another's answer sends exactly the bytes that are missing."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from tokenizers import Tokenizer

from lorikeet.apis.answer import Answer
from lorikeet.protocol.messages import (
    AnswerHeader,
    Call,
    Endpoint,
    FinalUsage,
    RunningUsage,
    StreamItem,
    Thinking,
)
from lorikeet.protocol.response_stream import logged, outputs_of, tokens_in
from lorikeet.replica.answer_sender import AnswerSender
from lorikeet.text.detokenizer import Vocabulary
from lorikeet.text.prompt_echoes import PromptEchoes
from lorikeet.text.prompts import PromptEncoder
from lorikeet.text.tools.syntax import GEMMA_4, HARMONY, HERMES, QWEN_XML, ToolSyntax
from lorikeet_engine.request import (
    EngineTimings,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
    Tokens,
)
from tests.replica.harmony_model import harmony_model
from tests.text.test_harmony import THINKS, TOOLS
from tests.text.test_tool_calls import BOTH, USE, WRITTEN, forced

CALL = Call("r", Endpoint.CHAT, 7, "acme", "tiny", None, stream=True, include_usage=True)
HEADER = AnswerHeader("r0", None, None)
CACHED, CACHED_ELSEWHERE = 2, 3
PROMPT = [1, 2, 3, 4]
TEXT = "Héy ☕ — stops do not, then “done” and more"


@dataclass(frozen=True)
class Case:
    """A call, and the texts of its choices as the engine samples them."""

    call: Call
    texts: Sequence[str]
    syntax: ToolSyntax | None = None
    thinking: Thinking = Thinking.NEVER
    finish: FinishReason = FinishReason.STOP
    checked: bool = False
    echoes: PromptEchoes = field(default_factory=PromptEchoes)


def everywhere(**fields: object) -> Iterator[Call]:
    """Yield a call of each API, with and without a stream."""
    for endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.MESSAGES):
        for stream in (True, False):
            yield replace(CALL, endpoint=endpoint, stream=stream, **fields)


def cases() -> Iterator[Case]:
    with_logprobs = SamplingParams(logprobs=2)
    for call in everywhere():
        yield Case(call, [TEXT])
        yield Case(replace(call, stop=("done", "stopper")), [TEXT])
        yield Case(call, [f"<think>Hm, {TEXT}</think>\n\n{TEXT}"], thinking=Thinking.POSSIBLE)
        yield Case(call, [f"Hm, {TEXT}</think>{TEXT}"], thinking=Thinking.BEGUN)
        yield Case(call, ['{"a": 1}'], checked=True)
        if call.endpoint is not Endpoint.MESSAGES:
            sampled = replace(call, sampling=with_logprobs)
            yield Case(sampled, [TEXT], finish=FinishReason.LENGTH)
            yield Case(replace(sampled, stop=("done", "stopper")), [TEXT])
        if call.endpoint is not Endpoint.COMPLETIONS:
            for name in ("hermes", "ministral", "gemma 4", "qwen's xml", "a list in Python"):
                syntax, text = WRITTEN[name]
                yield Case(replace(call, tools=USE), [text], syntax)
            for syntax in (HERMES, QWEN_XML, GEMMA_4):
                forced_use = replace(USE, forced=("weather", "time"))
                yield Case(replace(call, tools=forced_use), [forced(syntax, *BOTH)], syntax)
            one = replace(USE, parallel=False)
            yield Case(replace(call, tools=one), [WRITTEN["hermes"][1]], HERMES)
        if call.endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS):
            many = replace(call, n=3, stop=("done",), continuous_usage=call.stream)
            yield Case(many, [TEXT, "short", TEXT[::-1]])
            told = replace(many, return_token_ids=True, sampling=with_logprobs)
            yield Case(told, [TEXT, "short", ""], echoes=PromptEchoes(token_ids=(b"[1,2,3,4]",)))
    echo = replace(CALL, endpoint=Endpoint.COMPLETIONS, echo=True, sampling=with_logprobs)
    yield Case(echo, [TEXT], echoes=PromptEchoes(texts=("once ",)))
    hidden = replace(CALL, thinking_shown=False)
    yield Case(hidden, [f"Hm, {TEXT * 4}</think>{TEXT}"], thinking=Thinking.BEGUN)


class Puts:
    """Stream that keeps all items and the log of each put."""

    def __init__(self) -> None:
        self.puts: list[tuple[list[StreamItem], bytes, bool]] = []

    def put(
        self, request_id: str, items: Sequence[StreamItem], log: bytes = b"", *, ended: bool = False
    ) -> None:
        assert request_id == "r-1"
        self.puts.append((list(items), log, ended))


class Sent:
    """Answer of one replica to a case's call."""

    def __init__(self, case: Case, vocabulary: Vocabulary) -> None:
        call, self.stream = case.call, Puts()
        known = (case.syntax, case.thinking, case.echoes)
        self.answer = Answer(call, [PROMPT], vocabulary, *known, checked=case.checked)
        stream, abort = self.stream, lambda *_: None
        self.sender = AnswerSender(call, "r-1", self.answer, [PROMPT], stream, abort)  # type: ignore[arg-type]

    def replay(self, log: bytes) -> list[int | None]:
        """Return the number of tokens of each choice; None for a choice that has ended."""
        made = [0 for _ in self.answer.unended]
        for output in outputs_of(log, "r-1"):
            self.sender.replay(output)
            made[output.choice] += len(output.token_ids)
        return [n if open_ else None for n, open_ in zip(made, self.answer.unended, strict=True)]

    def go_on(self, outputs: Sequence[Tokens]) -> None:
        self.sender.begin(HEADER)
        for output in outputs:
            self.sender.take(output)
        if self.answer.awaits_checks:
            self.sender.end(())

    def bytes_of(self, puts: int | None = None) -> bytes:
        items = [item for some, _, _ in self.stream.puts[:puts] for item in some]
        return b"".join(item for item in items if isinstance(item, bytes))

    @property
    def usage(self) -> FinalUsage:
        items = [item for some, _, _ in self.stream.puts for item in some]
        (usage,) = [item for item in items if isinstance(item, FinalUsage)]
        return replace(usage, timings=())


def outputs(case: Case, ids: Sequence[Sequence[int]], seed: int) -> list[Tokens]:
    """Return what an engine outputs: some tokens of some choice at a time."""
    rng, made = Random(seed), list[Tokens]()
    left = [list(some) for some in ids]
    wants = case.call.sampling.logprobs is not None
    while any(some is not None for some in left):
        choice = rng.choice([i for i, some in enumerate(left) if some is not None])
        count = 1 if wants else rng.choice((1, 1, 1, 2, 3))
        now, left[choice] = tuple(left[choice][:count]), left[choice][count:]
        finish = None if left[choice] else case.finish
        of = (
            tuple(TokenLogprobs(-0.5 - t, ((t, -0.5 - t), (1, -9.0))) for t in now) if wants else ()
        )
        is_first = not any(output.choice == choice for output in made)
        timings = EngineTimings(cached_tokens=CACHED) if is_first or finish else None
        made.append(Tokens("r-1", choice, now, finish, of, timings))
        if finish:
            left[choice] = None  # type: ignore[call-overload]
    return made


def rest_of(every: Sequence[Tokens], made: Sequence[int | None]) -> list[Tokens]:
    """Return the outputs of another engine, which goes on after `made` tokens of each choice."""
    rest, left = list[Tokens](), list(made)
    for output in every:
        of = left[output.choice]
        if of is None:
            continue
        if of >= len(output.token_ids) and not (output.finish and of == 0):
            left[output.choice] = of - len(output.token_ids)
            assert output.finish is None
            continue
        assert of == 0, "a log has whole outputs"
        is_first = not any(each.choice == output.choice for each in rest)
        cached = CACHED_ELSEWHERE if made[output.choice] else CACHED
        timings = EngineTimings(cached_tokens=cached) if is_first else output.timings
        rest.append(replace(output, timings=timings))
    return rest


def assert_every_cut_is_mended(case: Case, vocabulary: Vocabulary, ids: list[list[int]]) -> None:
    async def scenario() -> None:
        for seed in range(2):
            every = outputs(case, ids, seed)
            whole = Sent(case, vocabulary)
            whole.go_on(every)
            expected, puts = whole.bytes_of(), whole.stream.puts
            assert whole.usage.cached_tokens == CACHED
            assert puts[-1][2]
            begun = next(at for at, (_, log, _) in enumerate(puts, 1) if log)
            for cut in range(begun, len(puts)):
                log = b"".join(log for _, log, _ in puts[:cut])
                second = Sent(case, vocabulary)
                second.go_on(rest_of(every, second.replay(log)))
                got = whole.bytes_of(cut) + second.bytes_of()
                assert got == expected, cut
                assert second.usage == whole.usage
                again = cut + (len(puts) - cut) // 2  # the second is lost too
                more = b"".join(log for _, log, _ in second.stream.puts[: again - cut])
                third = Sent(case, vocabulary)
                third.go_on(rest_of(every, third.replay(log + more)))
                sent = whole.bytes_of(cut) + second.bytes_of(again - cut) + third.bytes_of()
                assert sent == expected, (cut, again)

    asyncio.run(scenario())


CASES = list(cases())


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{n}-{c.call.endpoint.name}" for n, c in enumerate(CASES)]
)
def test_another_replica_sends_exactly_the_missing_bytes(tokenizer: Tokenizer, case: Case) -> None:
    ids = [list(tokenizer.encode(text).ids) for text in case.texts]
    assert_every_cut_is_mended(case, Vocabulary(tokenizer), ids)


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    return PromptEncoder(harmony_model(tmp_path_factory.mktemp("harmony")))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_another_replica_goes_on_in_harmonys_messages(
    harmony: PromptEncoder, endpoint: Endpoint, stream: bool, logprobs: int | None
) -> None:
    sampling = SamplingParams(logprobs=None if endpoint is Endpoint.MESSAGES else logprobs)
    call = replace(CALL, endpoint=endpoint, stream=stream, tools=TOOLS, sampling=sampling)
    said = (
        f"{THINKS}<|channel|>final<|message|>{TEXT}<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.time <|constrain|>json<|message|>{"zone":"utc"}<|call|>'
    )
    text = said.removeprefix("<|start|>assistant")
    ids = harmony.backend.encode(text, add_special_tokens=False).ids
    assert_every_cut_is_mended(Case(call, [""], HARMONY), harmony.vocabulary, [ids])


def test_a_log_has_the_outputs_as_they_came() -> None:
    scored = (TokenLogprobs(-1.5, ((7, -1.5), (8, -2.0))), TokenLogprobs(-0.1))
    made = [
        Tokens("r", 0, (1, 2), None, scored, EngineTimings(1.0, cached_tokens=5)),
        Tokens("r", 3, (), FinishReason.LENGTH),
        Tokens("r", 1, (300_000, 7)),
    ]
    log = b"".join(map(logged, made))
    assert list(outputs_of(log, "r")) == made
    assert next(outputs_of(log, "r")).timings == EngineTimings(cached_tokens=5)
    assert tokens_in(log) == 4
    assert len(logged(made[2])) < 32


def test_ids_of_tool_calls_differ_between_requests_and_calls(tokenizer: Tokenizer) -> None:
    ids = set[str]()
    for request_id in ("r", "s"):
        case = Case(replace(CALL, request_id=request_id, tools=USE, stream=False), [])
        answer = Answer(case.call, [PROMPT], Vocabulary(tokenizer), HERMES)
        written = tuple(tokenizer.encode(WRITTEN["hermes"][1]).ids)
        body = json.loads(answer.take([Tokens("r-1", 0, written, FinishReason.STOP)])[-1])  # type: ignore[arg-type]
        ids |= {call["id"] for call in body["choices"][0]["message"]["tool_calls"]}
    assert len(ids) == 4
    assert {len(each) for each in ids} == {9}


def test_the_log_of_an_answer_without_a_stream_comes_with_its_running_usage(
    tokenizer: Tokenizer,
) -> None:
    async def scenario() -> None:
        sent = Sent(Case(replace(CALL, stream=False), []), Vocabulary(tokenizer))
        sent.go_on([Tokens("r-1", 0, (5,)) for _ in range(40)])
        told = [(items, log) for items, log, _ in sent.stream.puts if log]
        assert [items for items, _ in told] == (
            [[RunningUsage(made, len(PROMPT))] for made in (1, 17, 33)]
        )
        assert [tokens_in(log) for _, log in told] == [1, 16, 16]

    asyncio.run(scenario())
