"""Bad PEFT folders that an admin may register; they are refused before any upload."""

import json
from collections.abc import Iterator
from typing import Any

from tests.engine.malformed import CONFIG, WEIGHTS, Case, Files, folder

_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 13107200\n"
_SLOW = "(.|..)*(.|..)*(.|..)*[a-h]"


def folder_cases() -> Iterator[Case]:
    yield from _files()
    yield from _features()
    yield from _types()
    yield from _targets()
    yield from _patterns()


def _files() -> Iterator[Case]:
    yield folder("no config", f"has no {CONFIG}", spoil=lambda files: files.pop(CONFIG))
    yield folder("no weights", f"has no {WEIGHTS}", spoil=lambda files: files.pop(WEIGHTS))
    for ending in ("bin", "pt", "pth", "pkl"):
        yield folder(
            f"weights in a .{ending}",
            f"adapter_model.{ending} is a pickle",
            spoil=lambda files, e=ending: files.update({f"adapter_model.{e}": files.pop(WEIGHTS)}),
        )
    for name, says, data in (
        ("a Git LFS pointer", "`git lfs pull`", _POINTER),
        ("empty", "not a safetensors file", b""),
        ("a zip file", "not a safetensors file", b"PK\3\4" + bytes(100)),
    ):
        yield folder(f"weights: {name}", says, spoil=_replaced(WEIGHTS, data))
    for name, says, data in (
        ("a Git LFS pointer", f"{CONFIG} is not valid JSON", _POINTER),
        ("empty", f"{CONFIG} is not valid JSON", b""),
        ("an array", f"{CONFIG} is not a JSON object", b"[]"),
        ("four megabytes", f"{CONFIG} is over 4000000 bytes", b" " * 4_000_001),
        ("nested", f"{CONFIG} is not valid JSON", b'{"r":' * 90_000),
        ("a key twice", "a key appears twice", b'{"r": 8, "r": 16}'),
        ("NaN", "NaN is not a JSON number", b'{"lora_alpha": NaN}'),
        ("UTF-16", f"{CONFIG} is not", json.dumps({"r": 8}).encode("utf-16-le")[:-1]),
    ):
        yield folder(f"config: {name}", says, spoil=_replaced(CONFIG, data))


def _replaced(name: str, data: bytes) -> Any:
    def spoil(files: Files) -> None:
        files[name] = data

    return spoil


def _features() -> Iterator[Case]:
    for key, value, says in (
        ("use_dora", True, "lora_magnitude_vector is missing"),
        ("modules_to_save", ["lm_head"], "the weights of lm_head are not in the file"),
        ("lora_bias", True, "lora_B.bias is missing"),
        ("bias", 3, "want none, all or lora_only"),
        ("loftq_config", {"loftq_bits": 4}, "changes the base model"),
        ("trainable_token_indices", [5, 6], "not in the file"),
        ("target_parameters", ["experts.up"], "no weight is for a parameter"),
        ("layer_replication", [[0, 1]], "another base model"),
        ("alora_invocation_tokens", [1, "2"], "want at most 256 token ids"),
        ("use_qalora", True, "QA-LoRA"),
        ("use_bdlora", {"blocks": 2}, "block-diagonal"),
        ("megatron_config", {"x": 1}, "Megatron"),
        ("arrow_config", {"top_k": 3}, "routing between adapters"),
        ("kasa_config", {"x": 1}, "changes the base model"),
        ("use_a_method_of_next_year", [[1] * 9] * 9_000, "this option is not known"),
        *((("init_lora_weights", init, "may change the base model")) for init in _INITS),
        ("r", "8", "want a rank"),
        ("r", 0, "want a rank"),
        ("r", 3, "have rank 2 and the config says 3"),
        ("lora_alpha", None, "want an alpha"),
        ("use_rslora", "yes", "want true or false"),
        ("base_model_name_or_path", ["x"], "want a text"),
    ):
        yield folder(f"{key}: {str(value)[:20]}", f"({key}: .*)?{says}", {key: value})


_INITS = ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", 7, ["gaussian"])


def _types() -> Iterator[Case]:
    for kind in (
        "IA3",
        "LOHA",
        "LOKR",
        "ADALORA",
        "OFT",
        "VERA",
        "XLORA",
        "PREFIX_TUNING",
        3,
        None,
    ):
        yield folder(f"peft_type {kind}", "peft_type: .*only LORA", {"peft_type": kind})


