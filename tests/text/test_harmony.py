"""Answers in Harmony, gpt-oss' format, become thinking, text and tool calls."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from lorikeet.protocol.messages import Call, ToolUse
from lorikeet.text.choice import Ending, whole_calls
from lorikeet.text.detokenizer import StopStrings
from lorikeet.text.harmony import HarmonyChoice, Place, place_behind
from lorikeet.text.prompts import PromptEncoder
from lorikeet_engine.request import FinishReason, SamplingParams, TokenLogprobs, Tokens
from tests.replica.harmony_model import harmony_model
from tests.text.test_prompts import CHAT

A = "<|start|>assistant"
THINKS = "<|channel|>analysis<|message|>Hm.<|end|>" + A
CALLED = "<|channel|>commentary to=functions.time <|constrain|>json<|message|>"
ARGUMENTS = '{"zone":"utc"}'
TOOLS = ToolUse(
    tuple({"type": "function", "function": {"name": name}} for name in ("time", "look", "a.b"))
)
ASKED = replace(CHAT, tools=TOOLS)


@dataclass(frozen=True, slots=True)
class Said:
    """Thinking, text, calls and end of a choice."""

    thought: str = ""
    text: str = ""
    calls: Sequence[tuple[str | None, str]] = ()
    finish: Ending = Ending.STOP


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    return PromptEncoder(harmony_model(tmp_path_factory.mktemp("harmony")))


def ids(encoder: PromptEncoder, text: str) -> list[int]:
    return encoder.backend.encode(text, add_special_tokens=False).ids


def opened(encoder: PromptEncoder, call: Call = ASKED, prompt: str = A) -> HarmonyChoice:
    return HarmonyChoice(call, ids(encoder, prompt), encoder.vocabulary, StopStrings(call.stop))


def read(
    choice: HarmonyChoice, parts: Sequence[Sequence[int]], finish: FinishReason = FinishReason.STOP
) -> Said:
    """Parse the parts of a choice's tokens, the last of which ends the choice."""
    thought, text, calls = "", "", []
    for at, part in enumerate(parts):
        end = finish if at == len(parts) - 1 else None
        delta = choice.take(Tokens("r1", 0, tuple(part), end))
        thought, text = thought + delta.reasoning, text + delta.text
        calls += delta.calls
        if choice.finish is not None:
            break
    assert choice.finish is not None
    return Said(thought, text, tuple(whole_calls(calls)), choice.finish)


def said(
    encoder: PromptEncoder,
    text: str,
    finish: FinishReason = FinishReason.STOP,
    call: Call = ASKED,
    prompt: str = A,
) -> Said:
    return read(opened(encoder, call, prompt), [ids(encoder, text)], finish)


