"""Bad blobs: what a server may be sent by anyone who has an admin's key."""

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from lorikeet_engine.adapter_format.header import MAX_TENSORS
from tests.engine.malformed import (
    BLOB,
    Case,
    Files,
    Json,
    Q,
    Tensors,
    entry,
    file_of,
    header,
    metadata,
    raw,
    renamed,
    tensor,
    weights,
)

_NO_FILE = "not a safetensors file, or truncated"
_NO_JSON = "header is not valid JSON"


def blob_cases() -> Iterator[Case]:
    yield from _files()
    yield from _headers()
    yield from _entries()
    yield from _offsets()
    yield from _names()
    yield from _shapes()
    yield from _values()
    yield from _configs()


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
    yield Case("more tensors than there can be", f"than {MAX_TENSORS}", _bomb(MAX_TENSORS + 1))
    yield Case(
        "tensors with hidden keys", f"the limit is {MAX_TENSORS}", _bomb(13_000, hidden=True)
    )
    yield header("a megabyte of nested lists", _NO_JSON, lambda *_: b"[" * 1_000_000)
    yield header(
        "a megabyte of empty lists", "exactly dtype", lambda *_: _json({"x": [[]] * 240_000})
    )
    yield header("a megabyte of text", "exactly dtype", lambda *_: _json({"x": "y" * 999_000}))
    yield header("a name of 900 KB", "a tensor's name of 900000", lambda *_: {"n" * 900_000: {}})
    for name, value in (("a list", []), ("a text", "x"), ("null", None), ("a number in it", 3)):
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
        "metadata of others only",
        "not a packed adapter",
        lambda made, _: made.update({"__metadata__": {"format": "pt"}}),
    )


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _bomb(count: int, *, hidden: bool = False) -> Any:
    """Empty tensors, whose keys may be written so that counting them as text misses them."""
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


def _names() -> Iterator[Case]:
    for name, says, old, new in (
        ("of DoRA", "DoRA is not supported", "lora_A.weight", "lora_magnitude_vector"),
        ("of embeddings", "embeddings is not supported", "lora_A.weight", "lora_embedding_A"),
        ("of whole modules", "whole modules", "lora_A", "modules_to_save"),
        ("of biases", "biases are not", "lora_B.weight", "lora_B.bias"),
        ("of the base model", "base model's own weights", "lora_A", "base_layer"),
        ("of originals", "whole modules", "lora_A", "original_module"),
        ("without PEFT's prefix", "not part of a LoRA", "base_model.model.", ""),
        ("of a side C", "not part of a LoRA", "lora_A", "lora_C"),
        ("of a named adapter", "not part of a LoRA", "lora_A", "lora_A.mine"),
        ("in capitals", "not part of a LoRA", "lora_A", "LORA_A"),
        ("that lead out", "not part of a LoRA", "base_model", "../../etc"),
        ("with a space", "not part of a LoRA", "q_proj", "q proj"),
        ("of the encoder", "not part of a LoRA", "base_model", "encoder"),
        ("of layer -1", "not part of a LoRA", "layers.0", "layers.-1"),
        ("of layer 00", "cannot be adapted", "layers.0", "layers.00"),
        ("of layer 1", "the base model has 1 layers", "layers.0", "layers.1"),
        ("of layer 99999", "the base model has 1 layers", "layers.0", "layers.99999"),
        ("of layer 10^9", "cannot be adapted", "layers.0", "layers.1000000000"),
        ("of layer ²", "cannot be adapted", "layers.0", "layers.²"),
        ("of a linear that is none", "cannot be adapted", "q_proj", "z_proj"),
        ("of an MLP's q_proj", "cannot be adapted", "self_attn.q_proj", "mlp.q_proj"),
        ("of an attention's up_proj", "cannot be adapted", "mlp.up_proj", "self_attn.up_proj"),
        ("of the head", "lm_head cannot be adapted", Q, "lm_head"),
        ("of the embeddings' linear", "embed_tokens cannot be", Q, "model.embed_tokens"),
        ("of an expert", "cannot be adapted", "mlp.up", "mlp.experts.3.up"),
        ("of another family", "cannot be adapted", "model.layers.0", "transformer.h.0"),
        ("of a fused linear", "cannot be adapted", "q_proj", "qkv_proj"),
        ("of 400 characters", "not part of a LoRA", "q_proj", "q" * 400),
        ("of 600 characters", "a tensor's name of", "q_proj", "q" * 600),
        ("that are empty", "not part of a LoRA", tensor("A"), ""),
    ):
        yield renamed(f"names {name}", says, old, new)
    for side, other in ("AB", "BA"):
        yield weights(
            f"no lora_{side} beside lora_{other}",
            f"lora_{side}.weight is missing beside its other half",
            lambda given, draw, s=side: given.pop(draw.choice([n for n in given if f"_{s}." in n])),
        )
        yield weights(
            f"lora_{side} under both of its names",
            f"two tensors are lora_{side} of",
            lambda given, _, s=side: given.update(
                {tensor(s).replace(".weight", ".default.weight"): given[tensor(s)]}
            ),
        )
    yield weights("no tensors", "no LoRA weights", lambda given, _: given.clear())


