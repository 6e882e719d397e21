"""Probes that `parity` makes, and their proofs in register and show."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lorikeet.cli.adapters.parity import read_probes, read_prompts
from lorikeet.errors import InvalidInput
from lorikeet.parity.figures import GapCause, Parity, Verdict
from lorikeet_engine.adapter_format import write_blob
from tests.cli.conftest import Lorikeet
from tests.cli.peft_folders import peft_folder
from tests.gateway.conftest import demo_encoder

DEMO = Path("demo/adapters/quillon/reverse")
PROBES = {"probes": [{"token_ids": [5, 6, 7], "logprobs": [-1.0, -2.0]}]}
WARNED = Parity(
    Verdict.WARNED,
    2,
    0.06,
    0.5,
    1e-3,
    0.055,
    GapCause.QUANTIZATION,
    "its weights are rounded to fp8",
)


@pytest.fixture
def probes(tmp_path: Path) -> str:
    file = tmp_path / "probes.json"
    file.write_text(json.dumps(PROBES))
    return str(file)


def test_parity_writes_sampled_completions_with_their_scores_and_facts(
    lorikeet: Lorikeet, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "made.json"
    messages = [{"role": "user", "content": "abc"}]
    rows: list[object] = [{"messages": messages}, {"prompt": "hello"}]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    arguments = ("--model", "demo/model", "--out", str(out), "--prompts", str(prompts))
    said = json.loads(lorikeet.do("parity", str(DEMO), *arguments, "--tokens", "6", "--json"))
    made = read_probes(out)
    tokens = sum(len(probe.logprobs) for probe in made.probes)
    assert said == {"file": str(out), "probes": 2, "tokens": tokens}
    chat, text = made.probes
    assert chat.prompt_ids == list(demo_encoder().encode_turn("abc", 1024))
    assert (chat.messages, text.messages) == (messages, [])
    assert len(chat.base_logprobs) == len(chat.logprobs) <= 6
    assert chat.base_logprobs != chat.logprobs
    assert (made.dtype, made.base_model) == ("bfloat16", "demo/model")
    assert made.digest == write_blob(DEMO, tmp_path / "blob")
    assert made.linears is not None
    assert "self_attn.q_proj" in made.linears


def test_register_with_probes_prints_the_figures_and_show_repeats_them(
    lorikeet: Lorikeet, tmp_path: Path, probes: str
) -> None:
    folder = str(peft_folder(tmp_path / "adapter"))
    lorikeet.engines.proved = WARNED
    bound = ("--warn-above", "0.04")
    said = lorikeet.run("register", folder, "acme/support", "--probes", probes, *bound)
    assert said.exit_code == 0
    rows = [line.split() for line in said.stdout.splitlines()]
    assert ["warned", "2", "0.06", "0.5", "0.001", "0.055"] in rows
    assert "Warning: its weights are rounded to fp8" in said.stderr
    (test,) = lorikeet.engines.proofs
    assert (test.bounds.warn_above, test.probes) == (0.04, read_probes(Path(probes)))
    assert (
        "Version 1 has parity with its trainer warned (quantization): mean |Δ| 0.06, max 0.5, KL "
        "0.001 nats over 2 tokens"
    ) in " ".join(lorikeet.do("show", "acme/support").split())


def test_register_fails_if_the_proof_is_refused(
    lorikeet: Lorikeet, tmp_path: Path, probes: str
) -> None:
    lorikeet.engines.proved = replace(WARNED, verdict=Verdict.REFUSED)
    folder = str(peft_folder(tmp_path / "adapter"))
    result = lorikeet.run("register", folder, "acme/support", "--probes", probes)
    assert result.exit_code == 1
    assert "differ from the trainer's" in result.stderr
    assert lorikeet.run("show", "acme/support").exit_code == 1


def test_malformed_files_are_refused_before_anything_is_sent(
    lorikeet: Lorikeet, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    bad.write_text('{"prompt": "a"}\n{"text": "b"}')
    with pytest.raises(InvalidInput, match="line 2: want"):
        read_prompts(bad)
    folder = str(peft_folder(tmp_path / "adapter"))
    result = lorikeet.run("register", folder, "acme/support", "--probes", str(bad))
    assert result.exit_code == 1
    assert "lorikeet parity" in result.stderr
    bad.write_text("\n")
    with pytest.raises(InvalidInput, match="0 prompts"):
        read_prompts(bad)
    bad.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(InvalidInput, match="is no text"):
        read_prompts(bad)
    assert lorikeet.run("parity", folder, "--model", "x", "--dtype", "int8").exit_code == 2
