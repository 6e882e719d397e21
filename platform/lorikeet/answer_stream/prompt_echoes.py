"""Prompts that answers repeat: their text and token ids, computed once per call, off the event
loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from lorikeet.answer_stream.compact_json import dump
from lorikeet.protocol.messages import Call

_AT_ONCE = 4096  # ids encoded at once: a thread holds the GIL for 0.3 ms


@dataclass(frozen=True, slots=True)
class PromptEchoes:
    """Prompts of one call, in the forms in which its answer repeats them.

    texts: text of each prompt, which the text of the prompt's choices begins with; () without
        `echo`.
    token_ids: JSON of each prompt's token ids; () without `return_token_ids`.
    """

    texts: tuple[str, ...] = ()
    token_ids: tuple[bytes, ...] = ()


NO_ECHOES = PromptEchoes()


def prompt_echoes(
    call: Call, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
) -> PromptEchoes:
    """Return a call's prompts in the forms that its answer repeats.

    prompts: token ids of each prompt.
    """
    given = call.prompts if call.echo else ()
    texts = tuple(
        each if isinstance(each, str) else str(tokenizer.decode(list(each))) for each in given
    )
    returned = prompts if call.return_token_ids else ()
    return PromptEchoes(texts, tuple(map(_json, returned)))


def _json(token_ids: Sequence[int]) -> bytes:
    starts = range(0, len(token_ids), _AT_ONCE)
    return b"[%s]" % b",".join([dump(token_ids[at : at + _AT_ONCE])[1:-1] for at in starts])
