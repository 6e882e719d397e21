"""One choice of an answer, from tokens to thinking, text and tool calls."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from lorikeet.protocol.messages import Call, Thinking
from lorikeet.text.choice import Ending, ToolCallPart
from lorikeet.text.detokenizer import Detokenizer, StopStrings, Vocabulary
from lorikeet.text.logprobs import SampledToken
from lorikeet.text.prompt_echoes import PromptEchoes
from lorikeet.text.reasoning import THINK_TAGS, ReasoningParser, ThinkTags
from lorikeet.text.tools.calls import ForcedCallParser, ToolCallParser
from lorikeet.text.tools.forced_gemma_calls import ForcedGemmaParser
from lorikeet.text.tools.forced_xml_calls import ForcedXmlParser
from lorikeet.text.tools.syntax import CallStyle, ToolSyntax
from lorikeet_engine.request import TokenLogprobs, Tokens

CallParser = ToolCallParser | ForcedCallParser | ForcedGemmaParser | ForcedXmlParser


class OutputDelta(NamedTuple):
    """New part of a choice: thinking, then text, then tool calls.

    logprobs: log probabilities of the tokens of `text`, or of all of `token_ids` if these are asked
        for; empty if no log probabilities are asked for.
    token_ids: ids of all new tokens; empty if not asked for.
    """

    text: str
    calls: Sequence[ToolCallPart]
    logprobs: Sequence[SampledToken]
    reasoning: str
    token_ids: Sequence[int]


class ChoiceStream:
    """Converter of one choice's tokens into thinking, text and tool calls.

    finish: reason for the choice's end; set with the last delta.

    Constructor arguments:
    text: the choice's detokenizer.
    parser: parser of tool calls; None if the model may call no tools.
    vocabulary: names of tokens; None if no logprobs are asked for.
    echo: prompt text that the choice's text begins with; None without `echo`. With an echo,
        special tokens have logprobs too: clients that know the prompt's number of tokens expect
        one entry for each.
    reasoning: parser of thinking, which the detokenizer `text` feeds; None if the model does
        not think.
    thinking_shown: whether deltas include the thinking.
    returns_token_ids: whether deltas include token ids.
    """

    def __init__(
        self,
        text: Detokenizer,
        parser: CallParser | None,
        vocabulary: Vocabulary | None,
        echo: str | None,
        reasoning: ReasoningParser | None,
        *,
        thinking_shown: bool,
        returns_token_ids: bool,
    ) -> None:
        self._text = text
        self._parser = parser
        self._vocabulary = vocabulary
        self._echo = echo or ""
        self._echo_length = len(self._echo)
        self._without_logprobs = (
            vocabulary.special if vocabulary is not None and echo is None else ()
        )
        self._reasoning = reasoning
        self._thinking_shown, self._returns_token_ids = thinking_shown, returns_token_ids
        self._sent_tokens = 0  # whose logprobs are sent
        self._unsent: list[tuple[int, TokenLogprobs]] = []
        self.finish: Ending | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens of the choice received so far."""
        return self._text.tokens

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens of the choice's thinking, including the closing tag."""
        if self._reasoning is None:
            return 0
        if self._reasoning.thinks:
            return self.tokens
        closed_at = self._reasoning.closed_at
        return 0 if closed_at is None else bisect_left(self._text.offsets, closed_at)

    @property
    def stop_string(self) -> str | None:
        """Stop string that ended the choice; None if no stop string did."""
        return self._text.stop_string

    def take(self, output: Tokens) -> OutputDelta:
        """Convert new tokens of the choice; return the new thinking, text and tool calls.

        Tokens after a stop string or a single tool call are not part of the choice.
        """
        parser, count = self._parser, len(output.token_ids)
        if not isinstance(parser, ToolCallParser) or parser.parallel or count < 2:
            return self._take(output)
        deltas = list[OutputDelta]()
        for at in range(count):  # the call may end at each
            one = replace(
                output,
                token_ids=output.token_ids[at : at + 1],
                logprobs=output.logprobs[at : at + 1],
                finish=output.finish if at == count - 1 else None,
            )
            deltas.append(self._take(one))
            if self.finish is not None:
                break
        return OutputDelta(
            "".join(delta.text for delta in deltas),
            [call for delta in deltas for call in delta.calls],
            [scored for delta in deltas for scored in delta.logprobs],
            "".join(delta.reasoning for delta in deltas),
            [token for delta in deltas for token in delta.token_ids],
        )

    def _take(self, output: Tokens) -> OutputDelta:
        begin = self.tokens
        text = self._text.push(output.token_ids)
        if output.finish is not None:
            self.finish = Ending(output.finish.value)
            text += self._text.finish()
        if self._text.stopped:
            self.finish = Ending.STOP
        if self._echo:
            text, self._echo = self._echo + text, ""
        calls: Sequence[ToolCallPart] = ()
        if self._parser is not None:
            text, calls = self._parser.push(text, last=self.finish is not None)
            if self._parser.done or (self._parser.called and self.finish is Ending.STOP):
                self.finish = Ending.TOOL_CALLS
        thought = "" if self._reasoning is None else self._reasoning.take()
        if not self._thinking_shown:
            thought = ""
        # none after a stop string
        token_ids = output.token_ids[: self.tokens - begin] if self._returns_token_ids else ()
        if self._vocabulary is None:
            return OutputDelta(text, calls, (), thought, token_ids)
        self._unsent += zip(output.token_ids, output.logprobs, strict=True)
        if self._returns_token_ids:
            vocabulary, new, end = self._vocabulary, range(begin, self.tokens), self.tokens
            logprobs = [self._describe(vocabulary, at) for at in new]
        else:
            logprobs, end = self._sent_logprobs(self._vocabulary)
        # Twenty alternatives take 2 KB, and a replica holds thousands of unsent tokens.
        del self._unsent[: end - self._sent_tokens]
        self._sent_tokens = end
        return OutputDelta(text, calls, logprobs, thought, token_ids)

    def _sent_logprobs(self, vocabulary: Vocabulary) -> tuple[list[SampledToken], int]:
        """Return the logprobs of the answer text that is sent now, and the number of tokens sent so
        far.

        Tokens of thinking and of tool calls have no logprobs but are counted as sent.
        """
        parser, offsets, begin = self._parser, self._text.offsets, self._sent_tokens
        end = self._text.sent_tokens
        removed, answer = self._answer_begin()
        if parser is not None and self.finish is None:
            end = bisect_left(offsets, removed + parser.parsed, begin, end)
        listed = [
            self._describe(vocabulary, at)
            for at in range(max(begin, answer), end)
            if self._unsent[at - begin][0] not in self._without_logprobs
            and (parser is None or parser.is_text(max(0, offsets[at] - removed)))
        ]
        return listed, end

    def _answer_begin(self) -> tuple[int, int]:
        """Return the indices of the first character and first token after the thinking."""
        if self._reasoning is None:
            return 0, 0
        removed = self._reasoning.removed
        thinks = self._reasoning.thinks
        return removed, self.tokens if thinks else self._text.tokens_until(removed)

    def _describe(self, vocabulary: Vocabulary, at: int) -> SampledToken:
        token, logprobs = self._unsent[at - self._sent_tokens]
        return vocabulary.describe(token, logprobs, self._echo_length + self._text.offsets[at])