def _targets() -> Iterator[Case]:
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    for name, says, config in (
        ("too few", "weights for .*q_proj, which it leaves out", {"target_modules": every[1:]}),
        ("none", "which it leaves out", {"target_modules": []}),
        ("a number", "target_modules: want a text or a list", {"target_modules": 7}),
        ("numbers", "target_modules: want a text or a list", {"target_modules": [7]}),
        ("too narrow an expression", "which it leaves out", {"target_modules": ".*[qkv]_proj"}),
        ("no expression", "no regular expression", {"target_modules": ".*("}),
        ("a long expression", "expression of 5000", {"target_modules": "x" * 5000}),
        ("a slow expression", "expressions run for over", {"target_modules": _SLOW}),
        *(
            (f"the expression {text}", says, {"target_modules": text})
            for text, says in (
                ("((a{1000}){1000}){1000}", "which it leaves out"),
                ("((a{1000}){1000})", "which it leaves out"),
                ("(?R)", "no regular expression"),
                ("(a|(?1))*", "no regular expression"),
            )
        ),
        ("excluded", "which it leaves out", {"exclude_modules": ["q_proj"]}),
        ("excluded by an expression", "leaves out", {"exclude_modules": r".*\.mlp\..*"}),
        ("excluding a number", "exclude_modules: want a text", {"exclude_modules": 3}),
        ("of other layers", "which it leaves out", {"layers_to_transform": [1, 2]}),
        ("of another layer", "which it leaves out", {"layers_to_transform": 5}),
        ("of layers in words", "layers_to_transform: want", {"layers_to_transform": ["0"]}),
        (
            "of blocks under another name",
            "which it leaves out",
            {"layers_to_transform": [0], "layers_pattern": "blocks"},
        ),
        (
            "of blocks under a number",
            "layers_pattern: want",
            {"layers_to_transform": [0], "layers_pattern": 3},
        ),
        ("60,000 names", "60000 entries: the limit", {"target_modules": ["x"] * 60_000}),
    ):
        yield folder(f"targets: {name}", says, config)
    yield folder(
        "targets: one without weights",
        "it selects model.layers.0.mlp.up_proj, but no weight is for it",
        spoil=_without_up,
    )
    yield folder(
        "targets: a layer under another number",
        "no weight is for it: layer 7, the last, is misnumbered,",
        spoil=_misnumbered,
    )


def _misnumbered(files: Files) -> None:
    files[WEIGHTS] = files[WEIGHTS].replace(b".layers.0.", b".layers.7.")


def _without_up(files: Files) -> None:
    data = files[WEIGHTS]
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    names = [name for name in header if "up_proj" in name]
    begin = header[names[0]]["data_offsets"][0]
    size = header[names[-1]]["data_offsets"][1] - begin
    for name in names:
        del header[name]
    for name, entry in header.items():
        if name != "__metadata__" and entry["data_offsets"][0] > begin:
            entry["data_offsets"] = [at - size for at in entry["data_offsets"]]
    text, at = json.dumps(header).encode(), 8 + length + begin
    files[WEIGHTS] = (
        len(text).to_bytes(8, "little") + text + data[8 + length : at] + data[at + size :]
    )


def _patterns() -> Iterator[Case]:
    for key in ("rank_pattern", "alpha_pattern"):
        for name, says, value in (
            ("a list", "want an object", [3]),
            ("a text", "want an object", "q_proj"),
            ("no expression", "no regular expression", {"(": 2}),
            ("a slow expression", "expressions run for over", {_SLOW: 2}),
            (
                "many slow ones",
                "expressions run for over",
                {f"{_SLOW}|x{n}": 2 for n in range(900)},
            ),
            ("a long expression", "expression of", {"q" * 5000: 2}),
            ("3,000 entries", "3000 entries: the limit", {f"x{n}": 2 for n in range(3000)}),
            ("a text for a number", "want a", {"q_proj": "many"}),
            ("nothing for a number", "want a", {"q_proj": None}),
        ):
            yield folder(f"{key}: {name}", f"{key}: .*{says}", {key: value})
    yield folder(
        "rank_pattern: a wrong rank", "the config says 3", {"rank_pattern": {"up_proj": 3}}
    )
    yield folder("rank_pattern: rank 0", "want a rank", {"rank_pattern": {"up_proj": 0}})