def _shapes() -> Iterator[Case]:
    a, b, mlp = tensor("A"), tensor("B"), "model.layers.0.mlp"
    b_of_k = b.replace("q_proj", "k_proj")
    for name, says, key, shape in (
        ("A of one dimension", "are not \\[rank, d_in\\]", a, (16,)),
        ("A of three dimensions", "are not \\[rank, d_in\\]", a, (2, 8, 1)),
        ("A of no dimension", "are not \\[rank, d_in\\]", a, ()),
        ("A on its side", "are not \\[rank, d_in\\]", a, (8, 2)),
        ("A of rank 0", "are not \\[rank, d_in\\]", a, (0, 8)),
        ("A of another rank than B", "are not \\[rank, d_in\\]", a, (3, 8)),
        ("A of 7 inputs", "maps 7 to 8", a, (2, 7)),
        ("A of 9 inputs", "maps 9 to 8", a, (2, 9)),
        ("A of no inputs", "are not", a, (2, 0)),
        ("B of one dimension", "are not \\[rank, d_in\\]", b, (16,)),
        ("B of three dimensions", "are not \\[rank, d_in\\]", b, (8, 2, 1)),
        ("B on its side", "are not \\[rank, d_in\\]", b, (2, 8)),
        ("B of 16 outputs", "maps 8 to 16", b, (16, 2)),
        ("B of no outputs", "are not", b, (0, 2)),
        ("B of key heads for every query head", "k_proj maps 8 to 8", b_of_k, (8, 2)),
        ("B of a wider MLP", "up_proj maps 8 to 24", tensor("B", f"{mlp}.up_proj"), (24, 2)),
        ("A of a wider MLP", "down_proj maps 24 to 8", tensor("A", f"{mlp}.down_proj"), (2, 24)),
    ):
        yield weights(name, says, _with(key, shape))
    yield weights("rank 5 of at most 4", "has rank 5: the limit is 4", _rank(5), r=5)
    yield weights("rank 1 where the config says 2", "have rank 1 and the config says 2", _rank(1))
    yield weights(
        "a pattern of another rank",
        "have rank 2 and the config says 3",
        _rank(2),
        rank_pattern={Q: 3},
    )


def _with(key: str, shape: tuple[int, ...]) -> Any:
    return lambda given, _: given.update({key: np.ones(shape, np.float32)})


def _rank(rank: int) -> Any:
    def spoil(given: Tensors, _: random.Random) -> None:
        for name, value in given.items():
            d_in, d_out = value.shape[1], value.shape[0]
            shape = (rank, d_in) if "lora_A" in name else (d_out, rank)
            given[name] = np.ones(shape, np.float32)

    return spoil


