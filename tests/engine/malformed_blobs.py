"""Bad blobs that any holder of an admin's key may send to a server."""

import json
import random
from collections.abc import Iterator
from typing import Any

from lorikeet_engine.adapter_format.header import BLOB_LIMITS
from tests.engine.malformed import (
    BLOB,
    Case,
    Files,
    Json,
    Q,
    entry,
    file_of,
    header,
    raw,
    tensor,
)
from tests.engine.malformed_contents import content_cases

_NO_FILE = "not a safetensors file, or truncated"
_NO_JSON = "header is not valid JSON"


def blob_cases() -> Iterator[Case]:
    yield from _files()
    yield from _headers()
    yield from _entries()
    yield from _offsets()
    yield from content_cases()


def _files() -> Iterator[Case]:
    for size in (0, 1, 7, 8, 9):
        yield raw(f"a file of {size} bytes", _NO_FILE, lambda data, _, n=size: data[:n])
    yield raw("half of the header", _NO_FILE, lambda data, _: data[:200])
    yield raw("half of the data", "truncated", lambda data, draw: data[: -draw.randrange(1, 300)])
    yield raw("one byte short", "truncated", lambda data, _: data[:-1])
    yield raw("one byte too many", "1 bytes after the last tensor", lambda data, _: data + b"\0")
    yield raw("a second file behind", "bytes after the last", lambda data, _: data + data)
    yield raw("a zip file", _NO_FILE, lambda data, _: b"PK\3\4" + data)
    yield raw("a pickle", _NO_FILE, lambda data, _: b"\x80\x04\x95\x0b\0\0\0\0\0\0\0" + data)
    yield raw("a web page", _NO_FILE, lambda *_: b"<!DOCTYPE html><html>Not Found</html>")
    yield raw("zeros", _NO_JSON, lambda *_: bytes(64))
    yield raw("random bytes", _NO_FILE, lambda data, draw: draw.randbytes(len(data)))
    for name, length in (("2^63", 2**63), ("2^64-1", 2**64 - 1), ("2^32", 2**32)):
        yield raw(f"a header of {name} bytes", _NO_FILE, lambda data, _, n=length: _length(data, n))
    yield raw("a header of no bytes", _NO_JSON, lambda data, _: _length(data, 0))
    for by in (-8, -1, 1, 8):
        yield raw(
            f"a header's length that is wrong by {by}",
            _NO_JSON,
            lambda data, _, by=by: _length(data, int.from_bytes(data[:8], "little") + by),
        )


def _length(data: bytes, length: int) -> bytes:
    return length.to_bytes(8, "little") + data[8:]


def _headers() -> Iterator[Case]:
    texts: list[tuple[str, str, bytes]] = [
        ("an array", "not a JSON object", b"[]"),
        ("a number", "not a JSON object", b"17"),
        ("a text", "not a JSON object", b'"header"'),
        ("null", "not a JSON object", b"null"),
        ("an empty object", "bytes after the last tensor", b"{}"),
        ("NaN in it", "NaN is not a JSON number", b'{"x": NaN}'),
        ("Infinity in it", "Infinity is not a JSON number", b'{"x": Infinity}'),
        ("-Infinity in it", "-Infinity is not a JSON number", b'{"x": -Infinity}'),
        ("a key twice", "a key appears twice", b'{"x": 1, "x": 2}'),
        ("a key twice in an entry", "a key appears twice", b'{"x": {"dtype": 1, "dtype": 2}}'),
        ("a line break in a key", "do not print", b'{"a\\nb": 1}'),
        ("an escape in a key", "do not print", b'{"\\u001b[2J": 1}'),
        ("half a surrogate pair in a key", "do not print", b'{"\\ud800": 1}'),
        ("text written backwards in a key", "do not print", b'{"\\u202egnp": 1}'),
        ("bytes that are no UTF-8", _NO_JSON, b'{"\xff\xfe": 1}'),
        ("a cut-off object", _NO_JSON, b'{"x": {"dtype": "F32"'),
        ("a comment", _NO_JSON, b"{} // good"),
        ("single quotes", _NO_JSON, b"{'x': 1}"),
        ("a trailing comma", _NO_JSON, b'{"x": 1,}'),
        ("a number of 5,000 digits", _NO_JSON, b'{"x": ' + b"9" * 5000 + b"}"),
        ("lists in lists", _NO_JSON, b"[" * 100_000),
        ("objects in objects", _NO_JSON, b'{"a":' * 100_000),
        ("a byte order mark and no object", _NO_JSON, b"\xef\xbb\xbf{}"),
    ]
    for name, says, text in texts:
        yield header(f"a header: {name}", says, lambda made, _, text=text: text)
    yield Case("a header over the cap", "the limit is 1000000", _bomb(25_000))
    yield Case("a header of 78 MB", "the limit is 1000000", _bomb(1_300_000))
    yield Case(
        "more tensors than there can be",
        f"than {BLOB_LIMITS.max_tensors}",
        _bomb(BLOB_LIMITS.max_tensors + 1),
    )
    yield Case(
        "tensors with hidden keys",
        f"the limit is {BLOB_LIMITS.max_tensors}",
        _bomb(13_000, hidden=True),
    )
    yield header("a megabyte of nested lists", _NO_JSON, lambda *_: b"[" * 1_000_000)
    yield header(
        "a megabyte of empty lists", "exactly dtype", lambda *_: _json({"x": [[]] * 240_000})
    )
    yield header("a megabyte of text", "exactly dtype", lambda *_: _json({"x": "y" * 999_000}))
    yield header("a name of 900 KB", "a tensor's name of 900000", lambda *_: {"n" * 900_000: {}})
    for name, value in (("a list", []), ("a text", "x"), ("a number in it", 3)):
        value = {"lorikeet": value} if name == "a number in it" else value
        yield header(
            f"metadata: {name}",
            "__metadata__ must map names to texts",
            lambda made, _, v=value: made.update({"__metadata__": v}),
        )
    yield header(
        "no metadata", "not a packed adapter", lambda made, _: made.pop("__metadata__") and made
    )
    yield header(
        "metadata: null",
        "not a packed adapter",
        lambda made, _: made.update({"__metadata__": None}),
    )
    yield header(
        "metadata of others only",
        "not a packed adapter",
        lambda made, _: made.update({"__metadata__": {"format": "pt"}}),
    )


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _bomb(count: int, *, hidden: bool = False) -> Any:
    """Add empty tensors; hidden: write their keys so that counting them as text misses them."""
    dtype = "\\u0064type" if hidden else "dtype"
    size = f'{{"{dtype}":"F32","shape":[0],"data_offsets":[0,0]}}'

    def make(_: random.Random) -> Files:
        text = ",".join(f'"{number:x}":{size}' for number in range(count))
        return {BLOB: file_of(f"{{{text}}}".encode())}

    return make