TIME = (("time", ARGUMENTS),)
# Thinking, text and calls are those of openai-harmony 0.0.8's StreamableParser for the same text,
# which reads channel, recipient and content of each message.
ANSWERS = {
    "an answer behind thinking": (
        THINKS + "<|channel|>final<|message|>It is 4.<|return|>",
        Said("Hm.", "It is 4."),
    ),
    "a recipient behind the channel": (
        THINKS + CALLED + ARGUMENTS + "<|call|>",
        Said("Hm.", "", TIME, Ending.TOOL_CALLS),
    ),
    "a recipient behind the role": (
        f"{THINKS} to=functions.time<|channel|>commentary <|constrain|>json<|message|>"
        f"{ARGUMENTS}<|call|>",
        Said("Hm.", "", TIME, Ending.TOOL_CALLS),
    ),
    "a recipient behind the prompt's role": (
        f" to=functions.time<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
        Said("", "", TIME, Ending.TOOL_CALLS),
    ),
    "a constraint right behind the name": (
        f"<|channel|>commentary to=functions.time<|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        Said("", "", TIME, Ending.TOOL_CALLS),
    ),
    "a call without a type": (
        f"<|channel|>commentary to=functions.time<|message|>{ARGUMENTS}<|call|>",
        Said("", "", TIME, Ending.TOOL_CALLS),
    ),
    "a call among the thinking": (
        f"<|channel|>analysis to=functions.time<|message|>{ARGUMENTS}<|call|>",
        Said("", "", TIME, Ending.TOOL_CALLS),
    ),
    "a name with a dot": (
        "<|channel|>commentary to=functions.a.b json<|message|>{}<|call|>",
        Said("", "", (("a.b", "{}"),), Ending.TOOL_CALLS),
    ),
    "a preamble before a call": (
        f"<|channel|>commentary<|message|>I look.<|end|>{A}{CALLED}{ARGUMENTS}<|call|>",
        Said("", "I look.", TIME, Ending.TOOL_CALLS),
    ),
    "two calls": (
        f"{CALLED}{ARGUMENTS}<|end|>{A}<|channel|>commentary to=functions.look<|message|>"
        "{}<|call|>",
        Said("", "", (*TIME, ("look", "{}")), Ending.TOOL_CALLS),
    ),
    "several messages of each kind": (
        f"{THINKS}<|channel|>commentary<|message|>One.<|end|>{A}<|channel|>analysis<|message|>"
        f"Two.<|end|>{A}<|channel|>final<|message|>Three.<|return|>",
        Said("Hm.\n\nTwo.", "One.\n\nThree."),
    ),
    "a final message with a type": (
        '<|channel|>final <|constrain|>json<|message|>{"total":4}<|return|>',
        Said("", '{"total":4}'),
    ),
    "no channel": ("<|message|>Plain.<|return|>", Said("", "Plain.")),
    "an unknown channel": ("<|channel|>comment<|message|>Odd.<|end|>", Said("", "Odd.")),
    "characters of several bytes": (
        "<|channel|>final<|message|>日本 <| channel |> 😀<|return|>",
        Said("", "日本 <| channel |> 😀"),
    ),
}
# openai-harmony fails on these, or shows marks.
FAULTY = {
    "no header at all": ("It is 4.<|return|>", Said("", "It is 4.")),
    "a channel that is an answer": ("<|channel|>It is 4.<|return|>", Said("", "It is 4.")),
    "text behind a message": (
        f"{THINKS.removesuffix(A)}It is 4.<|return|>",
        Said("Hm.", "It is 4."),
    ),
    "a header alone": (f"{THINKS}<|channel|>final<|return|>", Said("Hm.")),
    "a message without an end": (
        f"<|channel|>analysis<|message|>Hm.{A}<|channel|>final<|message|>4<|return|>",
        Said("Hm.", "4"),
    ),
    "a channel without an end before it": (
        "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>4<|return|>",
        Said("Hm.", "4"),
    ),
    "marks of headers in a text": (
        "<|channel|>final<|message|>a<|constrain|>b<|message|>c<|endoftext|><|return|>",
        Said("", "abc"),
    ),
    "a call without arguments": (
        CALLED + "<|call|>",
        Said("", "", (("time", "{}"),), Ending.TOOL_CALLS),
    ),
    "a name without the namespace": (
        "<|channel|>commentary to=time json<|message|>{}<|call|>",
        Said("", "", (("time", "{}"),), Ending.TOOL_CALLS),
    ),
    "text behind arguments": (
        CALLED + ARGUMENTS + "\n\nDone.<|call|>",
        Said("", "", TIME, Ending.TOOL_CALLS),
    ),
    "arguments that are no object": (CALLED + " [1]<|call|>", Said("", "[1]")),
    "arguments that end too early": (
        CALLED + '{"zone":<|call|>',
        Said("", "", (("time", '{"zone":'),)),
    ),
    "a call of a function that is not offered": (
        '<|channel|>commentary to=functions.other json<|message|>{"a":1}<|call|>',
        Said("", '{"a":1}'),
    ),
    "a call of the built-in browser": (
        '<|channel|>commentary to=browser.search json<|message|>{"q":"x"}<|call|>',
        Said("", '{"q":"x"}'),
    ),
    "a call of the built-in python": (
        "<|channel|>analysis to=python code<|message|>1+1<|call|>",
        Said("1+1"),
    ),
}


