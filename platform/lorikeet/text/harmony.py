"""Parser of Harmony, the format in which gpt-oss writes its answers.

An answer is a row of messages, the first of which begins after the prompt's `<|start|>assistant`:

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.F <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

Messages on the channel `analysis` are thinking, those to an offered function are tool calls, all
others are text. A call's recipient stands after the channel or after the role. Marks are read by
token id: text that spells a mark stays text.
"""

from collections.abc import Sequence
from enum import Enum

import regex

from lorikeet.protocol.messages import Call, Endpoint
from lorikeet.text.choice import Ending, ToolCallPart
from lorikeet.text.choice_stream import OutputDelta
from lorikeet.text.detokenizer import NO_STOP_STRINGS, Detokenizer, StopStrings, Vocabulary
from lorikeet.text.logprobs import SampledToken
from lorikeet.text.tools.call_bodies import JsonEnd
from lorikeet_engine.request import TokenLogprobs, Tokens

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
REQUIRED_MARKS = (START, CHANNEL, MESSAGE, END)
"""Marks without which a tokenizer cannot write Harmony."""
_MARKS = (*REQUIRED_MARKS, CONSTRAIN, CALL, RETURN)
_ENDS = (END, CALL, RETURN)
_LAST = (CALL, RETURN)  # marks that end the answer
_ROLE = regex.compile(r"\s*(?:assistant)?\s*(?:to=\S*\s*)?")
"""Pattern of the text before a message's channel."""
_HEADER = regex.compile(r"\s*(?:analysis|commentary|final)?\s*(?:to=\S*)?\s*(?:json)?\s*")
"""Pattern of the text after a message's mark of the channel."""
_RECIPIENT = regex.compile(r"\bto=(?:functions\.)?((?:(?!<\|)\S)+)")
_CHANNEL = regex.compile(regex.escape(CHANNEL) + r"\s*(\w*)")
_LONGEST_ROLE = 64  # tokens of text before a channel that may still become a role
_GAP = "\n\n"  # between the texts of two messages


class Place(Enum):
    """Place in a text of Harmony, the format of gpt-oss: a row of messages with headers.

    BETWEEN: after a message.
    HEADER: before a message's text.
    BODY: within a message's text.
    """

    BETWEEN = "between"
    HEADER = "header"
    BODY = "body"


class _Kind(Enum):
    """Use of a message's text in the answer."""

    THINKING = "thinking"
    TEXT = "text"
    CALL = "call"


def place_behind(prompt: Sequence[int], vocabulary: Vocabulary) -> Place:
    """Return the place (between messages, in a header or a text) at which a prompt ends.

    prompt: token ids.
    """
    marks = _marks(vocabulary)
    for token in reversed(prompt):
        mark = marks.get(token)
        if mark in (START, MESSAGE):
            return Place.HEADER if mark == START else Place.BODY
        if mark in _ENDS:
            return Place.BETWEEN
    return Place.BETWEEN