def open_choice(
    call: Call,
    index: int,
    prompt: Sequence[int],
    vocabulary: Vocabulary,
    syntax: ToolSyntax | None,
    thinking: Thinking,
    stop: StopStrings,
    echoes: PromptEchoes,
    tags: ThinkTags = THINK_TAGS,
) -> ChoiceStream:
    """Create the ChoiceStream of one choice of a call.

    index: index of the prompt that the choice continues.
    prompt: token ids of that prompt.
    syntax: the model's syntax for tool calls; None if it may call no tools.
    thinking: whether the model's thinking may come before the answer, or has begun in the
        prompt.
    stop: stop strings of the call.
    echoes: texts and token ids of the prompts, as far as the client wants them in the answer.
    tags: the model's tags of thinking.
    """
    shown: list[str] = []
    reasoning = None
    if thinking is not Thinking.NEVER:
        reasoning = ReasoningParser(thinking, tags)
        shown += tags.marks
    parser: CallParser | None = None
    if call.tools is not None and syntax is not None:
        match syntax.style if call.tools.forced else None:
            case CallStyle.JSON | CallStyle.NAMED:
                parser = ForcedCallParser(syntax)
            case CallStyle.GEMMA:
                parser = ForcedGemmaParser(syntax)
            case CallStyle.XML:
                parser = ForcedXmlParser(syntax, call.tools)
            case _:
                parser = ToolCallParser(syntax, call.tools)
        shown += syntax.tokens
    parsed = parser is not None or reasoning is not None
    hidden = vocabulary.special_except(shown) if parsed else None
    if call.sampling.keep_stop_token:  # it has logprobs, but is no text
        hidden = (hidden or vocabulary.special).union(call.sampling.stop_token_ids)
    echo = echoes.texts[index] if call.echo else None
    text = Detokenizer(vocabulary.tokenizer, prompt, stop, call.min_tokens, hidden, reasoning)
    logprob_vocabulary = None
    if call.sampling.logprobs is not None:
        logprob_vocabulary = vocabulary.by_id if call.tokens_as_ids else vocabulary
    return ChoiceStream(
        text,
        parser,
        logprob_vocabulary,
        echo,
        reasoning,
        thinking_shown=call.thinking_shown,
        returns_token_ids=call.return_token_ids,
    )
