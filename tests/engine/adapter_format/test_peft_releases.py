"""Adapters of earlier releases of PEFT are served as they were trained.

Expected values are computed from each release's definition, in docs/adapters.md; the releases
themselves need not be installed.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lorikeet_engine.adapter_format import (
    AdapterLimits,
    AdapterSpec,
    BaseShape,
    read_spec,
    write_blob,
)
from lorikeet_engine.adapter_format.peft_release import _ADDED_KEYS, training_release
from lorikeet_engine.errors import AdapterRejected

LIMITS = AdapterLimits(max_rank=16, max_bytes=1 << 20)
HIDDEN, INTERMEDIATE, VOCABULARY, EXPERTS, RANK, ALPHA = 16, 24, 64, 3, 4, 8
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "num_local_experts": EXPERTS,
}
Q, V = (f"model.layers.{{}}.self_attn.{side}_proj" for side in "qv")
FIRST, SECOND = "experts.base_layer", "experts"  # PEFT's wrappers of two parameters, nested


def shape_of(family: str, **sizes: int) -> BaseShape:
    return BaseShape.from_config({"model_type": family, **SIZES, **sizes})


def config_of(release: str, **options: Any) -> dict[str, Any]:
    """Return a config with the keys that a release of PEFT writes; "": of another tool."""
    common = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": []}
    if not release:
        return common | options
    wanted = tuple(map(int, release.split(".")))
    keys = {key: None for added_in, keys in _ADDED_KEYS if added_in <= wanted for key in keys}
    version = {"peft_version": release} if wanted >= (0, 18, 0) else {}
    return keys | version | common | options


def save(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    named = {f"base_model.model.{name}": np.ascontiguousarray(t) for name, t in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")


def pair(module: str, d_in: int, d_out: int, rank: int = RANK) -> dict[str, np.ndarray]:
    a, b = np.ones((rank, d_in), np.float32), np.ones((d_out, rank), np.float32)
    if module.endswith("embed_tokens"):
        return {f"{module}.lora_embedding_A": a, f"{module}.lora_embedding_B": b}
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def accepted(folder: Path, shape: BaseShape) -> tuple[AdapterSpec, list[str]]:
    """Return the spec of a folder's blob, and the warnings at packing."""
    said: list[str] = []
    write_blob(folder, folder / "blob", said.append)
    return read_spec(folder / "blob", shape, LIMITS), said


# The release, from the config.


@pytest.mark.parametrize("added_in", [release for release, _ in _ADDED_KEYS])
def test_the_keys_of_a_config_without_a_version_show_the_release(added_in: Any) -> None:
    assert training_release(config_of(".".join(map(str, added_in)))) == added_in


@pytest.mark.parametrize(
    ("config", "release"),
    [
        ({"peft_version": "0.18.1"}, (0, 18, 1)),
        ({"peft_version": "0.18.0rc0"}, (0, 18, 0)),
        ({"peft_version": "0.21.2.post1"}, (0, 21, 2)),
        ({"peft_version": "0.22.0.dev0@26577ab"}, (0, 22, 0)),
        ({"peft_version": "0.18.2.dev0@26577ab"}, None),  # before or after a difference
        ({"peft_version": "main"}, None),
        ({"peft_version": 18}, None),
        (config_of(""), None),
        (config_of("", rank_pattern={}, alpha_pattern={}, auto_mapping=None), None),
        (config_of("0.17.0", ensure_weight_tying=False), None),  # the version was removed
        (config_of("0.9.0", task_type="CAUSAL_LM", notes="mine"), (0, 9, 0)),
    ],
)
def test_a_config_shows_the_release_or_leaves_it_open(config: Any, release: Any) -> None:
    assert training_release(config) == release


# Patterns.

DEFAULT = (RANK, ALPHA / RANK)
OLD, MIDDLE, NEW = "0.13.0", "0.14.0", "0.15.0"


