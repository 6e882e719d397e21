"""Prompts that answers repeat: their text and token ids, computed once per call, off the event
loop.
"""

from dataclasses import dataclass

from lorikeet.protocol.messages import EncodedCall, TokenIds
from lorikeet.text.compact_json import dump

_AT_ONCE = 4096  # ids encoded at once: a thread holds the GIL for 0.3 ms


@dataclass(frozen=True, slots=True)
class PromptEchoes:
    """Texts and token ids of a call's prompts, as far as the client wants them in the answer.

    texts: text of each prompt, which the text of the prompt's choices begins with; () without
        `echo`.
    token_ids: JSON of each prompt's token ids; () without `return_token_ids`.
    """

    texts: tuple[str, ...] = ()
    token_ids: tuple[bytes, ...] = ()


NO_ECHOES = PromptEchoes()


def prompt_echoes(call: EncodedCall) -> PromptEchoes:
    """Return the prompts' texts with `echo`, and their token ids with `return_token_ids`.

    Slow for long prompts.
    """
    returned = call.prompts if call.call.return_token_ids else ()
    return PromptEchoes(call.echoed, tuple(map(_json, returned)))


def _json(token_ids: TokenIds) -> bytes:
    starts = range(0, len(token_ids), _AT_ONCE)
    parts = (token_ids[at : at + _AT_ONCE].tolist() for at in starts)
    return b"[%s]" % b",".join([dump(part)[1:-1] for part in parts])
