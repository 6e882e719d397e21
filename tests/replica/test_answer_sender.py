"""One call's outputs become delta groups; an exception of our code ends only that call."""

import asyncio
import json
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from lorikeet.apis.answer import Answer
from lorikeet.protocol.messages import (
    AnswerHeader,
    Call,
    Endpoint,
    FinalUsage,
    Refusal,
    RunningUsage,
)
from lorikeet.protocol.response_stream import ResponseStream
from lorikeet.replica.answer_sender import AnswerSender
from lorikeet.text.detokenizer import Vocabulary
from lorikeet_engine.errors import StepFailed
from lorikeet_engine.request import (
    EngineTimings,
    Failed,
    FinishReason,
    PromptLogprobs,
    SamplingParams,
    TokenLogprobs,
    Tokens,
)

CALL = Call("r", Endpoint.COMPLETIONS, 0, "acme", "tiny", None, prompts=("x",), stream=True)
HEADER = AnswerHeader("r0", None, None)
A, B, C = ord("a") - 32, ord("b") - 32, ord("c") - 32


class Started:
    """An answer on its way, and what would be heard of it."""

    def __init__(self, tokenizer: Tokenizer, call: Call = CALL) -> None:
        self.stream, self.aborted = ResponseStream(), list[tuple[str, int]]()
        answer = Answer(call, [[1]], Vocabulary(tokenizer))
        self.sender = AnswerSender(
            call, "r", answer, [[1]], self.stream, lambda *what: self.aborted.append(what)
        )

    async def heard(self) -> tuple[list[object], bool]:
        ((request_id, items, _, ended),) = await self.stream.take()
        assert request_id == "r"
        return list(items), ended


def token(token_id: int, finish: FinishReason | None = None, load_s: float = 0.25) -> Tokens:
    return Tokens("r", 0, (token_id,), finish, timings=EngineTimings(load_s=load_s))


def test_outputs_before_the_header_are_sent_after_it(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        one = Started(tokenizer)
        one.sender.take(token(A))
        one.sender.begin(HEADER)
        one.sender.take(token(B, FinishReason.LENGTH))
        (first, second, running, begun, usage, end), ended = await one.heard()
        assert running == RunningUsage(1, 1, 0)
        assert first == HEADER
        assert isinstance(second, AnswerHeader)
        assert second.load_s == 0.25
        assert isinstance(begun, bytes)
        assert isinstance(usage, FinalUsage)
        assert isinstance(end, bytes)
        assert end.endswith(b"data: [DONE]\n\n")
        assert ended
        await one.sender.ended
        one.sender.take(token(C))  # made before the engine heard of the end
        assert not one.stream._waiting

    asyncio.run(scenario())


def test_a_stop_string_aborts_the_choice_that_the_engine_goes_on_with(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        one = Started(tokenizer, replace(CALL, stop=("b",)))
        one.sender.begin(HEADER)
        for token_id in (A, B, C):
            one.sender.take(token(token_id))
        await one.sender.ended
        assert one.aborted == [("r", 0)]

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_running_usage_is_sent_every_few_dozen_tokens(tokenizer: Tokenizer, stream: bool) -> None:
    async def scenario() -> None:
        one = Started(tokenizer, replace(CALL, stream=stream))
        one.sender.begin(HEADER)
        for _ in range(60):
            one.sender.take(token(A))
        items, ended = await one.heard()
        told = [item for item in items if isinstance(item, RunningUsage)]
        assert told == [RunningUsage(made, 1, 0) for made in (1, 17, 33, 49)]
        assert any(isinstance(item, bytes) for item in items) is stream
        assert not ended

    asyncio.run(scenario())


def test_running_usage_leaves_out_the_token_of_a_call_for_no_tokens(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        one = Started(tokenizer, replace(CALL, max_tokens=0))
        one.sender.begin(HEADER)
        await one.heard()
        one.sender.take(token(A, FinishReason.LENGTH))
        used = [
            item for item in (await one.heard())[0] if isinstance(item, RunningUsage | FinalUsage)
        ]
        assert [(each.prompt_tokens, each.completion_tokens) for each in used] == [(1, 0), (1, 0)]

    asyncio.run(scenario())


def test_a_failed_request_ends_with_its_refusal(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        one = Started(tokenizer)
        one.sender.begin(HEADER)
        one.sender.take(Failed("r", StepFailed("the step of this request failed")))
        (_, refusal), ended = await one.heard()
        assert isinstance(refusal, Refusal)
        assert ended

    asyncio.run(scenario())


def test_an_exception_of_our_code_fails_only_its_own_answer(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        one = Started(tokenizer)
        one.sender.begin(HEADER)
        monkeypatch.setattr(Answer, "take", lambda *_: 1 / 0)
        one.sender.take(token(A))
        with pytest.raises(ZeroDivisionError):
            await one.stream.wait_for(one.sender.ended)

    asyncio.run(scenario())


def test_prompt_logprobs_yield_to_the_event_loop_and_keep_their_order(
    tokenizer: Tokenizer,
) -> None:
    async def scenario() -> None:
        sampling, prompt = SamplingParams(prompt_logprobs=1), [A] * 1001
        call = replace(CALL, stream=False, sampling=sampling, prompt_logprobs=1, prompts=("x",))
        answer = Answer(call, [prompt], Vocabulary(tokenizer))
        stream = ResponseStream()
        sender = AnswerSender(call, "r", answer, [prompt], stream, lambda *_: None)
        scored = tuple(TokenLogprobs(-float(at), ((B, -0.5),), 2) for at in range(1, 1001))
        sender.begin(HEADER)
        sender.take(PromptLogprobs("r", 0, scored))
        sender.take(token(A, FinishReason.LENGTH))
        turns = 0
        while not sender.ended.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 5
        items = [item for item in (await stream.take())[0][1] if isinstance(item, bytes)]
        (choice,) = json.loads(b"".join(items))["choices"]
        told = [each[str(A)]["logprob"] for each in choice["prompt_logprobs"][1:]]
        assert told == [-float(at) for at in range(1, 1001)]

    asyncio.run(scenario())