@pytest.mark.parametrize("release", ["0.6.0", OLD, MIDDLE, NEW, "0.21.2", ""])
@pytest.mark.parametrize(
    ("patterns", "changed"),
    [
        # Until 0.13 one key is looked up in both patterns: alpha_pattern has no v_proj.
        (
            {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.0.self_attn.v_proj": 5}},
            {
                OLD: {V.format(0): (2, ALPHA / 2), V.format(1): (2, ALPHA / 2)},
                MIDDLE: {V.format(0): (2, 5 / 2), V.format(1): (2, ALPHA / 2)},
                NEW: {V.format(0): (2, 5 / 2), V.format(1): (2, ALPHA / 2)},
            },
        ),
        # Until 0.14 an alternative stands alone: ".*\.q_proj", or "v_proj$" from the beginning.
        (
            {"alpha_pattern": {"q_proj|v_proj": 5}},
            {
                OLD: {Q.format(0): (RANK, 5 / RANK), Q.format(1): (RANK, 5 / RANK)},
                MIDDLE: {Q.format(0): (RANK, 5 / RANK), Q.format(1): (RANK, 5 / RANK)},
                NEW: {m.format(n): (RANK, 5 / RANK) for m in (Q, V) for n in (0, 1)},
            },
        ),
        # Until 0.14 an expression stands behind a dot, so it never matches a whole name.
        (
            {"alpha_pattern": {r"model\.layers\.\d\.self_attn\.q_proj": 5}},
            {OLD: {}, MIDDLE: {}, NEW: {Q.format(n): (RANK, 5 / RANK) for n in (0, 1)}},
        ),
        ({"rank_pattern": {"lm_.*": 3}}, {OLD: {}, MIDDLE: {}, NEW: {"lm_head": (3, ALPHA / 3)}}),
        # A name in full is found by all.
        (
            {"alpha_pattern": {"lm_head": 5, Q.format(0): 6}},
            {
                each: {"lm_head": (RANK, 5 / RANK), Q.format(0): (RANK, 6 / RANK)}
                for each in (OLD, MIDDLE, NEW)
            },
        ),
    ],
)
def test_patterns_are_read_as_the_release_that_trained_reads_them(
    release: str, patterns: Any, changed: Any, tmp_path: Path
) -> None:
    reading = {"0.6.0": OLD, "0.21.2": NEW, "": NEW}.get(release, release)
    linears = {name.format(n): (HIDDEN, HIDDEN) for name in (Q, V) for n in (0, 1)}
    linears["lm_head"] = HIDDEN, VOCABULARY
    want = dict.fromkeys(linears, DEFAULT) | changed[reading]
    tensors: dict[str, np.ndarray] = {}
    for module, widths in linears.items():
        tensors |= pair(module, *widths, rank=want[module][0])
    save(tmp_path, config_of(release, target_modules=None, **patterns), tensors)
    shape = shape_of("llama")
    spec, said = accepted(tmp_path, shape)
    got = {
        shape.modules[part.linear].module
        if part.layer == shape.outer_layer
        else shape.modules[part.linear].path(part.layer): (part.rank, part.scaling)
        for part in spec.linears
    }
    assert got == {name: (rank, pytest.approx(scale)) for name, (rank, scale) in want.items()}
    is_open = not release and changed[OLD] != changed[NEW]
    assert len(said) == is_open
    assert all("set peft_version" in each for each in said)


# Scaled embeddings.


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("release", ["0.6.0", "0.15.0", "0.17.0", "0.18.0", "0.21.2", ""])
def test_lora_of_embeddings_that_scale_themselves_is_unscaled_before_0_18(
    family: str, release: str, tmp_path: Path
) -> None:
    config = config_of(
        release, target_modules=["embed_tokens", "q_proj"], base_model_name_or_path="gemma-3-4b"
    )
    tensors = pair("model.embed_tokens", VOCABULARY, HIDDEN)
    for layer in (0, 1):
        tensors |= pair(Q.format(layer), HIDDEN, HIDDEN)
    save(tmp_path, config, tensors)
    spec, said = accepted(tmp_path, shape_of(family))
    # Behind the LoRA, the engine multiplies by √hidden.
    is_old = family == "gemma3_text" and release in ("0.6.0", "0.15.0", "0.17.0")
    want = ALPHA / RANK / (math.sqrt(HIDDEN) if is_old else 1)
    scalings = {part.name.rpartition(".")[2]: part.scaling for part in spec.linears}
    assert scalings == {"embed_tokens": pytest.approx(want), "q_proj": ALPHA / RANK}
    assert len(said) == (release == "")


@pytest.mark.parametrize("release", ["0.15.0", "0.17.0", "0.18.0", ""])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
def test_tokens_trained_without_the_scale_of_all_embeddings_are_refused(
    family: str, release: str, tmp_path: Path
) -> None:
    rows = {
        "model.embed_tokens.token_adapter.trainable_tokens_delta": np.ones((2, HIDDEN), np.float32)
    }
    tokens = {"target_modules": None, "trainable_token_indices": [3, 9]}
    save(tmp_path, config_of(release, **tokens), rows | pair(Q.format(0), HIDDEN, HIDDEN))
    if family == "gemma3_text" and release in ("0.15.0", "0.17.0"):
        with pytest.raises(AdapterRejected, match=r"left out the scale.*Gemma 3's embeddings"):
            accepted(tmp_path, shape_of(family))
    else:
        assert accepted(tmp_path, shape_of(family))[0].token_rows[0].ids == (3, 9)


# Parameters of experts.


def expert_pairs(parameter: str, *, old: bool, hidden: int, width: int) -> dict[str, Any]:
    """Return random A and B of a parameter, and the delta of each expert, [experts, out, in]."""
    draw = np.random.default_rng(5)
    d_in, d_out = (hidden, 2 * width) if parameter == "gate_up_proj" else (width, hidden)
    first, second = (d_out, d_in) if old else (d_in, d_out)
    a = draw.normal(size=(EXPERTS * RANK, first)).astype(np.float32)
    b = draw.normal(size=(second, RANK * EXPERTS)).astype(np.float32)
    by_expert = a.reshape(EXPERTS, RANK, first), b.reshape(second, RANK, EXPERTS)
    delta = np.einsum("sre,erf->esf", by_expert[1], by_expert[0]) * ALPHA / RANK
    return {"A": a, "B": b, "delta": delta.transpose(0, 2, 1) if old else delta}


def served(folder: Path, spec: AdapterSpec, parameter: str) -> np.ndarray:
    """Return scaling · B A of each expert, for a parameter."""
    data, deltas = (folder / "blob").read_bytes(), {}
    for part in spec.linears:
        a, b = (
            np.frombuffer(data[span.begin : span.end], np.float32).reshape(span.shape)
            for span in (part.a, part.b)
        )
        deltas[part.name.rpartition(".")[2]] = part.scaling * (b @ a)
    if parameter == "down_proj":
        return deltas["down_proj"]
    return np.concatenate([deltas["gate_proj"], deltas["up_proj"]], 1)


@pytest.mark.parametrize("hidden", [HIDDEN, 2 * INTERMEDIATE, INTERMEDIATE])
@pytest.mark.parametrize("release", ["0.17.0", "0.18.1", "0.19.0", "0.19.1", "0.21.2"])
@pytest.mark.parametrize("names", [["gate_up_proj"], ["down_proj"], ["gate_up_proj", "down_proj"]])
def test_parameters_of_experts_lie_as_the_release_that_trained_saves_them(
    names: list[str], release: str, hidden: int, tmp_path: Path
) -> None:
    old, shape = release < "0.19.1", shape_of("mixtral", hidden_size=hidden)
    made = {n: expert_pairs(n, old=old, hidden=hidden, width=INTERMEDIATE) for n in names}
    tensors = {}
    for name, place in zip(names, (SECOND,) if len(names) == 1 else (FIRST, SECOND), strict=True):
        for side in "AB":
            tensors[f"model.layers.0.mlp.{place}.lora_{side}.weight"] = made[name][side]
    targets = [f"mlp.experts.{name}" for name in names]
    save(tmp_path, config_of(release, target_parameters=targets), tensors)
    spec, said = accepted(tmp_path, shape)
    for name in names:
        np.testing.assert_allclose(
            served(tmp_path, spec, name), made[name]["delta"], rtol=1e-5, atol=1e-5
        )
    assert said == []


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("parameter", ["gate_up_proj", "down_proj"])
def test_widths_of_other_linears_decide_the_experts_layout_against_the_config(
    parameter: str, old: bool, tmp_path: Path
) -> None:
    made = expert_pairs(parameter, old=old, hidden=HIDDEN, width=INTERMEDIATE)
    tensors = {f"model.layers.0.mlp.experts.lora_{side}.weight": made[side] for side in "AB"}
    tensors |= pair(Q.format(0), HIDDEN, HIDDEN)
    targets = {"target_modules": ["q_proj"], "target_parameters": [f"experts.{parameter}"]}
    for release in ("0.18.1", "0.21.2", ""):
        save(tmp_path, config_of(release, **targets), tensors)
        spec, said = accepted(tmp_path, shape_of("mixtral"))
        got = served(tmp_path, spec, parameter)
        np.testing.assert_allclose(got, made["delta"], rtol=1e-5, atol=1e-5)
        assert said == []


def test_experts_that_may_lie_both_ways_are_read_as_today_with_a_warning(tmp_path: Path) -> None:
    made = expert_pairs("down_proj", old=False, hidden=HIDDEN, width=INTERMEDIATE)
    tensors = {f"model.layers.0.mlp.experts.lora_{side}.weight": made[side] for side in "AB"}
    save(tmp_path, config_of("", target_parameters=["mlp.experts.down_proj"]), tensors)
    spec, said = accepted(tmp_path, shape_of("mixtral"))
    np.testing.assert_allclose(
        served(tmp_path, spec, "down_proj"), made["delta"], rtol=1e-5, atol=1e-5
    )
    assert ["set peft_version" in each for each in said] == [True]


# Tied heads and biases.


@pytest.mark.parametrize("with_head", [False, True])
def test_a_head_that_0_18_did_not_tie_has_the_adapter_that_was_saved(
    with_head: bool, tmp_path: Path
) -> None:
    tensors = pair("model.embed_tokens", VOCABULARY, HIDDEN)
    tensors |= pair("lm_head", HIDDEN, VOCABULARY) if with_head else {}
    names = ["embed_tokens", "lm_head"][: 1 + with_head]
    config = config_of("0.18.1", target_modules=names, ensure_weight_tying=True)
    save(tmp_path, config, tensors)
    spec, _ = accepted(tmp_path, shape_of("llama", tie_word_embeddings=True))
    assert sorted(part.name for part in spec.linears) == names


@pytest.mark.parametrize("release", ["0.6.0", "0.7.0", "0.20.0", "0.21.0", ""])
@pytest.mark.parametrize("family", ["llama", "qwen2", "glm4"])
def test_biases_that_were_trained_and_not_saved_are_refused_or_warned_of(
    family: str, release: str, tmp_path: Path
) -> None:
    config = config_of(release, bias="lora_only", target_modules=["q_proj"])
    save(tmp_path, config, pair(Q.format(0), HIDDEN, HIDDEN) | pair(Q.format(1), HIDDEN, HIDDEN))
    lost = release in ("0.7.0", "0.20.0", "")
    if lost and family != "llama":
        with pytest.raises(AdapterRejected, match=r"layers\.0\.q_proj and did not save it"):
            accepted(tmp_path, shape_of(family))
    else:
        assert len(accepted(tmp_path, shape_of(family))[1]) == lost


def test_biases_of_linears_that_usually_have_none_are_only_warned_of(tmp_path: Path) -> None:
    config = config_of("0.20.0", bias="lora_only", target_modules=["down_proj"])
    tensors: dict[str, np.ndarray] = {}
    for layer in (0, 1):
        tensors |= pair(f"model.layers.{layer}.mlp.down_proj", INTERMEDIATE, HIDDEN)
    save(tmp_path, config, tensors)
    spec, said = accepted(tmp_path, shape_of("qwen2"))
    assert len(spec.linears) == 2
    assert len(said) == 1
