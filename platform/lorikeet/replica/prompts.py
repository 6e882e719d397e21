"""Text to tokens: chat templates and plain prompts, and the grammars that go with them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError
from tokenizers import Tokenizer

from lorikeet.answer_stream.detokenizer import Vocabulary
from lorikeet.answer_stream.reasoning import (
    CLOSES,
    Thinking,
    thinking_behind,
    thinking_within,
)
from lorikeet.answer_stream.tool_syntax import ToolSyntax, syntax_of
from lorikeet.errors import (
    ContextLengthExceeded,
    InvalidInput,
    InvalidSetting,
    UnsupportedParameter,
)
from lorikeet.protocol.messages import Call, Endpoint, Format, ToolUse

_TEMPLATE_ERRORS = (
    *(TemplateError, TypeError, ValueError),
    *(ArithmeticError, AttributeError, LookupError, RecursionError),
)
_END_TOKENS = 32  # of a prompt, which hold two tags even if each letter is a token
_UNCHECKED_BYTES = 2
"""A text of so many for each token of the context may be too long, but not by far."""
_PART_CHARACTERS, _CUT_TOKENS = 2**14, 64
"""The size of its parts; tokens that one may have more because it is cut off."""
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
        # A second of imports, which gateways and controller do without; and AutoTokenizer would
        # import torch as well: tokenizer.json says all that is needed here.
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model))
        if self._tokenizer.chat_template is None:
            self._tokenizer.chat_template = _processor_template(model)
        self.backend: Tokenizer = self._tokenizer.backend_tokenizer
        self.vocabulary = Vocabulary(self.backend)
        templates = _templates(self._tokenizer.chat_template)
        self._variables = _names_in(templates)
        self._wants_parts = False
        self._wants_parts = self._shows_parts_alone()
        self.syntax = self._syntax()
        self._thinks = any(CLOSES in template for template in templates)
        self._max_context = max_context

    def encode(self, call: Call) -> tuple[tuple[int, ...], ...]:
        """Return each prompt's token ids. Takes long for long prompts. Raises InvalidInput."""
        if call.endpoint is not Endpoint.COMPLETIONS:
            if call.tools is not None:
                self._check_tools(call.tools, call.format)
            text = self._render_call(call)
            return (self._tokens(text, "messages", add_special_tokens=False),)
        return tuple(
            prompt if isinstance(prompt, tuple) else self._tokens(prompt, "prompt")
            for prompt in call.prompts
        )

    def thinking(self, call: Call, prompts: Sequence[Sequence[int]]) -> Thinking:
        """Return whether the model thinks before it answers a call. prompts: as encoded."""
        if not self._thinks or call.endpoint is Endpoint.COMPLETIONS:
            return Thinking.NEVER
        if call.continue_final:
            return thinking_within(call.messages[-1]["content"])
        end = list(prompts[0][-_END_TOKENS:])
        return thinking_behind(self.backend.decode(end, skip_special_tokens=False))

    def ignored(self, call: Call) -> tuple[str, ...]:
        """Return what has no effect: template_args that are not read, and what is left out."""
        unread = (name for name in call.template_args if name not in self._variables)
        return (*unread, *call.left_out)

    def encode_turn(self, text: str) -> tuple[int, ...]:
        """Return a user's first turn as token ids; without a chat template, those of the text."""
        if self._tokenizer.chat_template is None:
            return self._tokens(text, "prompt")
        text = self._render([{"role": "user", "content": text}])
        return self._tokens(text, "prompt", add_special_tokens=False)

    def _tokens(self, text: str, param: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        if len(text.encode(errors="replace")) > _UNCHECKED_BYTES * self._max_context:
            self._check_length(text, param)
        return tuple(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def _check_length(self, text: str, param: str) -> None:
        """Refuse a long text as soon as its first parts have too many tokens.

        All of it could take seconds and a gigabyte to tokenise, and to make Python's integers of so
        many tokens keeps the interpreter from the replica's event loop.
        """
        tokens = 0
        for at in range(0, len(text), _PART_CHARACTERS):
            part = text[at : at + _PART_CHARACTERS]
            tokens += len(self.backend.encode(part, add_special_tokens=False)) - _CUT_TOKENS
            if tokens > self._max_context:
                raise ContextLengthExceeded(
                    f"This model's maximum context length is {self._max_context} tokens. However, "
                    f"the first {at + len(part)} of the {len(text)} characters of {param} have "
                    "more: shorten it",
                    param=param,
                )

    def _shows_parts_alone(self) -> bool:
        """Return whether the template shows content only where it is a list of parts.

        Templates of vision-language models such as LLaVA's drop a string without an error.
        """
        (said,) = _HELLO
        try:
            shown = [self._render(hello) for hello in (_HELLO, [_in_parts(said)])]
        except InvalidInput:
            return False
        return [said["content"] in text for text in shown] == [False, True]

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
        if not self.syntax.can_be_held and (use.forced or use.strict or answer is not None):
            raise UnsupportedParameter(
                "this base model writes calls of tools in a syntax to which it cannot be held: "
                'want the tool_choice "auto" or "none", no strict tools, and no JSON as the answer',
                param="tools",
            )
        if answer is not None and not use.forced and not self.syntax.before:
            raise UnsupportedParameter(
                "this base model writes calls of tools as plain JSON, as which a JSON answer could "
                f'be read: want the tool_choice "required" or "none", or no {answer.param}',
                param=answer.param,
            )

    def _render_call(self, call: Call) -> str:
        tools = call.tools.tools if call.tools else ()
        given = {**call.template_defaults, **call.template_args}
        known = {name: value for name, value in given.items() if name in self._variables}
        how = {"add_generation_prompt": call.generation_prompt}
        if not call.continue_final:
            return self._render(call.messages, tools, **how, **known)
        try:
            return self._render(call.messages, tools, continue_final_message=True, **how, **known)
        except InvalidInput as error:  # its text quotes the prompt
            raise InvalidInput(
                "the chat template refuses these messages, or does not show the last one as it is, "
                "so that it cannot be continued",
                param="continue_final_message",
            ) from error

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> str:
        if self._tokenizer.chat_template is None:
            raise InvalidInput(
                "this base model has no chat template: use /v1/completions", param="messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [_in_parts(m) if self._wants_parts else dict(m) for m in messages],
                tools=[dict(tool) for tool in tools] or None,
                **self._xml_tools(tools),
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **arguments,
            )
        # A template fails in any way where a variable is not what it takes it for.
        except _TEMPLATE_ERRORS as error:
            raise InvalidInput(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        return str(text)

    def _xml_tools(self, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the tools once more for SmolLM 3's template, which has its own name for them."""
        if not tools or "xml_tools" not in self._variables:
            return {}
        return {"xml_tools": [tool["function"] for tool in tools]}


def _processor_template(model: Path) -> str | None:
    """Return the chat template that older vision-language folders keep beside the tokenizer's."""
    file = model / "chat_template.json"
    return json.loads(file.read_text())["chat_template"] if file.exists() else None


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose text, if it is a string, is the only part of its content."""
    content = message.get("content")
    if not isinstance(content, str):
        return dict(message)
    return {**message, "content": [{"type": "text", "text": content}]}


def _templates(template: str | Mapping[str, str] | None) -> Sequence[str]:
    """Return the texts of a tokenizer's chat template, which may be several."""
    return [template or ""] if isinstance(template, str | None) else list(template.values())


def _names_in(templates: Sequence[str]) -> frozenset[str]:
    """Return the names that stand in chat templates."""
    lexed = (token for text in templates for token in Environment().lex(text))
    return frozenset(value for _, kind, value in lexed if kind == "name")
