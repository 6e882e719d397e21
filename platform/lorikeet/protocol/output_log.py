"""Log of the engine's outputs for one answer, by which another replica goes on with the answer.

A replica sends the log of its outputs with the items that it makes of them; the gateway keeps the
log unread. If the replica is lost, another replica gets the log, converts the same outputs again
and drops the items, which the client has, so that the next items follow without a gap. The log
keeps outputs apart, since an answer's events depend on where each output ends.
"""

import json
from collections.abc import Iterator

from lorikeet_engine.request import EngineTimings, FinishReason, TokenLogprobs, Tokens

_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)


def logged(output: Tokens) -> bytes:
    """Return a record of one output of the engine: a line of JSON of about 25 bytes.

    The records of an answer's outputs are its log, from which another replica goes on with the
    answer if this one is lost.
    """
    if output.finish is None and output.timings is None and not output.logprobs:
        ids = ",".join(map(str, output.token_ids))  # most outputs: in a third of the time
        return f"[{output.choice},[{ids}],null,null,[]]\n".encode()
    finish = None if output.finish is None else output.finish.value
    cached = None if output.timings is None else output.timings.cached_tokens
    logprobs = [(each.logprob, each.top) for each in output.logprobs]
    record = (output.choice, output.token_ids, finish, cached, logprobs)
    return _ENCODER.encode(record).encode() + b"\n"


def outputs_of(log: bytes | bytearray, request_id: str) -> Iterator[Tokens]:
    """Yield the engine's outputs that are recorded in a log, the lines that `logged` made.

    Of an output's timings, only the number of cached tokens is recorded.

    request_id: id that the outputs get, since the log has none.
    """
    for line in log.splitlines():
        choice, token_ids, finish, cached, logprobs = json.loads(line)
        yield Tokens(
            request_id,
            choice,
            tuple(token_ids),
            None if finish is None else FinishReason(finish),
            tuple(TokenLogprobs(value, tuple(map(tuple, top))) for value, top in logprobs),
            None if cached is None else EngineTimings(cached_tokens=cached),
        )


def tokens_in(log: bytes | bytearray) -> int:
    """Return the number of tokens of the outputs in a log, the lines that `logged` made."""
    return sum(len(output.token_ids) for output in outputs_of(log, ""))
