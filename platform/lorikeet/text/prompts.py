"""Encoding of calls: chat templates, tokenizing, and refusals by the context."""

import json
import math
import os
import re
from array import array
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import tokenizers
from jinja2 import Environment, TemplateError
from tokenizers import Tokenizer

from lorikeet.errors import (
    ContextLengthExceeded,
    InvalidInput,
    InvalidSetting,
    UnsupportedParameter,
)
from lorikeet.protocol.messages import (
    AnswerMarks,
    Call,
    EncodedCall,
    Endpoint,
    Format,
    Thinking,
    TokenIds,
    ToolUse,
)
from lorikeet.request_defaults import AddedToken, RequestDefaults, TokenizerChanges
from lorikeet.text.detokenizer import Vocabulary
from lorikeet.text.harmony import REQUIRED_MARKS
from lorikeet.text.harmony_prompts import (
    EFFORT,
    harmony_messages,
    harmony_tools,
    harmony_variables,
)
from lorikeet.text.reasoning import (
    MISTRAL_TAGS,
    THINK_TAGS,
    ThinkTags,
    tags_of,
    thinking_behind,
    thinking_within,
)
from lorikeet.text.tools.syntax import HARMONY, SYNTAXES, ToolSyntax, syntax_of

if TYPE_CHECKING:  # it takes a second
    from transformers import PreTrainedTokenizerFast

MAX_OWN_TOKENIZERS = 64
"""Number of encoders with adapters' own tokenizers that a process keeps, each in 0.1 to 3 MB."""
_SHORT_CHARACTERS = 1024
"""Limit on the characters of a call that is encoded in a fraction of a millisecond."""
_PROMPT_CHARACTERS = 20
"""Number of characters whose encoding takes as long as what each message or prompt takes beside its
text.
"""
_TEMPLATE_ERRORS = (
    *(TemplateError, TypeError, ValueError),
    *(ArithmeticError, AttributeError, LookupError, RecursionError),
)
_PARALLELISM = "TOKENIZERS_PARALLELISM"
"""Variable by which the library spreads one text's encoding over all cores, unless it is false."""
_INT32 = "i"
_END_TOKENS = 32  # last tokens of a prompt: enough for two tags at one token a letter
_UNCHECKED_BYTES = 2
"""Limit, in bytes per token of the context, on texts that are tokenised without a length check.

A text of this size may exceed the context, but not by far.
"""
_PART_CHARACTERS, _CUT_TOKENS = 2**14, 64
"""Length, in characters, of the parts in which a long text's tokens are counted; and the maximum
number of tokens that a cut between two parts adds to the count.
"""
_HERE = "[the answer goes on here]"
"""Mark for the beginning of the answer in a prompt that is being rendered.

Besides the mark, only a client's own last message could contain this text.
"""
_WITHIN_MARK = "\ufdd0"
"""Character at which a prompt is split before it is encoded: a noncharacter of Unicode, within the
text of a special token that a message spells.
"""
_NO_FLAGS = ("id", "content")  # of an added token's fields
_HELLO = ({"role": "user", "content": "Hello"},)
_TWO_MESSAGES = tuple({"role": "user", "content": text} for text in ("Hello", "7"))
_ANY_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {}},
    },
}


class ChatTemplate(Protocol):
    """Chat template as PromptEncoder renders it.

    texts: texts of the template, or of several for different chats.
    text_with_tools: text for chats with tools.
    names: all names, such as variables, that occur in `texts`.
    """

    texts: Sequence[str]
    text_with_tools: str
    names: frozenset[str]

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """Return the prompt of a chat. Raises InvalidInput if the template fails."""
        ...


