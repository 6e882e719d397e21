"""Types of request fields. Their parsers report one error for any number of bad values."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from lorikeet.apis.body import unsupported
from lorikeet_engine.request import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY

INT32 = 2**31 - 1
MAX_CHOICES = 128
MAX_TEXTS = 2048
"""Largest number of texts that one request embeds, as at OpenAI, ranks, or scores in pairs."""
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_BIASES = 1024
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
KIND = "^[a-z0-9_]{1,40}$"
"""Pattern that the `type` of a tool, block or item matches."""
_WORDS = re.compile(r"[a-z]+\d{0,2}(_([a-z]+\d{0,2}|\d+))*")  # such as bash_20250124

TokenId = Annotated[int, Field(ge=0, le=INT32)]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=0, le=INT32)]
AnyTopK = Annotated[int, Field(ge=-1, le=INT32)]
"""top_k as vLLM takes it: -1 and 0 keep all tokens."""
MinP = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]
Prompt = str | tuple[int, ...]


def _parse_stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise ValueError(f"want a string or a list of at most {MAX_STOPS}")
    if not all(isinstance(stop, str) and 1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise ValueError(f"want strings of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(stops)


def _parse_prompts(
    value: object, most: int = MAX_CHOICES, of_each: str = " times n"
) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _are_token_ids(value):
            return (tuple(value),)
        if len(value) > most:
            raise ValueError(f"want token ids, or at most {most} prompts{of_each}")
        if all(isinstance(prompt, str) for prompt in value):
            return tuple(value)
        if all(isinstance(prompt, list) and _are_token_ids(prompt) for prompt in value):
            return tuple(tuple(prompt) for prompt in value)
    raise ValueError(
        "want a string, a list of strings, a list of token ids, or a list of lists of token ids; "
        "no list may be empty"
    )


def _parse_documents(value: object) -> tuple[str, ...]:
    listed = value if isinstance(value, list) else [value]
    if not 1 <= len(listed) <= MAX_TEXTS:
        raise ValueError(f"want 1 to {MAX_TEXTS} texts")
    texts: list[Any] = [
        each["text"] if isinstance(each, dict) and [*each] == ["text"] else each for each in listed
    ]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("want a string, or a list of strings or of objects with `text` alone")
    return tuple(texts)


def _are_token_ids(values: Sequence[Any]) -> bool:
    return bool(values) and all(type(i) is int and 0 <= i <= INT32 for i in values)


def _parse_biases(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise ValueError(f"want an object of at most {MAX_BIASES} token ids, each with its bias")
    if not all(map(_is_token_id, value)):
        raise ValueError("want token ids as keys")
    if not all(type(bias) in (int, float) and -100 <= bias <= 100 for bias in value.values()):
        raise ValueError("want biases of -100 to 100")
    return tuple((int(token), float(bias)) for token, bias in value.items())


def _is_token_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= INT32


def _parse_metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise ValueError(f"want an object of at most {MAX_METADATA} strings")
    if not all(isinstance(text, str) for text in value.values()):
        raise ValueError("want strings")
    if any(len(k) > MAX_METADATA_KEY or len(v) > MAX_METADATA_VALUE for k, v in value.items()):
        raise ValueError(
            f"want keys of at most {MAX_METADATA_KEY} characters and values of at most "
            f"{MAX_METADATA_VALUE}"
        )
    return value


def refuse_kind(value: object, known: Sequence[str], instead: str) -> object:
    """Return the `type` of a tool, block or item unchanged. Raises a validation error
    (body.unsupported), which quotes the type, if it is unsupported.

    A value that does not look like a type's name could be a secret. It is returned for later
    checks, and never quoted.

    known: supported types.
    instead: advice for the error: what the client can do instead.
    """
    looks_like_one = (
        isinstance(value, str) and re.fullmatch(KIND, value) and _WORDS.fullmatch(value)
    )
    if looks_like_one and value not in known:
        raise unsupported(hint=f" ({value}): {instead}")
    return value


Stop = Annotated[
    tuple[str, ...], PlainValidator(_parse_stop, json_schema_input_type=str | list[str])
]
Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(
        _parse_prompts,
        json_schema_input_type=str | list[str] | list[TokenId] | list[list[TokenId]],
    ),
]
Texts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(
        lambda value: _parse_prompts(value, MAX_TEXTS, ""),
        json_schema_input_type=str | list[str] | list[TokenId] | list[list[TokenId]],
    ),
]
"""Prompts to embed."""
Documents = Annotated[
    tuple[str, ...],
    PlainValidator(
        _parse_documents,
        json_schema_input_type=str | list[str | dict[Literal["text"], str]],
    ),
]
"""Texts to score in pairs, or to rank: strings, or objects with a `text` as of Cohere and Jina."""
Biases = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_parse_biases, json_schema_input_type=dict[str, float]),
]
Metadata = Annotated[
    dict[str, str], PlainValidator(_parse_metadata, json_schema_input_type=dict[str, str])
]
