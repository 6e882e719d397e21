"""Encoding of a call: its prompts as token ids, within the context."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from lorikeet.errors import ContextLengthExceeded, InvalidInput
from lorikeet.protocol.messages import Call, EncodedCall, Thinking, TokenIds
from lorikeet.text.prompts import PromptEncoder
from lorikeet.text.reasoning import ThinkTags

_SHORT_CHARACTERS = 1024
"""Limit on the characters of a call that is encoded in a fraction of a millisecond."""
_PROMPT_CHARACTERS = 20
"""Number of characters whose encoding takes as long as what each message or prompt takes beside its
text.
"""


def encode_call(call: Call, encoder: PromptEncoder, max_context: int) -> EncodedCall:
    """Return a call with the token ids of its prompts. Slow for long prompts.

    max_context: longest sequence that the engine takes, tokens.

    Raises InvalidInput if the prompts cannot be encoded, or leave no room for an answer.
    """
    prompts = encoder.encode(call, max_context)
    if call.head is not None:
        prompts = tuple(_without_padding(ids, _pad_token(call, encoder)) for ids in prompts)
    if not call.endpoint.counts:
        check_context(call, prompts, max_context)
    thinking = encoder.thinking(call, prompts)
    check_begun_answer(call, thinking, encoder.think_tags)
    echoed = echoed_texts(call, encoder.backend)
    own = call.defaults is not None and call.defaults.chat_template is not None
    marks = encoder.marks() if own else None
    return EncodedCall(call, prompts, thinking, echoed, encoder.ignored(call), marks)


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
    """Raise InvalidInput if an answer that continues a message must have a format.

    A grammar describes whole answers, and would begin anew behind the message.

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
    """Return the text of each prompt that a call's answer repeats; () without `echo`."""
    given = call.prompts if call.echo else ()
    return tuple(
        each if isinstance(each, str) else str(tokenizer.decode(list(each))) for each in given
    )


def _pad_token(call: Call, encoder: PromptEncoder) -> int | None:
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