class HarmonyChoice:
    """Converter of one choice's tokens into thinking, text and tool calls, with ChoiceStream's
    interface.

    The tokens are in Harmony, the format of gpt-oss: messages, each with a header. The texts of
    several messages of one kind are separated by an empty line, unless the stream returns them in
    blocks of their own. A call's arguments are returned while they are generated. Text without a
    header, as models write that were trained without channels, is text of the answer.

    tokens: number of tokens received so far.
    stop_string: stop string that ended the choice; None if no stop string did.
    finish: reason for the choice's end; set with the last delta.

    Constructor arguments:
    prompt: token ids of the prompt that the choice continues.
    vocabulary: tokens of the model's tokenizer.
    stop: stop strings of the call, which apply to text only.
    """

    def __init__(
        self, call: Call, prompt: Sequence[int], vocabulary: Vocabulary, stop: StopStrings
    ) -> None:
        self._call, self._prompt, self._stop = call, prompt, stop
        self._vocabulary = vocabulary
        self._names = vocabulary.by_id if call.tokens_as_ids else vocabulary
        self._wants_logprobs = call.sampling.logprobs is not None
        self._marks = _marks(vocabulary)
        self._hidden = vocabulary.special
        if call.sampling.keep_stop_token:
            self._hidden |= frozenset(call.sampling.stop_token_ids)
        self._offered = frozenset(call.tools.parameters if call.tools else ())
        self._parallel = call.tools is None or call.tools.parallel
        # The open message: tokens of its header, then its text.
        self._header: list[tuple[int, TokenLogprobs | None]] = []
        self._begins_with_start = False
        self._has_role = False
        self._body: Detokenizer | None = None
        self._kind = _Kind.TEXT
        self._begin = 0  # index of the message's first token
        self._unsent: list[tuple[int, TokenLogprobs | None]] = []  # tokens of its text
        self._sent_tokens = 0  # of its text
        self._is_new = True  # no text of it is returned yet
        # The open call.
        self._name = ""
        self._arguments: JsonEnd | None = None
        # All messages so far.
        self._calls = self._whole_calls = 0
        self._thought = 0
        self._said: set[_Kind] = set()
        self._shown: _Kind | None = None  # kind of the last part of the answer
        # Streams of these APIs have a block for each run of parts of one kind.
        self._in_blocks = call.stream and call.endpoint in (Endpoint.RESPONSES, Endpoint.MESSAGES)
        # The new delta.
        self._new: dict[_Kind, list[str]] = {_Kind.THINKING: [], _Kind.TEXT: []}
        self._new_calls: list[ToolCallPart] = []
        self._new_logprobs: list[SampledToken] = []
        self.tokens = 0
        self.stop_string: str | None = None
        self.finish: Ending | None = None
        if place_behind(prompt, vocabulary) is Place.BODY:
            self._open_body(_Kind.TEXT, prompt)

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens of the messages with thinking so far, including their marks."""
        thinks = self._body is not None and self._kind is _Kind.THINKING
        return self._thought + (self.tokens - self._begin if thinks else 0)

    def take(self, output: Tokens) -> OutputDelta:
        """Convert new tokens of the choice; return the new thinking, text and tool calls."""
        begin = self.tokens
        known = output.logprobs if self._wants_logprobs else [None] * len(output.token_ids)
        for token, logprobs in zip(output.token_ids, known, strict=True):
            if self.finish is not None:
                break
            self.tokens += 1
            self._add(token, logprobs)
        if self.finish is None and output.finish is not None:
            self._end(Ending(output.finish.value))
        return self._take_delta(output, begin)

    def _take_delta(self, output: Tokens, begin: int) -> OutputDelta:
        text, thought = ("".join(self._new[kind]) for kind in (_Kind.TEXT, _Kind.THINKING))
        calls, logprobs = self._new_calls, self._new_logprobs
        self._new = {_Kind.THINKING: [], _Kind.TEXT: []}
        self._new_calls, self._new_logprobs = [], []
        token_ids: Sequence[int] = ()
        if self._call.return_token_ids:
            token_ids = output.token_ids[: self.tokens - begin]
            if self._wants_logprobs:
                each = zip(token_ids, output.logprobs, strict=False)
                logprobs = [self._names.describe(*known, 0) for known in each]
        if not self._call.thinking_shown:
            thought = ""
        return OutputDelta(text, calls, logprobs, thought, token_ids)

    def _add(self, token: int, logprobs: TokenLogprobs | None) -> None:
        mark = self._marks.get(token)
        if self._body is None:
            self._add_to_header(token, logprobs, mark)
        elif mark in _ENDS:
            self._close_body(self.tokens)
        elif mark in (START, CHANNEL):  # the message has no end
            self._close_body(self.tokens - 1)
            self._add_to_header(token, logprobs, mark)
        else:
            self._add_to_body(token, logprobs)
        if mark in _LAST and self.finish is None and not self._call.sampling.ignore_eos:
            self.finish = self._ending()

    def _add_to_header(self, token: int, logprobs: TokenLogprobs | None, mark: str | None) -> None:
        if mark == START:
            self._open_header(self.tokens - 1)
            self._begins_with_start = self._has_role = True
        elif mark == MESSAGE:
            self._open_body(self._kind_of_header())
        elif mark in _ENDS:
            self._keep_header_text()
            self._open_header(self.tokens)
        else:
            self._header.append((token, logprobs))
            if mark == CHANNEL:
                self._has_role = True
            elif not self._has_role:
                self._look_for_role()

    def _look_for_role(self) -> None:
        """Begin the message's text if its first tokens are no role."""
        text = self._header_text()
        role = _ROLE.fullmatch(text, partial=True)
        if role is None or len(self._header) > _LONGEST_ROLE:
            self._begin_text()
        else:
            self._has_role = "to=" in text

    def _begin_text(self) -> None:
        """Begin the message's text with the tokens so far, which have proved to be no header."""
        header = self._header
        self._open_body(_Kind.TEXT)
        for token, logprobs in header:
            if token not in self._marks:
                self._add_to_body(token, logprobs)

    def _keep_header_text(self) -> None:
        """Turn the text of an unfinished header into a message's text unless it reads as a header.

        Called where a message or the answer ends before its header is complete.
        """
        role, channel, named = self._header_text().partition(CHANNEL)
        if self._begins_with_start and not channel:
            return
        if not (_ROLE.fullmatch(role) and _HEADER.fullmatch(named.replace(CONSTRAIN, " "))):
            self._begin_text()
            self._close_body(self.tokens)

    def _header_text(self) -> str:
        tokens = [token for token, _ in self._header]
        return str(self._vocabulary.tokenizer.decode(tokens, skip_special_tokens=False))

    def _kind_of_header(self) -> _Kind:
        header = self._header_text()
        recipient = _RECIPIENT.search(header)
        if recipient is not None and recipient[1] in self._offered:
            self._name = recipient[1]
            return _Kind.CALL
        channel = _CHANNEL.search(header)
        thinks = channel is not None and channel[1] == "analysis"
        return _Kind.THINKING if thinks else _Kind.TEXT

    def _open_header(self, begin: int) -> None:
        self._header, self._begin = [], begin
        self._begins_with_start = self._has_role = False

    def _open_body(self, kind: _Kind, prompt: Sequence[int] = ()) -> None:
        stop = self._stop if kind is _Kind.TEXT else NO_STOP_STRINGS
        least = max(0, self._call.min_tokens - self.tokens)
        tokenizer = self._vocabulary.tokenizer
        self._body = Detokenizer(tokenizer, prompt, stop, least, self._hidden)
        self._kind, self._header, self._is_new = kind, [], True
        self._unsent, self._sent_tokens = [], 0

    def _add_to_body(self, token: int, logprobs: TokenLogprobs | None) -> None:
        assert self._body is not None
        self._unsent.append((token, logprobs))
        self._emit(self._body.push((token,)))
        self._emit_logprobs(self._body)
        if self._body.stopped:
            self.stop_string, self.finish = self._body.stop_string, Ending.STOP

    def _close_body(self, end: int) -> None:
        """End the open message, all of whose text has come.

        end: index after the message's last token.
        """
        if self._finish_body():
            return
        if self._kind is _Kind.THINKING:
            self._thought += end - self._begin
        elif self._kind is _Kind.CALL:
            if self._arguments is None:
                self._emit_call("{}")
            if self._whole_calls == self._calls and not self._parallel:
                self.finish = Ending.TOOL_CALLS
        self._body, self._arguments = None, None
        self._open_header(end)

    def _finish_body(self) -> bool:
        """Emit the text that the open message holds back; return whether a stop string ended it."""
        assert self._body is not None
        self._emit(self._body.finish())
        self._emit_logprobs(self._body)
        if self._body.stopped:
            self.stop_string, self.finish = self._body.stop_string, Ending.STOP
        return self._body.stopped

    def _end(self, finish: Ending) -> None:
        """End the choice for the engine's reason, and close the message that is open.

        The engine does not return the mark at the answer's end, since the mark is a stop token.
        """
        if finish is Ending.LENGTH:
            if self._body is not None:
                self._finish_body()
        elif self._body is not None:
            self._close_body(self.tokens)
        else:
            self._keep_header_text()
        if self.finish is None:
            self.finish = finish if finish is Ending.LENGTH else self._ending()

    def _ending(self) -> Ending:
        whole = 0 < self._calls == self._whole_calls
        return Ending.TOOL_CALLS if whole else Ending.STOP

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._kind is _Kind.CALL:
            self._emit_call(text)
            return
        self._new[self._kind].append(self._gap() + text)
        self._said.add(self._kind)
        self._is_new = False
        self._note_shown()

    def _gap(self) -> str:
        """Return the text to put before the next text of the open message.

        It is an empty line if this is the message's first text, follows an earlier message of its
        kind, and does not begin a block of its own in the stream; else "".
        """
        if not self._is_new or self._kind not in self._said:
            return ""
        opens_block = self._in_blocks and self._shown is not self._kind
        return "" if opens_block and not self._new[self._kind] else _GAP

    def _note_shown(self) -> None:
        if self._kind is not _Kind.THINKING or self._call.thinking_shown:
            self._shown = self._kind

    def _emit_call(self, text: str) -> None:
        """Emit the next part of a call's arguments. Text after the arguments is dropped."""
        if self._arguments is None:
            text = text.lstrip()
            if not text:
                return
            if text[0] != "{":  # no arguments
                self._kind = _Kind.TEXT
                self._emit(text)
                return
            self._arguments = JsonEnd()
            self._note_shown()
            self._new_calls.append(ToolCallPart(self._calls, "", name=self._name))
            self._calls += 1
        elif self._whole_calls == self._calls:
            return
        end = self._arguments.find(text)
        if end is not None:
            self._whole_calls = self._calls
        self._new_calls.append(ToolCallPart(self._calls - 1, text[:end]))

    def _emit_logprobs(self, body: Detokenizer) -> None:
        if not self._wants_logprobs or self._call.return_token_ids:
            self._unsent.clear()
            return
        count = body.sent_tokens - self._sent_tokens
        sent, self._sent_tokens = self._unsent[:count], body.sent_tokens
        del self._unsent[:count]
        if self._kind is _Kind.TEXT:
            self._new_logprobs += [
                self._names.describe(token, logprobs, 0)
                for token, logprobs in sent
                if token not in self._vocabulary.special
            ]


def _marks(vocabulary: Vocabulary) -> dict[int, str]:
    """Return the special tokens that delimit messages, such as <|start|>, by token id."""
    return {vocabulary.added[mark]: mark for mark in _MARKS if mark in vocabulary.added}
