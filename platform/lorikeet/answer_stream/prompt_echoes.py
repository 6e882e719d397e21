"""What answers repeat of their prompts, made once for all choices, and off the event loop."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from lorikeet.answer_stream.compact_json import dump
from lorikeet.protocol.messages import Call

_AT_ONCE = 4096  # ids, for which a thread keeps the interpreter to itself: 0.3 ms


@dataclass(frozen=True, slots=True)
class PromptEchoes:
    """Texts with which answers' texts begin, and token ids in JSON, of each prompt; () if unasked.

    A call asks for the one with `echo`, for the other with `return_token_ids`.
    """

    texts: tuple[str, ...] = ()
    token_ids: tuple[bytes, ...] = ()


NO_ECHOES = PromptEchoes()


def prompt_echoes(
    call: Call, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
) -> PromptEchoes:
    """Return what an answer to a call repeats of its prompts. prompts: as encoded."""
    given = call.prompts if call.echo else ()
    texts = tuple(
        each if isinstance(each, str) else str(tokenizer.decode(list(each))) for each in given
    )
    returned = prompts if call.return_token_ids else ()
    return PromptEchoes(texts, tuple(map(_json, returned)))


def _json(token_ids: Sequence[int]) -> bytes:
    starts = range(0, len(token_ids), _AT_ONCE)
    return b"[%s]" % b",".join([dump(token_ids[at : at + _AT_ONCE])[1:-1] for at in starts])
