"""A replica with a scripted model. Templates, grammars and answers are real."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from lorikeet.apis.answer import Answer
from lorikeet.errors import InvalidInput
from lorikeet.protocol.messages import AnswerHeader, Call, Refusal
from lorikeet.replica.grammar_matcher import ModelGrammars
from lorikeet.replica.request_builder import prepare_call
from lorikeet.text.choice import SaidChoice, SchemaCheck
from lorikeet.text.grammars.schema_check import broken_keyword
from lorikeet.text.grammars.schema_faults import AnswerSchema
from lorikeet.text.prompts import PromptEncoder, encode_call
from lorikeet_engine.request import FinishReason, PromptLogprobs, TokenLogprobs, Tokens
from tests.gateway.conftest import Items

DEMO = Path("demo/model")


@dataclass(frozen=True)
class Script:
    """Replay of calls that a gateway encodes for the same base model."""

    replay: Callable[[Call], Items]
    encoder: PromptEncoder
    max_context: int

    def __call__(self, call: Call) -> Items:
        return self.replay(call)


class ScriptedReplica:
    """Replica with the demo's tokenizer, and its chat template or another, or with those of a model
    folder.

    prompts: rendered prompts.
    """

    def __init__(
        self,
        folder: Path,
        template: str | None = None,
        max_context: int = 4096,
        model: Path | None = None,
        marks: Sequence[str] = (),
    ) -> None:
        """marks: special tokens to add to the demo's tokenizer."""
        if model is None:
            model = folder / "model"
            model.mkdir()
            for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(DEMO / name, model / name)
            tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
            tokenizer.add_special_tokens(list(marks))
            tokenizer.save(str(model / "tokenizer.json"))
        if template is not None:
            (model / "chat_template.jinja").write_text(template)
        self.max_context = max_context
        self.encoder = PromptEncoder(model)
        self.grammars = ModelGrammars(model)
        self.prompts: list[str] = []

    def writes(
        self, text: str, finish: FinishReason = FinishReason.STOP
    ) -> Callable[[Call], Items]:
        """Answer every call with this text, which the call's grammar has to allow."""
        return self.plays(lambda _: text, finish)

    def plays(
        self, turn: Callable[[Call], str], finish: FinishReason = FinishReason.STOP
    ) -> Callable[[Call], Items]:
        """Answer each call with the text that `turn` returns, which its grammar has to allow."""

        async def replay(call: Call) -> Items:
            encoder = self.encoder
            try:
                encoded = encode_call(call, encoder, self.max_context)
                prepared = prepare_call(encoded, encoder, self.max_context)
            except InvalidInput as error:
                yield Refusal(error.code, error.message, error.param)
                return
            prompts, grammar = prepared.request.prompts, prepared.request.sampling.grammar
            decode = encoder.backend.decode
            self.prompts = [decode(list(ids), skip_special_tokens=False) for ids in prompts]
            tokens = encoder.backend.encode(turn(call), add_special_tokens=False).ids
            if grammar is not None:
                self.check(grammar, tokens)
            certain = () if call.sampling.logprobs is None else (TokenLogprobs(0.0),)
            known = (encoder.vocabulary, encoder.syntax, prepared.thinking, prepared.echoes)
            checked, tags = bool(prepared.checked), encoder.think_tags
            answer = Answer(call, prompts, *known, checked=checked, tags=tags)
            yield AnswerHeader("replica-7", None, None, ignored=prepared.ignored)
            if call.sampling.prompt_logprobs is not None:
                for index, ids in enumerate(prompts):
                    top = ((ids[0], -0.5),)
                    said = tuple(TokenLogprobs(-1.0 * i, top, 7) for i in range(1, len(ids)))
                    answer.take([PromptLogprobs(call.request_id, index * call.n, said)])
            for choice in range(len(prompts) * call.n):
                for at, token in enumerate(tokens):
                    if answer.ended:
                        return
                    end = finish if at == len(tokens) - 1 else None
                    written = Tokens(call.request_id, choice, (token,), end, certain)
                    for item in answer.take([written]):
                        yield item
            if answer.awaits_checks:
                for item in answer.end(_checks(prepared.checked, answer.said())):
                    yield item

        return Script(replay, self.encoder, self.max_context)

    def check(self, grammar: str, tokens: list[int]) -> None:
        """Assert that a grammar allows these tokens followed by an end of sequence."""
        matcher = self.grammars.compile(grammar)
        for token in tokens:
            matcher.accept(token)
        assert matcher.may_end


def _checks(schemas: Sequence[AnswerSchema], said: Sequence[SaidChoice]) -> list[SchemaCheck]:
    """Check the text, or else the first call, of each choice, as a replica does in its sandbox."""
    by_tool = {each.tool: each.schema for each in schemas}
    found = [broken_keyword(by_tool[tool], text) for tool, text in map(_said, said)]
    return [SchemaCheck(index, broken is None, broken) for index, broken in enumerate(found)]


def _said(choice: SaidChoice) -> tuple[str | None, str]:
    return choice.calls[0] if choice.calls else (None, choice.text)
