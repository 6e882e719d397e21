"""Valid files that contain bad adapters."""

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.engine.malformed import Case, Q, Tensors, metadata, renamed, tensor, weights


def content_cases() -> Iterator[Case]:
    yield from _names()
    yield from _shapes()
    yield from _values()
    yield from _configs()


def _names() -> Iterator[Case]:
    for name, says, old, new in (
        ("of DoRA", "beside its other half", "lora_A.weight", "lora_magnitude_vector"),
        ("of embeddings", "only embed_tokens can have", "lora_A.weight", "lora_embedding_A"),
        ("of whole modules", "whole modules", "lora_A", "modules_to_save"),
        ("of biases", "beside its other half", "lora_B.weight", "lora_B.bias"),
        ("of experts' biases", "only biases of linears", "lora_B.weight", "down_proj_bias"),
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
        ("of the head", "lm_head maps 8 to 8 and the base model's 8 to 24", Q, "lm_head"),
        ("of the embeddings", "embed_tokens maps 8 to 8", Q, "model.embed_tokens"),
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
