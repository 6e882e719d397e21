"""Text to tokens: chat templates and plain prompts, and the room that they leave for an answer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from lorikeet.answer_stream.tool_calls import ToolSyntax, syntax_of
from lorikeet.answer_stream.vocabulary import Vocabulary
from lorikeet.errors import (
    ContextLengthExceeded,
    InvalidInput,
    InvalidSetting,
    UnsupportedParameter,
)
from lorikeet.protocol.messages import Call, Endpoint, Format, ToolUse
from lorikeet.replica.grammar import grammar_of
from lorikeet.replica.tool_grammar import call_grammar, text_grammar

_HELLO = ({"role": "user", "content": "Hello"},)
_ANY_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {}},
    },
}


class PromptEncoder:
    """Encodes prompts with the base model's tokenizer and chat template."""

    def __init__(self, model: Path, max_context: int) -> None:
        """Raises InvalidSetting for a model folder without tokenizer.json."""
        if not (model / "tokenizer.json").exists():
            raise InvalidSetting(
                f"LORIKEET_BASE_MODELS: {model} has no tokenizer.json: save the model's fast "
                "tokenizer there (AutoTokenizer.from_pretrained(…).save_pretrained(…))"
            )
        # Not AutoTokenizer, which loads torch: tokenizer.json says all that is needed here.
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model))
        self.backend: Tokenizer = self._tokenizer.backend_tokenizer
        self.vocabulary = Vocabulary(self.backend)
        self.syntax = self._syntax()
        longest_token = max(len(token.encode()) for token in self._tokenizer.get_vocab())
        self._max_context = max_context
        self._most_characters = max_context * longest_token

    def encode(self, call: Call) -> tuple[tuple[int, ...], ...]:
        """Return each prompt's token ids. Takes long for long prompts. Raises InvalidInput."""
        if call.endpoint is Endpoint.CHAT:
            if call.tools is not None:
                self._check_tools(call.tools, call.format)
            text = self._render(call.messages, call.tools.tools if call.tools else ())
            return (self._tokens(text, "messages", add_special_tokens=False),)
        return tuple(
            prompt if isinstance(prompt, tuple) else self._tokens(prompt, "prompt")
            for prompt in call.prompts
        )

    def grammar(self, call: Call) -> str | None:
        """Return the grammar of an encoded call's answers; None if they are free."""
        if (use := call.tools) is not None:
            assert self.syntax is not None
            if use.forced or call.format is not None:
                return call_grammar(use, self.syntax, self.vocabulary, call.format)
            return text_grammar(use, self.syntax, self.vocabulary) if use.strict else None
        return grammar_of(call.format.schema) if call.format is not None else None

    def encode_turn(self, text: str) -> tuple[int, ...]:
        """Return a user's first turn as token ids; without a chat template, those of the text."""
        if self._tokenizer.chat_template is None:
            return self._tokens(text, "prompt")
        text = self._render([{"role": "user", "content": text}])
        return self._tokens(text, "prompt", add_special_tokens=False)

    def _tokens(self, text: str, param: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        if len(text) > self._most_characters:
            raise ContextLengthExceeded(
                f"{param} has {len(text)} characters: no text longer than {self._most_characters} "
                f"fits into the context of {self._max_context} tokens",
                param=param,
            )
        return tuple(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def _syntax(self) -> ToolSyntax | None:
        """Return how the model writes tool calls; None if its template shows it no tools."""
        if self._tokenizer.chat_template is None:
            return None
        try:
            if self._render(_HELLO) == self._render(_HELLO, [_ANY_TOOL]):
                return None
        except InvalidInput:
            return None
        return syntax_of(self._tokenizer.get_chat_template(tools=[_ANY_TOOL]))

    def _check_tools(self, use: ToolUse, answer: Format | None) -> None:
        if self.syntax is None:
            raise UnsupportedParameter(
                "this base model's chat template shows it no tools, or in a syntax that is not "
                "known here: leave tools out, or ask a model that was trained with them",
                param="tools",
            )
        if answer is not None and not use.forced and not self.syntax.before:
            raise UnsupportedParameter(
                "this base model writes calls of tools as plain JSON, as which a JSON answer could "
                'be read: want the tool_choice "required" or "none", or no response_format',
                param="response_format",
            )

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        if self._tokenizer.chat_template is None:
            raise InvalidInput(
                "this base model has no chat template: use /v1/completions", param="messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=True,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidInput(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        return str(text)


def max_answer_tokens(call: Call, prompts: Sequence[Sequence[int]], engine_context: int) -> int:
    """Return the most tokens of a choice, at least 1: what the longest prompt leaves free.

    Raises ContextLengthExceeded where prompt and max_tokens are more than the caller's own limit.
    What the engine's context does not hold is the engine's to refuse.
    """
    longest = max(map(len, prompts))
    limit = call.max_context
    if limit is None:
        return max(1, engine_context - longest)
    if longest + (call.max_tokens or 1) > limit:
        if longest < limit:
            param = "max_tokens"
        else:
            param = "messages" if call.endpoint is Endpoint.CHAT else "prompt"
        raise ContextLengthExceeded(
            f"a prompt of {longest} tokens and an answer of up to {call.max_tokens or 1}: "
            f"{limit} together is the limit of this tenant or key",
            param=param,
        )
    return max(1, min(engine_context, limit) - longest)