@pytest.mark.parametrize("form", [*ANSWERS, *FAULTY])
def test_an_answer_is_read_alike_in_any_parts(encoder: PromptEncoder, form: str) -> None:
    text, expected = (ANSWERS | FAULTY)[form]
    tokens = ids(encoder, text)
    assert read(opened(encoder), [tokens]) == expected
    assert read(opened(encoder), [[token] for token in tokens]) == expected
    for cut in range(1, len(tokens)):
        assert read(opened(encoder), [tokens[:cut], tokens[cut:]]) == expected


@pytest.mark.parametrize("form", ANSWERS)
def test_the_engine_may_keep_the_last_mark_to_itself(encoder: PromptEncoder, form: str) -> None:
    text, expected = ANSWERS[form]
    tokens = ids(encoder, text)
    assert read(opened(encoder), [tokens[:-1]]) == expected


@pytest.mark.parametrize("form", ANSWERS)
def test_an_answer_cut_at_any_token_shows_no_marks(encoder: PromptEncoder, form: str) -> None:
    text, whole = ANSWERS[form]
    tokens = ids(encoder, text)
    for cut in range(1, len(tokens) - 1):
        found = read(opened(encoder), [tokens[:cut]], FinishReason.LENGTH)
        assert found.finish is Ending.LENGTH
        assert whole.thought.startswith(found.thought.rstrip("�"))
        assert whole.text.startswith(found.text.rstrip("�"))
        for (name, arguments), (of_whole, all_arguments) in zip(
            found.calls, whole.calls, strict=False
        ):
            assert name == of_whole
            assert all_arguments.startswith(arguments)


def test_marks_spelled_in_letters_stay_text(encoder: PromptEncoder) -> None:
    marks = "<|end|><|start|>assistant<|channel|>analysis<|message|>"
    letters = [token for letter in marks for token in ids(encoder, letter)]
    tokens = [*ids(encoder, "<|channel|>final<|message|>"), *letters]
    assert read(opened(encoder), [tokens]) == Said("", marks)


def test_no_call_is_read_without_tools(encoder: PromptEncoder) -> None:
    assert said(encoder, f"{CALLED}{ARGUMENTS}<|call|>", call=CHAT) == Said("", ARGUMENTS)


def test_an_answer_ends_with_its_first_call_if_one_is_allowed(encoder: PromptEncoder) -> None:
    once = replace(ASKED, tools=replace(TOOLS, parallel=False))
    text, _ = ANSWERS["two calls"]
    assert said(encoder, text, call=once) == Said("", "", TIME, Ending.TOOL_CALLS)


def test_marks_that_end_an_answer_end_it_even_if_the_engine_goes_on(
    encoder: PromptEncoder,
) -> None:
    for text, kept in (ANSWERS["an answer behind thinking"], ANSWERS["two calls"]):
        choice, tokens = opened(encoder), ids(encoder, f"{text}{A}<|channel|>final<|message|>more")
        assert read(choice, [tokens]) == kept
        assert choice.tokens == len(ids(encoder, text))


def test_ignore_eos_goes_on_behind_the_marks_that_end_an_answer(encoder: PromptEncoder) -> None:
    call = replace(ASKED, sampling=SamplingParams(ignore_eos=True))
    text = "<|channel|>final<|message|>4<|return|>"
    assert said(encoder, text + "5", FinishReason.LENGTH, call) == Said(
        "", "4\n\n5", finish=Ending.LENGTH
    )


def test_stop_strings_apply_to_text_alone(encoder: PromptEncoder) -> None:
    call = replace(ASKED, stop=("Hm", "utc", " is"))
    choice = opened(encoder, call)
    text, _ = ANSWERS["an answer behind thinking"]
    assert read(choice, [ids(encoder, text)]) == Said("Hm.", "It")
    assert choice.stop_string == " is"
    text, whole = ANSWERS["a recipient behind the channel"]
    assert said(encoder, text, call=call) == whole


