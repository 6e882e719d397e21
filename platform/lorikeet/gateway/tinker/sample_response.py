"""Conversion of a completion's JSON body to Tinker's SampleResponse, a protobuf message.

Field numbers are those of tinker_public.proto in the package `tinker` 0.38. The message needs only
two wire types, varints and length-delimited values
(https://protobuf.dev/programming-guides/encoding), which this module encodes itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from pydantic_core import from_json

_STOP, _LENGTH = 0, 1
_NO_LOGPROB = -99999.0
"""Log probability by which the client recognises a place without a token; its token is 0."""

Top = Sequence[tuple[int, float]]
"""Most likely tokens at one position, likeliest first, with their log probabilities."""


class WantedLogprobs(NamedTuple):
    """Log probabilities that a request asks for.

    prompt: whether those of the prompt's tokens are wanted.
    last: number of the prompt's last tokens that get log probabilities; None: all but the first.
    top_prompt, top_sample: number of most likely tokens at each position of prompt and samples.
    """

    prompt: bool
    last: int | None
    top_prompt: int
    top_sample: int


def sample_response(body: bytes, wanted: WantedLogprobs) -> bytes:
    """Return the SampleResponse of a completion.

    body: the completion's JSON, with token ids, log probabilities that name tokens by id and, if
        the prompt's are wanted, prompt_logprobs.
    """
    answer = from_json(body)
    choices, cached = answer["choices"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    fields = [_bytes(1, _sequence(choice, wanted.top_sample)) for choice in choices]
    if (entries := choices[0].get("prompt_logprobs")) is not None:
        first = len(entries) - (wanted.last or len(entries))
        entries = [None] * first + entries[first:]
        if wanted.prompt:
            own = [np.nan if entry is None else _own(entry) for entry in entries]
            fields.append(_bytes(2, _floats(own)))
        if wanted.top_prompt:
            tops = [() if entry is None else _top_of_prompt(entry) for entry in entries]
            fields.append(_bytes(3, _top(tops, wanted.top_prompt)))
    return b"".join([*fields, _number(4, cached)])


def _sequence(choice: Mapping[str, Any], top: int) -> bytes:
    """Return the message SampledSequence of a choice."""
    known = choice["logprobs"]
    fields = [
        _number(1, _LENGTH if choice["finish_reason"] == "length" else _STOP),
        _bytes(2, _ints(choice["token_ids"])),
        _bytes(3, _floats(known["token_logprobs"])),
    ]
    if top:
        tops = [
            [(int(name.removeprefix("token_id:")), likely) for name, likely in entry.items()]
            for entry in known["top_logprobs"]
        ]
        fields.append(_bytes(4, _top([each[:top] for each in tops], top)))
    return b"".join(fields)


def _own(entry: Mapping[str, Any]) -> float:
    """Return the log probability of a prompt's own token: the first in its position's entry."""
    return float(next(iter(entry.values()))["logprob"])


def _top_of_prompt(entry: Mapping[str, Any]) -> Top:
    ranked = sorted(entry.items(), key=lambda each: each[1]["rank"])
    return [(int(token), known["logprob"]) for token, known in ranked]


def _top(tops: Sequence[Top], most: int) -> bytes:
    """Return the message TopkLogprobs.

    tops: most likely tokens at each position; those beyond `most` are left out.
    """
    tokens = np.zeros((len(tops), most), "<i4")
    logprobs = np.full((len(tops), most), _NO_LOGPROB, "<f4")
    for at, top in enumerate(tops):
        for place, (token, likely) in enumerate(top[:most]):
            tokens[at, place], logprobs[at, place] = token, likely
    matrices = _bytes(1, tokens.tobytes()) + _bytes(2, logprobs.tobytes())
    return matrices + _number(3, most) + _number(4, len(tops))


def _ints(values: Sequence[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


def _floats(values: Sequence[float]) -> bytes:
    return np.array(values, "<f4").tobytes()


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    coded = bytearray()
    while value > 0x7F:
        coded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*coded, value])