def _values() -> Iterator[Case]:
    bits = {"F32": (4, 0x7F800000), "F16": (2, 0x7C00), "BF16": (2, 0x7F80)}
    for dtype, (width, infinity) in bits.items():
        sign = 1 << (8 * width - 1)
        for name, value in (
            ("Inf", infinity),
            ("-Inf", infinity | sign),
            ("NaN", infinity + 1),
            ("-NaN", infinity | sign | 1),
        ):
            for side in "AB":
                yield weights(
                    f"{name} in lora_{side} as {dtype}",
                    f"layers.0.[a-z]+_proj.lora_{side} holds NaN or Inf",
                    _poison(side, dtype, width, value),
                )
    yield weights(
        "B that its scaling makes infinite",
        r"lora_B holds inf, which float32 cannot hold",
        lambda given, _: given.update({tensor("B"): np.full((8, 2), 3e38, np.float32)}),
    )


def _poison(side: str, dtype: str, width: int, value: int) -> Any:
    def spoil(given: Tensors, draw: random.Random) -> None:
        name = draw.choice([key for key in given if f"lora_{side}" in key])
        shape = given[name].shape
        data = bytearray(width * shape[0] * shape[1])
        at = width * draw.randrange(shape[0] * shape[1])
        data[at : at + width] = value.to_bytes(width, "little")
        given[name] = dtype, shape, bytes(data)

    return spoil


def _configs() -> Iterator[Case]:
    for key in ("base_model_name_or_path", "r", "lora_alpha", "rank_pattern", "peft_type"):
        yield metadata(
            f"config without {key}",
            rf"other keys than expected: \['{key}'\]",
            lambda made, key=key: {k: v for k, v in made.items() if k != key},
        )
    yield metadata("config with a key more", r"\['use_dora'\]", lambda made: made | {"use_dora": 1})
    for name, says, text in (
        ("no JSON", "not valid JSON", "{"),
        ("an array", "not a JSON object", "[]"),
        ("empty", "not valid JSON", ""),
        ("NaN for alpha", "NaN is not a JSON number", '{"lora_alpha": NaN}'),
    ):
        yield metadata(f"blob config: {name}", says, lambda _, text=text: text)
    for key, values in {
        "r": (0, -1, True, "2", 2.0, None, 2**31, [2]),
        "lora_alpha": ("4", None, 1e10, -1e10, [4], True),
        "use_rslora": (1, "yes", None),
        "rank_pattern": ([], None, "x", {Q: 0}, {Q: "2"}, {Q: {}}),
        "alpha_pattern": ([], 3, {Q: None}, {Q: "4"}),
        "peft_type": ("IA3", None, 7),
        "base_model_name_or_path": (7, None, "x" * 600),
    }.items():
        for value in values:
            shown = repr(value)[-20:]
            yield metadata(
                f"config: {key} {shown}",
                f"adapter_config.json: {key}: .*want ",
                lambda made, key=key, value=value: made | {key: value},
            )
    yield metadata(
        "config: alpha beyond all numbers",
        "lora_alpha: inf: want an alpha",
        lambda made: json.dumps(made).replace("4.0", "1e999"),
    )
    for key in ("rank_pattern", "alpha_pattern"):
        yield metadata(
            f"config: {key} of a linear without weights",
            "names model.layers.7.mlp.up_proj, which has no weights",
            lambda made, key=key: made | {key: {"model.layers.7.mlp.up_proj": 2}},
        )
    yield metadata(
        "config: an unknown base model",
        "trained on 'org/else'; served here: tiny",
        lambda made: made | {"base_model_name_or_path": "org/else"},
    )
    yield metadata(
        "config: no base model",
        "names no base model; served here: tiny",
        lambda made: made | {"base_model_name_or_path": ""},
    )
