"""What answers repeat of their prompts, made once for all choices, and off the event loop."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from lorikeet.protocol.messages import Call

_AT_ONCE = 4096  # ids, for which a thread keeps the interpreter to itself: 0.3 ms


@dataclass(frozen=True, slots=True)
class ToldPrompts:
    """Texts with which answers' texts begin, and token ids in JSON, of each prompt; () if unasked.

    A call asks for the one with `echo`, for the other with `return_token_ids`.
    """

    texts: tuple[str, ...] = ()
    token_ids: tuple[bytes, ...] = ()


NOTHING_TOLD = ToldPrompts()


def told_prompts(call: Call, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer) -> ToldPrompts:
    """Return what an answer to a call repeats of its prompts. prompts: as encoded."""
    given = call.prompts if call.echo else ()
    texts = tuple(
        each if isinstance(each, str) else str(tokenizer.decode(list(each))) for each in given
    )
    told = prompts if call.return_token_ids else ()
    return ToldPrompts(texts, tuple(map(_json, told)))


def _json(token_ids: Sequence[int]) -> bytes:
    parts = [
        json.dumps(token_ids[at : at + _AT_ONCE], separators=(",", ":"))[1:-1]
        for at in range(0, len(token_ids), _AT_ONCE)
    ]
    return f"[{','.join(parts)}]".encode("ascii")