def _entries() -> Iterator[Case]:
    for key in ("dtype", "shape", "data_offsets"):
        yield entry(f"no {key}", "exactly dtype, shape and data_offsets", {}, drop=key)
        for name, value in (("null", None), ("a number", 7), ("a text", "x"), ("an object", {})):
            says = "convert it to one of F32" if key == "dtype" else "lists of integers"
            yield entry(f"{key}: {name}", says, {key: value})
    yield entry("one key more", "exactly dtype", {"strides": [1]})
    for other in ("F64", "I8", "I16", "I32", "I64", "U8", "BOOL", "F8_E4M3", "f32", ""):
        yield entry(f"dtype {other!r}", f"has dtype '{other}': convert", {"dtype": other})
    yield entry("dtype of a megabyte", "has dtype '.{,60}': convert", {"dtype": "F" * 900_000})
    for name, shape in (
        ("negative", [-2, 8]),
        ("of fractions", [2.0, 8.0]),
        ("of truths", [True, 8]),
        ("of texts", ["2", "8"]),
        ("of lists", [[2], [8]]),
        ("of nine dimensions", [2, 8] + [1] * 7),
        ("beyond 2^48", [2**48, 1]),
        ("that overflows 64 bits", [2**63, 2]),
    ):
        yield entry(f"a shape {name}", "lists of integers", {"shape": shape})
    for name, shape in (("too large", [999, 8]), ("too small", [1, 1]), ("empty", [])):
        yield entry(f"a shape {name}", r"bytes for F32 \[", {"shape": shape})
    yield entry("a shape of 2^47 by 2^47", r"bytes for F32", {"shape": [2**47, 2**47]})


def _offsets() -> Iterator[Case]:
    for name, offsets in (
        ("one", [0]),
        ("three", [0, 4, 8]),
        ("negative", [-4, 60]),
        ("fractions", [0.0, 64.0]),
        ("beyond 2^48", [2**48, 2**48 + 64]),
    ):
        yield entry(f"offsets: {name}", "lists of integers", {"data_offsets": offsets})
    yield header("offsets: reversed", "bytes for F32", _at(lambda at: at[::-1]))
    yield header(
        "offsets: one byte off at the end", "bytes for F32", _at(lambda at: [at[0], at[1] + 1])
    )
    yield header("offsets: all of one behind the file", "truncated|hole", _at(_moved(10**6)))
    yield header("offsets: one byte on", "overlaps|hole|truncated", _at(_moved(1)))
    yield header("offsets: eight bytes back", "overlaps|hole", _at(_moved(-8), first=1))
    yield header("offsets: two tensors in one place", "overlaps", _twins)
    yield header("offsets: a hole in the middle", "follows a hole", _hole)


def _at(change: Any, first: int = 0) -> Any:
    def spoil(made: Json, draw: random.Random) -> None:
        victim = draw.choice(list(made)[1 + first :])
        made[victim]["data_offsets"] = change(made[victim]["data_offsets"])

    return spoil


def _moved(by: int) -> Any:
    return lambda at: [at[0] + by, at[1] + by]


def _twins(made: Json, _: random.Random) -> None:
    made[tensor("A")]["data_offsets"] = made[tensor("A", Q.replace("q_", "o_"))]["data_offsets"]


def _hole(made: Json, draw: random.Random) -> None:
    at = draw.randrange(2, len(made))
    for name in list(made)[at:]:
        made[name]["data_offsets"] = _moved(4)(made[name]["data_offsets"])