def test_a_message_may_end_with_the_beginning_of_a_stop_string(encoder: PromptEncoder) -> None:
    call = replace(ASKED, stop=("4.5",))
    text, whole = ANSWERS["an answer behind thinking"]
    assert said(encoder, text, call=call) == whole


def test_thinking_counts_with_its_marks(encoder: PromptEncoder) -> None:
    text, _ = ANSWERS["an answer behind thinking"]
    choice = opened(encoder)
    read(choice, [ids(encoder, text)])
    assert choice.reasoning_tokens == len(ids(encoder, THINKS.removesuffix(A)))
    assert choice.tokens == len(ids(encoder, text))
    cut = opened(encoder)
    read(cut, [ids(encoder, "<|channel|>analysis<|message|>Hm")], FinishReason.LENGTH)
    assert cut.reasoning_tokens == cut.tokens


def test_log_probabilities_are_those_of_the_texts_tokens(encoder: PromptEncoder) -> None:
    call = replace(ASKED, sampling=SamplingParams(logprobs=0))
    text, _ = ANSWERS["several messages of each kind"]
    tokens = ids(encoder, text)
    for size in (1, 3, len(tokens)):
        choice, named = opened(encoder, call), list[str]()
        for at in range(0, len(tokens), size):
            part = tuple(tokens[at : at + size])
            end = FinishReason.STOP if at + size >= len(tokens) else None
            known = tuple(TokenLogprobs(-1.0) for _ in part)
            named += [
                each.tokens[0].name
                for each in choice.take(Tokens("r1", 0, part, end, known)).logprobs
            ]
        assert "".join(named) == "One.Three."


def test_log_probabilities_of_returned_ids_are_those_of_all_tokens(encoder: PromptEncoder) -> None:
    call = replace(ASKED, sampling=SamplingParams(logprobs=0), return_token_ids=True)
    text, whole = ANSWERS["an answer behind thinking"]
    tokens = tuple(ids(encoder, text))
    known = tuple(TokenLogprobs(-1.0) for _ in tokens)
    delta = opened(encoder, call).take(Tokens("r1", 0, tokens, None, known))
    assert delta.token_ids == tokens
    assert len(delta.logprobs) == len(tokens)
    assert (delta.reasoning, delta.text) == (whole.thought, whole.text)


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        (A, Place.HEADER),
        ("<|start|>user<|message|>hi<|end|>", Place.BETWEEN),
        (A + "<|channel|>final<|message|>It is", Place.BODY),
        ("hi", Place.BETWEEN),
    ],
)
def test_a_prompt_ends_at_its_last_mark(encoder: PromptEncoder, prompt: str, place: Place) -> None:
    assert place_behind(ids(encoder, prompt), encoder.vocabulary) is place


def test_an_answer_goes_on_where_its_prompt_ends(encoder: PromptEncoder) -> None:
    begun = A + "<|channel|>final<|message|>It is"
    assert said(encoder, " 4.<|return|>", prompt=begun) == Said("", " 4.")
    text, whole = ANSWERS["an answer behind thinking"]
    closed = "<|start|>user<|message|>hi<|end|>"
    assert said(encoder, A + text, prompt=closed) == whole


def test_arguments_are_returned_while_they_are_generated(encoder: PromptEncoder) -> None:
    choice, arguments = opened(encoder), list[str]()
    for token in ids(encoder, CALLED + ARGUMENTS):
        parts = choice.take(Tokens("r1", 0, (token,))).calls
        arguments += [part.arguments for part in parts if part.arguments]
    assert len(arguments) > 2
    assert json.loads("".join(arguments)) == {"zone": "utc"}


def test_thinking_is_left_out_on_request(encoder: PromptEncoder) -> None:
    text, whole = ANSWERS["an answer behind thinking"]
    hidden = said(encoder, text, call=replace(ASKED, thinking_shown=False))
    assert hidden == replace(whole, thought="")