class PromptEncoder:
    """Encoder of prompts with the base model's tokenizer and chat template.

    special_tokens: texts of special tokens by the names of the template's variables.
    pad_token: id of the base model's padding token, by its config.json; None without one.
    adds_tokens: whether the tokenizer is an adapter's, which adds tokens to the base model's.

    syntax: the model's syntax of tool calls; None if it has no known one.
    takes_tools: whether calls may have tools.
    """

    adds_tokens = False

    def __init__(self, model: Path) -> None:
        """Read the tokenizer. Raises InvalidSetting for a model folder without tokenizer.json."""
        if not (model / "tokenizer.json").exists():
            how = "AutoTokenizer.from_pretrained(…).save_pretrained(…)"
            if (model / "tekken.json").exists():  # which AutoTokenizer would only copy
                how = (
                    "with mistral-common installed, "
                    "PreTrainedTokenizerFast.from_pretrained(…).save_pretrained(…)"
                )
            raise InvalidSetting(
                f"LORIKEET_BASE_MODELS: {model} has no tokenizer.json: save the model's fast "
                f"tokenizer there ({how})"
            )
        # Imported here: it takes a second. Not AutoTokenizer, which imports torch as well:
        # tokenizer.json has all that is needed.
        from transformers import PreTrainedTokenizerFast

        os.environ.setdefault(_PARALLELISM, "false")  # one request takes one core, not all
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model))
        if tokenizer.chat_template is None:
            tokenizer.chat_template = _processor_template(model)
        self.backend: Tokenizer = tokenizer.backend_tokenizer
        self.special_tokens: Mapping[str, str] = tokenizer.special_tokens_map
        self.pad_token = _pad_token(model)
        # Many trainers save tokenizer.json with the truncation and padding of their last batch.
        self.backend.no_truncation()
        self.backend.no_padding()
        self._read_vocabulary(Vocabulary(self.backend))
        self._read_template(None if tokenizer.chat_template is None else _BaseTemplate(tokenizer))

    def with_tokenizer(self, changes: TokenizerChanges | None) -> "PromptEncoder":
        """Return an encoder with an adapter's tokenizer and this chat template; this encoder itself
        for None.

        Arguments and errors: as for with_vocabulary.
        """
        if changes is None:
            return self
        other = self.with_vocabulary(changes)
        other.special_tokens = {**self.special_tokens, **dict(changes.special_tokens)}
        template = self._template
        if isinstance(template, _BaseTemplate):
            template = template.with_special_tokens(other.special_tokens)
        other._read_template(template)
        return other

    def with_vocabulary(self, changes: TokenizerChanges | None) -> "PromptEncoder":
        """Return a copy with the tokens of an adapter's tokenizer, to read answers; this encoder
        itself for None. The copy cannot encode chats.

        Both tokenizers share the base model's vocabulary and merges, so that the adapter's is made
        in milliseconds and takes memory for its added tokens alone.

        changes: differences from this encoder's tokenizer.

        Raises InvalidInput if the adapter's tokens do not have the ids behind this tokenizer's.
        """
        if changes is None:
            return self
        other = copy(self)
        other.adds_tokens = True
        other.backend = _with_added(self.backend, changes.added)
        other._read_vocabulary(self.vocabulary.with_added(other.backend))
        return other

    def added_tokens(self) -> list[AddedToken]:
        """Return the tokenizer's added tokens in the order of their ids."""
        return [
            AddedToken(
                self.vocabulary.added[str(token.content)],
                str(token.content),
                token.special,
                token.single_word,
                token.lstrip,
                token.rstrip,
                token.normalized,
            )
            for token in _added_to(self.backend)
        ]

    def with_template(self, template: ChatTemplate) -> "PromptEncoder":
        """Return an encoder with this tokenizer and another chat template, which is rendered some
        ten times to find what it takes.
        """
        other = copy(self)
        other._read_template(template)
        return other

    def with_marks(self, marks: AnswerMarks | None) -> "PromptEncoder":
        """Return a copy with the tool-call syntax and thinking tags of `marks`, to read answers.

        The copy cannot encode prompts. With None this encoder itself is returned.
        """
        if marks is None:
            return self
        other = copy(self)
        other.syntax = None if marks.syntax is None else SYNTAXES[marks.syntax]
        other.think_tags = ThinkTags(*marks.tags)
        return other

    def marks(self) -> AnswerMarks:
        """Return the names of the encoder's tool-call syntax and thinking tags.

        A replica passes them to `with_marks` to read answers as this encoder would.
        """
        syntax = next((name for name, each in SYNTAXES.items() if each is self.syntax), None)
        return AnswerMarks(syntax, tuple(self.think_tags))

    def _read_vocabulary(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        special = (str(self.backend.id_to_token(token)) for token in vocabulary.special)
        self._marks = re.compile("|".join(map(re.escape, special)) or r"(?!)")

    def _read_template(self, template: ChatTemplate | None) -> None:
        self._template = template
        templates = () if template is None else template.texts
        self._variables = frozenset() if template is None else template.names
        self._wants_parts = False
        self._wants_parts = self._shows_only_parts()
        self._system_only_first = self._takes_system_only_first()
        renders_tools = self._renders_tools()
        self.syntax = self._syntax(renders_tools=renders_tools)
        self.takes_tools = renders_tools and self.syntax is not None
        tags = tags_of(templates)
        self._thinks = tags is not None and self.syntax is not HARMONY
        self.think_tags = tags or THINK_TAGS
        self._thoughts_in_text = tags is MISTRAL_TAGS and self._drops_reasoning()

    def encode(self, call: Call, max_context: int) -> tuple[TokenIds, ...]:
        """Return the token ids of each of a call's prompts. Slow for long prompts.

        max_context: longest sequence that the engine takes, tokens. Texts of up to two bytes for
            each of these tokens are encoded whole, even if they have more tokens.

        Raises InvalidInput if a longer text exceeds the context, or if the chat template refuses
        the messages or does not support the tools.
        """
        if not call.prompts:
            if call.tools is not None:
                self._check_tools(call.tools, call.format)
            text = self._marked_text(call)
            return (self._tokens(text, "messages", max_context, add_special_tokens=False),)
        return tuple(
            self._tokens(prompt, "prompt", max_context)
            if isinstance(prompt, str)
            else array(_INT32, prompt)
            for prompt in call.prompts
        )

    def prompt_text(self, call: Call) -> str:
        """Return the prompt of a chat as the chat template writes it.

        Raises InvalidInput if the chat template refuses the messages.
        """
        return self._marked_text(call).replace(_WITHIN_MARK, "")

    def thinking(self, call: Call, prompts: Sequence[Sequence[int]]) -> Thinking:
        """Return whether the model never thinks, may begin to think or has begun, at the end of a
        call's prompts.

        prompts: token ids of each prompt.
        """
        if not self._thinks or not call.endpoint.writes_messages:
            return Thinking.NEVER
        if call.continue_final:
            return thinking_within(call.messages[-1]["content"], self.think_tags)
        end = list(prompts[0][-_END_TOKENS:])
        said = self.backend.decode(end, skip_special_tokens=False)
        return thinking_behind(said, self.think_tags)

    def ignored(self, call: Call) -> tuple[str, ...]:
        """Return names of fields that have no effect on a call.

        The fields are the template_args that the chat template does not use, and the requested
        features that are not served (the call's `left_out`).
        """
        unread = [name for name in call.template_args if name not in self._variables]
        if call.template_args.get(EFFORT) == "none":
            if "enable_thinking" in self._variables:
                unread = [name for name in unread if name != EFFORT]  # it has ended the thinking
            elif self.syntax is HARMONY:
                unread.append(EFFORT)  # the model thinks nevertheless
        return (*unread, *call.left_out)

    def encode_turn(
        self, text: str, max_context: int, defaults: RequestDefaults | None = None
    ) -> TokenIds:
        """Return the token ids of a prompt that has only a user's message, or of the bare text if
        there is no chat template.

        text: the message.
        max_context: longest sequence that the engine takes, tokens.
        defaults: the adapter's own request defaults, of which the system prompt is used.

        Raises ContextLengthExceeded if a long text exceeds the context.
        """
        if self._template is None:
            return self._tokens(text, "prompt", max_context)
        text = self._render(_with_system_prompt([{"role": "user", "content": text}], defaults))
        return self._tokens(text, "prompt", max_context, add_special_tokens=False)

    def encode_system_prompt(self, defaults: RequestDefaults, max_context: int) -> TokenIds:
        """Return the token ids that begin all chats with an adapter's system prompt, but without
        tools and variables for the chat template.

        defaults: the adapter's own request defaults, with the system prompt.
        max_context: longest sequence that the engine takes, tokens.

        Raises InvalidInput if the chat template refuses a message after the system prompt,
        ContextLengthExceeded if a long prompt exceeds the context.
        """
        about = ("", Endpoint.CHAT, 0, "", "", None)
        first, second = (
            self.encode(Call(*about, messages=(message,), defaults=defaults), max_context)[0]
            for message in _TWO_MESSAGES
        )
        pairs = enumerate(zip(first, second, strict=False))
        return first[: next((at for at, (one, other) in pairs if one != other), len(first))]

    def encode_text(self, text: str, max_context: int, *, add_special_tokens: bool) -> TokenIds:
        """Return the token ids of a text.

        max_context: longest sequence that the engine takes, tokens. A text of up to two bytes for
            each of these tokens is encoded whole, even if it has more tokens.
        add_special_tokens: add the tokenizer's special tokens, as to prompts of completions.

        Raises ContextLengthExceeded if a long text exceeds the context.
        """
        return self._tokens(text, "prompt", max_context, add_special_tokens=add_special_tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included.

        Raises InvalidInput for a token that the vocabulary lacks.
        """
        for token in {*tokens}:
            if self.backend.id_to_token(token) is None:
                raise InvalidInput(
                    f"tokens: {token} is not in the base model's vocabulary", param="tokens"
                )
        return str(self.backend.decode(list(tokens), skip_special_tokens=False))

    def _tokens(
        self, text: str, param: str, max_context: int, *, add_special_tokens: bool = True
    ) -> TokenIds:
        if len(text.encode(errors="replace")) > _UNCHECKED_BYTES * max_context:
            self._check_length(text, param, max_context)
        parts = text.split(_WITHIN_MARK) if self.syntax is HARMONY else [text]
        # Unlike `encode`, this lets other threads run, and finds no offsets.
        encoded = self.backend.encode_batch_fast(parts, add_special_tokens=add_special_tokens)
        return array(_INT32, chain.from_iterable(each.ids for each in encoded))

    def _spelled(self, values: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return JSON values in which the text of each special token is split in two, so that the
        tokenizer encodes it as plain text.
        """
        found = self._marks.search(json.dumps(values, ensure_ascii=False))
        return values if found is None else self._split_marks(values)

    def _split_marks(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._marks.sub(lambda mark: mark[0][0] + _WITHIN_MARK + mark[0][1:], value)
        if isinstance(value, Mapping):
            return {self._split_marks(key): self._split_marks(each) for key, each in value.items()}
        if isinstance(value, Sequence):
            return [self._split_marks(each) for each in value]
        return value

    def _check_length(self, text: str, param: str, max_context: int) -> None:
        """Raise ContextLengthExceeded as soon as a long text's first parts exceed the context.

        The whole text would be tokenised for seconds.

        param: name of the request's field that holds the text.
        max_context: the longest sequence, tokens.
        """
        tokens = 0
        for at in range(0, len(text), _PART_CHARACTERS):
            part = text[at : at + _PART_CHARACTERS]
            (encoded,) = self.backend.encode_batch_fast([part], add_special_tokens=False)
            tokens += len(encoded) - _CUT_TOKENS
            if tokens > max_context:
                raise ContextLengthExceeded(
                    f"This model's maximum context length is {max_context} tokens. However, "
                    f"the first {at + len(part)} of the {len(text)} characters of {param} have "
                    "more: shorten it",
                    param=param,
                )

    def _shows_only_parts(self) -> bool:
        """Return True if the template renders content only as a list of parts.

        Templates of vision-language models such as LLaVA's drop string content without an error.
        """
        (said,) = _HELLO
        try:
            shown = [self._render(hello) for hello in (_HELLO, [_in_parts(said)])]
        except InvalidInput:
            return False
        return [said["content"] in text for text in shown] == [False, True]

    def _takes_system_only_first(self) -> bool:
        """Return True if the template refuses or drops a system message after other messages.

        Templates of Qwen 3.5 refuse it, and Ministral 3's after an answer; gpt-oss' drops it.
        Coding agents send such messages.
        """
        first, later = ({"role": "system", "content": said} for said in ("Be brief.", "Be kind."))
        try:
            if first["content"] not in self._render([first, *_HELLO]):
                return False
        except InvalidInput:
            return False
        try:
            between = [*_HELLO, {"role": "assistant", "content": "Hi"}, later, *_HELLO]
            return later["content"] not in self._render([first, *between])
        except InvalidInput:
            return True

    def _drops_reasoning(self) -> bool:
        """Return True if the template does not show the thinking of earlier answers that is a
        field of their messages.
        """
        said = {"role": "assistant", "content": "Hi", "reasoning_content": "A greeting."}
        try:
            return said["reasoning_content"] not in self._render([*_HELLO, said, *_HELLO])
        except InvalidInput:
            return True

    def _renders_tools(self) -> bool:
        """Return True if the chat template shows tools to the model."""
        if self._template is None:
            return False
        try:
            return self._render(_HELLO) != self._render(_HELLO, [_ANY_TOOL])
        except InvalidInput:
            return False

    def _syntax(self, *, renders_tools: bool) -> ToolSyntax | None:
        """Return the model's syntax of tool calls; None if it has no known one.

        Returns HARMONY for each template in Harmony (gpt-oss' format), even if it shows no tools,
        because all its answers are in messages; None if the tokenizer lacks Harmony's marks.

        renders_tools: whether the chat template shows tools to the model.
        """
        if self._template is None:
            return None
        syntax = syntax_of(self._template.text_with_tools)
        if syntax is HARMONY:
            return HARMONY if self.vocabulary.added.keys() >= {*REQUIRED_MARKS} else None
        return syntax if renders_tools else None

    def _check_tools(self, use: ToolUse, answer: Format | None) -> None:
        if self.syntax is None or not self.takes_tools:
            raise UnsupportedParameter(
                "the model's chat template renders no tools, or in an unknown syntax: "
                "leave tools out, or use a model that was trained with tools",
                param="tools",
            )
        if answer is not None and not use.forced and not self.syntax.before:
            raise UnsupportedParameter(
                "the model writes tool calls as plain JSON, which a JSON answer would look "
                f'like: want the tool_choice "required" or "none", or no {answer.param}',
                param=answer.param,
            )

    def _marked_text(self, call: Call) -> str:
        """Return the prompt of a chat. With Harmony's syntax, _WITHIN_MARK splits each special
        token's text that a message spells, so that it is encoded as plain text.
        """
        tools: Sequence[Mapping[str, Any]] = call.tools.tools if call.tools else ()
        given = {**call.template_defaults, **call.template_args}
        known = {name: value for name, value in given.items() if name in self._variables}
        messages = _with_system_prompt(call.messages, call.defaults)
        if self.syntax is HARMONY:
            known, messages = harmony_variables(known), harmony_messages(messages)
            messages, tools = self._spelled(messages), self._spelled(harmony_tools(tools))
        how = {"add_generation_prompt": call.generation_prompt}
        if self._system_only_first:
            messages = _with_one_system(messages)
        if self._thoughts_in_text:
            messages = [_with_thought_in_text(message) for message in messages]
        if not call.continue_final:
            return self._render(messages, tools, **how, **known)
        return self._render_begun(messages, tools, **how, **known)

    def _render_begun(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        **arguments: Any,
    ) -> str:
        """Return the prompt up to the end of the last message, which the answer continues.

        A mark after the last message keeps templates from trimming the whitespace at its end.

        arguments: variables for the chat template.

        Raises InvalidInput if the template changes the last message.
        """
        *past, last = messages
        whole: str = last["content"]
        said = "" if whole.isspace() else whole
        text = self._render([*past, {**last, "content": said + _HERE}], tools, **arguments)
        prompt, here, _ = text.rpartition(_HERE)
        if not here or not prompt.endswith(said.lstrip()):
            raise InvalidInput(
                "the chat template changes the last message, which then cannot be continued",
                param="continue_final_message",
            )
        return prompt + whole[len(said) :]

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> str:
        if self._template is None:
            raise InvalidInput(
                "this base model has no chat template: use /v1/completions", param="messages"
            )
        return self._template.render(
            [_in_parts(m) if self._wants_parts else dict(m) for m in messages],
            tools=[dict(tool) for tool in tools] or None,
            **self._xml_tools(tools),
            add_generation_prompt=add_generation_prompt,
            **arguments,
        )

    def _xml_tools(self, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the tools as the template variable `xml_tools`, which SmolLM 3's template uses.

        Returns {} without tools or for another template.
        """
        if not tools or "xml_tools" not in self._variables:
            return {}
        return {"xml_tools": [tool["function"] for tool in tools]}


def encode_call(call: Call, encoder: PromptEncoder, max_context: int) -> EncodedCall:
    """Return a call with the token ids of its prompts. Slow for long prompts.

    max_context: longest sequence that the engine takes, tokens.

    Raises InvalidInput if the prompts cannot be encoded, or leave no room for an answer.
    """
    prompts = encoder.encode(call, max_context)
    if call.head is not None:
        prompts = tuple(_without_padding(ids, _pad_token_of(call, encoder)) for ids in prompts)
    if not call.endpoint.counts:
        check_context(call, prompts, max_context)
    thinking = encoder.thinking(call, prompts)
    check_begun_answer(call, thinking, encoder.think_tags)
    echoed = echoed_texts(call, encoder.backend)
    own = call.defaults or RequestDefaults()
    is_own = own.chat_template is not None or own.tokenizer is not None
    marks = encoder.marks() if is_own else None
    ignored = encoder.ignored(call)
    return EncodedCall(call, prompts, thinking, echoed, ignored, marks, own.tokenizer)


def is_short(call: Call) -> bool:
    """Return True if encoding the call takes a fraction of a millisecond.

    Calls with variables for the chat template are never short: the template may loop over them.
    """
    if call.tools is not None or call.template_args:
        return False
    characters = sum(map(_characters, call.messages)) + sum(map(len, call.prompts))
    if call.messages and call.defaults is not None:
        characters += len(call.defaults.system_prompt or "")
    prompts = len(call.messages) + len(call.prompts)
    return characters + _PROMPT_CHARACTERS * prompts <= _SHORT_CHARACTERS


def check_context(call: Call, prompts: Sequence[Sequence[int]], max_context: int) -> None:
    """Raise ContextLengthExceeded if a prompt leaves no room for one token, or if a prompt with
    max_tokens exceeds the context limit set for the tenant or key.

    prompts: token ids of each prompt.
    max_context: longest sequence that the engine takes, tokens.
    """
    longest, limit = max(map(len, prompts)), call.max_context
    answer = call.max_tokens or 1
    if limit is not None and longest + answer > limit:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens for this tenant or key. "
            f"However, the prompt has {longest} and the answer up to {answer}: "
            f"shorten the prompt, or ask for fewer tokens",
            param="max_tokens" if longest < limit else "prompt",
        )
    if longest >= max_context:
        raise ContextLengthExceeded(
            # OpenAI's words, by which clients such as LiteLLM recognise this error
            f"This model's maximum context length is {max_context} tokens. However, the prompt "
            f"has {longest}, and an answer needs one more: shorten the prompt",
            param="prompt",
        )


def check_begun_answer(call: Call, thinking: Thinking, tags: ThinkTags) -> None:
    """Raise InvalidInput if an answer with a format would continue the text of a message.

    A grammar describes whole answers, and would begin anew after that text. A message that ends
    within the model's thoughts, or right after them, has no such text.

    thinking: whether the model, at the end of the prompt, never thinks, may begin to or has begun.
    tags: the model's tags of thinking.
    """
    if call.format is None or not call.continue_final or thinking is Thinking.BEGUN:
        return
    if call.messages[-1]["content"].rpartition(tags.closes)[2].strip():
        param = call.format.param
        raise InvalidInput(
            f"{param}: an answer that continues the assistant's last message cannot be held to a "
            "format: leave out that message or the format",
            param=param,
        )


def echoed_texts(call: Call, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the text of each prompt if the call asks to repeat them (`echo`); else ()."""
    given = call.prompts if call.echo else ()
    return tuple(
        each if isinstance(each, str) else str(tokenizer.decode(list(each))) for each in given
    )


def _with_added(tokenizer: Tokenizer, added: Sequence[AddedToken]) -> Tokenizer:
    """Return a tokenizer with more added tokens, which shares the model of the given one.

    added: tokens in the order of their ids; they replace tokens of the same text.

    Raises InvalidInput if the tokens do not have the ids behind the tokenizer's.
    """
    other = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(tokenizer, part)) is not None:
            setattr(other, part, value)
    tokens = {str(token.content): token for token in _added_to(tokenizer)}
    for token in added:
        flags = {name: value for name, value in asdict(token).items() if name not in _NO_FLAGS}
        tokens[token.content] = tokenizers.AddedToken(token.content, **flags)
    other.add_tokens(list(tokens.values()))
    for token in added:
        found = other.token_to_id(token.content)
        if found != token.id:
            taken = tokenizer.id_to_token(token.id)
            why = f"want {found}" if taken is None else f"that of the base model's {taken!r}"
            raise InvalidInput(f"the added token {token.content!r} has the id {token.id}: {why}")
    return other


def _added_to(tokenizer: Tokenizer) -> list[tokenizers.AddedToken]:
    """Return a tokenizer's added tokens in the order of their ids."""
    return [token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]


class _BaseTemplate:
    """Chat template of a base model, rendered by transformers in this process."""

    _special_tokens: Mapping[str, str] = {}

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer
        self.texts = _templates(tokenizer.chat_template)
        self.names = _names_in(self.texts)
        self.text_with_tools = str(tokenizer.get_chat_template(tools=[_ANY_TOOL]))

    def with_special_tokens(self, special_tokens: Mapping[str, str]) -> "_BaseTemplate":
        """Return the template with other values of variables such as eos_token."""
        other = copy(self)
        other._special_tokens = special_tokens
        return other

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        given = {**self._special_tokens, **variables}
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, **given)
        # A template may fail in any way on a variable of an unexpected type.
        except _TEMPLATE_ERRORS as error:
            raise InvalidInput(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        return str(text)


def _with_system_prompt(
    messages: Sequence[Mapping[str, Any]], defaults: RequestDefaults | None
) -> Sequence[Mapping[str, Any]]:
    """Return messages after an adapter's system prompt, unless a message is a system message."""
    if defaults is None or defaults.system_prompt is None:
        return messages
    if any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": defaults.system_prompt}, *messages]


def _processor_template(model: Path) -> str | None:
    """Return the template in chat_template.json, a file of older vision-language models, or
    None.
    """
    file = model / "chat_template.json"
    return json.loads(file.read_text())["chat_template"] if file.exists() else None


def _with_one_system(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return messages with the texts of all system messages in the first message, separated by
    empty lines.
    """
    if all(message["role"] != "system" for message in messages[1:]):
        return messages
    texts = [message["content"] for message in messages if message["role"] == "system"]
    others = (message for message in messages if message["role"] != "system")
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def _with_thought_in_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose content begins with its thinking, if it has any.

    Templates of Mistral's first models that think show it there alone.
    """
    if not (thought := message.get("reasoning_content")):
        return message
    tags = MISTRAL_TAGS
    return {**message, "content": f"{tags.opens}{thought}{tags.closes}{message['content']}"}


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with string content turned into a list of one part."""
    content = message.get("content")
    if not isinstance(content, str):
        return dict(message)
    return {**message, "content": [{"type": "text", "text": content}]}


def _pad_token(model: Path) -> int | None:
    """Return the id of a base model's padding token; None if its config.json names none."""
    file = model / "config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    found = config.get("pad_token_id", config.get("text_config", {}).get("pad_token_id"))
    return found if isinstance(found, int) else None


def _templates(template: str | Mapping[str, str]) -> Sequence[str]:
    """Return the texts of a tokenizer's chat templates.

    template: one template, or several by name.
    """
    return [template] if isinstance(template, str) else list(template.values())


def _names_in(templates: Sequence[str]) -> frozenset[str]:
    """Return all names, such as variables, that occur in chat templates."""
    lexed = (token for text in templates for token in Environment().lex(text))
    return frozenset(value for _, kind, value in lexed if kind == "name")


def _pad_token_of(call: Call, encoder: PromptEncoder) -> int | None:
    """Return the padding token with which the classification or reward head of a call's adapter or
    base model was trained; None if unknown.
    """
    known = None if call.head is None else call.head.pad_token
    return encoder.pad_token if known is None else known


def _without_padding(ids: TokenIds, pad_token: int | None) -> TokenIds:
    """Return a prompt without padding at its end; the first token stays.

    Classification and reward heads were trained to skip such padding.
    """
    end = len(ids)
    while end > 1 and ids[end - 1] == pad_token:
        end -= 1
    return ids[:end]


def _characters(message: Mapping[str, Any]) -> float:
    """Return the number of characters of a message's texts; infinity if it has tool calls."""
    if message.get("tool_calls"):
        return math.inf
    return len(message["content"]) + len(message.get("reasoning_content") or "")
