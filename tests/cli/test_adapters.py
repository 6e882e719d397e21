"""register, list, show, promote, rollback, retire against a real gateway."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lorikeet.catalog.records import Scope
from lorikeet.catalog.store.local import LocalStore
from lorikeet.chat_template import template_digest
from lorikeet.tokenizer_vocabulary import read_vocabulary
from lorikeet_engine.adapter_format import write_blob
from tests.cli.conftest import Lorikeet, new_catalog, serving
from tests.cli.peft_folders import peft_folder


def register(lorikeet: Lorikeet, folder: Path, *options: str, seed: int = 0) -> dict[str, object]:
    made = peft_folder(folder / f"adapter-{seed}", seed=seed)
    said = lorikeet.do("register", str(made), "acme/support", "--json", *options)
    answer = json.loads(said)
    assert isinstance(answer, dict)
    return answer


def test_register_uploads_the_canonical_blob(lorikeet: Lorikeet, tmp_path: Path) -> None:
    answer = register(lorikeet, tmp_path)
    digest = write_blob(tmp_path / "adapter-0", tmp_path / "blob")
    size = (tmp_path / "blob").stat().st_size
    assert (answer["digest"], answer["size_bytes"], answer["max_rank"]) == (digest, size, 4)
    stored = lorikeet.catalog.store.get(f"blobs/{digest[:2]}/{digest}")
    assert stored == (tmp_path / "blob").read_bytes()


def test_register_prints_version_digest_and_size(lorikeet: Lorikeet, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "adapter")
    said = lorikeet.do("register", str(folder), "acme/support")
    assert "acme/support version 1, now prod: " in said
    assert "rank 4" in said
    assert "changes q_proj of 2 layers, 128 parameters\n" in said
    assert lorikeet.catalog.reader.state.adapter("acme", "support").versions[0].digest in said


def test_the_same_weights_again_are_the_same_version(lorikeet: Lorikeet, tmp_path: Path) -> None:
    first = register(lorikeet, tmp_path)
    again = json.loads(
        lorikeet.do("register", str(tmp_path / "adapter-0"), "acme/support", "--json")
    )
    assert again == first
    said = lorikeet.do("register", str(tmp_path / "adapter-0"), "acme/support")
    assert said.startswith("acme/support already is version 1, now prod: ")


def test_a_later_version_waits_for_promote(lorikeet: Lorikeet, tmp_path: Path) -> None:
    register(lorikeet, tmp_path)
    assert register(lorikeet, tmp_path, seed=1)["aliases"] == []
    assert register(lorikeet, tmp_path, "--promote", seed=2)["aliases"] == ["prod"]


def test_shared_and_private(lorikeet: Lorikeet, tmp_path: Path) -> None:
    register(lorikeet, tmp_path, "--shared")
    assert "shared" in lorikeet.do("list")
    register(lorikeet, tmp_path, seed=1)
    assert "shared" in lorikeet.do("list")
    register(lorikeet, tmp_path, "--private", seed=2)
    assert "shared" not in lorikeet.do("list")


def quantised_folder(tmp_path: Path) -> Path:
    """An adapter that says it was trained on an NF4 copy of the served base model."""
    folder = peft_folder(tmp_path / "peft")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "unsloth/Tiny-bnb-4bit"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_an_adapter_of_a_quantised_copy_is_registered_for_the_original_with_a_warning(
    lorikeet: Lorikeet, tmp_path: Path
) -> None:
    folder = quantised_folder(tmp_path)
    result = lorikeet.run("register", str(folder), "acme/quantised", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["base_model"] == "tiny"
    said = " ".join(result.stderr.split())
    assert "Warning: it was trained on unsloth/Tiny-bnb-4bit, a quantised copy" in said
    assert "LORIKEET_WEIGHT_DTYPE=tiny=nf4" in said
    plain = lorikeet.run("register", str(peft_folder(tmp_path / "plain")), "acme/plain")
    assert "Warning" not in plain.stderr


def test_register_warns_of_an_adapter_that_is_not_served_entirely_as_trained(
    lorikeet: Lorikeet, tmp_path: Path
) -> None:
    folder = peft_folder(tmp_path / "peft")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["alpha_pattern"] = {"v_proj|q_proj": 5}  # read otherwise by PEFT before 0.15
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "adapter_model.safetensors")
    vision = {
        f"base_model.model.visual.merger.lora_{side}.weight": np.ones((4, 4), np.float32)
        for side in "AB"
    }
    save_file(tensors | vision, folder / "adapter_model.safetensors")
    result = lorikeet.run("register", str(folder), "acme/doubtful", "--json")
    assert result.exit_code == 0, result.stderr
    said = " ".join(result.stderr.split())
    assert "Warning: 2 tensors of the vision part are left out" in said
    assert "Warning: PEFT before 0.15 reads the names in rank_pattern or alpha_pattern" in said


def test_another_chat_template_than_in_training_gives_a_warning(
    tmp_path: Path,
) -> None:
    folder, template = peft_folder(tmp_path / "peft"), tmp_path / "peft" / "chat_template.jinja"
    template.write_text("{{ messages }}\n")
    served = template_digest(folder)
    with serving(*new_catalog(LocalStore(tmp_path / "catalog")), chat_template=served) as lorikeet:

        def said(name: str) -> str:
            result = lorikeet.run("register", str(folder), name, "--json")
            assert result.exit_code == 0, result.stderr
            return " ".join(result.stderr.split())

        assert "Warning" not in said("acme/same")
        template.write_text("{{ messages | length }}")
        assert "Warning: its folder has another chat template than tiny" in said("acme/other")
        template.unlink()
        assert "Warning" not in said("acme/none")


TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def test_register_takes_an_adapters_own_defaults_from_options(
    lorikeet: Lorikeet, tmp_path: Path
) -> None:
    template, prompt, config = (tmp_path / name for name in ("t.jinja", "p.txt", "g.json"))
    template.write_text(TEMPLATE)
    prompt.write_text("Be brief.")
    found = {"temperature": 0.5, "top_k": None, "eos_token_id": 5, "stop_strings": ["<end>"]}
    config.write_text(json.dumps(found | {"max_length": 20}))
    options = ["--chat-template", str(template), "--system-prompt", f"@{prompt}"]
    options += ["--generation-config", str(config), "--stop", "Bye"]
    answer = register(lorikeet, tmp_path, *options)
    assert answer["defaults"] == {
        "chat_template": TEMPLATE,
        "system_prompt": "Be brief.",
        "stop": ["<end>", "Bye"],
        "stop_token_ids": [5],
        "tokenizer": None,
        "sampling": {"temperature": 0.5},
    }
    own = (
        f"has its own chat template ({len(TEMPLATE)} B, SHA-256 "
        f"{hashlib.sha256(TEMPLATE.encode()).hexdigest()[:12]}…), "
        'system prompt "Be brief.", stop strings ["<end>", "Bye"], stop tokens 5, temperature 0.5'
    )
    made = str(tmp_path / "adapter-0")
    said = lorikeet.do("register", made, "acme/support", *options)
    assert said.startswith("acme/support already is version 1")
    assert own in said
    assert json.loads(lorikeet.do("register", made, "acme/support", "--json"))["version"] == 2
    shown = lorikeet.do("show", "acme/support")
    assert f"Version 1 {own}" in shown
    assert "Version 2 has its own" not in shown
    assert "defaults=chat_template,system_prompt,stop" in lorikeet.do("log")


def test_register_takes_an_adapters_own_defaults_from_its_folder(
    lorikeet: Lorikeet, tmp_path: Path
) -> None:
    folder = peft_folder(tmp_path / "peft")
    flags = ["--use-chat-template", "--use-generation-config", "--use-tokenizer"]
    missing_files = ["no chat template", "generation_config.json", "no tokenizer.json"]
    for flag, missing in zip(flags, missing_files, strict=True):
        failed = lorikeet.run("register", str(folder), "acme/own", flag)
        assert failed.exit_code != 0
        assert missing in " ".join(failed.stderr.split())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6], "top_p": 0.5}')
    tokenizer = json.loads(Path("demo/model/tokenizer.json").read_text())
    shown = tokenizer["added_tokens"][-1]
    shown["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = lorikeet.run("register", str(folder), "acme/own", "--json", *flags)
    assert "Warning" not in said.stderr
    assert f"tokenizer (1 token of its own: {shown['content']})" in lorikeet.do("show", "acme/own")
    defaults = json.loads(said.stdout)["defaults"]
    assert defaults["chat_template"] == TEMPLATE
    assert (defaults["stop_token_ids"], defaults["sampling"]) == ([5, 6], {"top_p": 0.5})
    assert json.loads(lorikeet.do("register", str(folder), "acme/own", "--json"))["version"] == 2


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--chat-template", "{t}", "--use-chat-template"], "want either --chat-template or"),
        (["--chat-template", "{t}"], "line 1: no"),
        (["--chat-template", "missing.jinja"], "missing.jinja is no regular file"),
        (["--generation-config", "{t}"], "t.jinja: Expecting property name"),
        (["--system-prompt", "@missing"], "missing is no regular file"),
    ],
)
def test_faulty_defaults_are_refused_and_nothing_is_registered(
    lorikeet: Lorikeet, tmp_path: Path, options: list[str], problem: str
) -> None:
    (tmp_path / "t.jinja").write_text("{{ raise_exception('no') }}")
    given = [each.format(t=tmp_path / "t.jinja") for each in options]
    made = str(peft_folder(tmp_path / "peft"))
    failed = lorikeet.run("register", made, "acme/own", *given)
    assert failed.exit_code != 0
    assert problem in " ".join(failed.stderr.replace("│", " ").split())
    assert lorikeet.catalog.reader.refresh().find("acme", "own") is None


def test_another_vocabulary_than_in_training_gives_a_warning(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "peft")
    tokenizer: dict[str, Any] = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    served = read_vocabulary(folder)
    with serving(*new_catalog(LocalStore(tmp_path / "catalog")), vocabulary=served) as lorikeet:

        def said(name: str, source: Path = folder) -> str:
            result = lorikeet.run("register", str(source), name, "--json")
            assert result.exit_code == 0, result.stderr
            return " ".join(result.stderr.split())

        assert "Warning" not in said("acme/same")
        tokenizer["added_tokens"] = [{"content": "<|tool|>", "id": 2}]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        warning = "Warning: its folder's tokenizer has 1 tokens that tiny lacks"
        assert warning in said("acme/other")
        archive = shutil.make_archive(str(tmp_path / "packed"), "tar", folder)
        assert warning in said("acme/packed", Path(archive))
        (folder / "tokenizer.json").unlink()
        assert "Warning" not in said("acme/none")


def test_show_repeats_the_warning_of_other_weights_than_in_training(
    lorikeet: Lorikeet, tmp_path: Path
) -> None:
    lorikeet.do("register", str(quantised_folder(tmp_path)), "acme/quantised")
    said = " ".join(lorikeet.do("show", "acme/quantised").split())
    assert "Version 1 differs from its training: it was trained on unsloth/Tiny-bnb-4bit" in said
    (version,) = json.loads(lorikeet.do("show", "acme/quantised", "--json"))["versions"]
    assert version["trained_on"] == "unsloth/Tiny-bnb-4bit"
    assert version["base_quantization"] is None
    assert "a quantised copy" in version["base_warning"]
    register(lorikeet, tmp_path)
    assert "trained" not in lorikeet.do("show", "acme/support")


@pytest.mark.parametrize("quantization", ["nf4", "rounded to nf4"])
def test_equal_weights_of_the_quantised_copy_give_no_warning(
    tmp_path: Path, quantization: str
) -> None:
    store = LocalStore(tmp_path / "catalog")
    with serving(*new_catalog(store), quantization=quantization) as lorikeet:
        folder = str(quantised_folder(tmp_path))
        result = lorikeet.run("register", folder, "acme/quantised", "--json")
        said = " ".join(lorikeet.do("show", "acme/quantised").split())
    assert json.loads(result.stdout)["base_quantization"] == quantization
    assert "Warning" not in result.stderr
    assert f"trained on unsloth/Tiny-bnb-4bit; the weights of tiny are {quantization}" in said


def test_weights_of_another_quantised_format_give_a_warning(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "catalog")
    with serving(*new_catalog(store), quantization="awq") as lorikeet:
        result = lorikeet.run("register", str(quantised_folder(tmp_path)), "acme/quantised")
    said = " ".join(result.stderr.split())
    assert "is served on tiny (awq), whose values are others" in said
    assert "LORIKEET_WEIGHT_DTYPE" not in said  # which could not round what is quantised already


def test_a_base_model_that_is_not_served_is_refused(lorikeet: Lorikeet, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "adapter")
    result = lorikeet.run("register", str(folder), "acme/support", "--base-model", "huge")
    assert result.exit_code == 1
    assert "base_model='huge' is not served here" in result.stderr


def test_a_folder_of_pickles_is_not_uploaded(lorikeet: Lorikeet, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "adapter")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    result = lorikeet.run("register", str(folder), "acme/support")
    assert result.exit_code == 1
    assert "safetensors" in result.stderr


def test_a_refusal_shows_the_servers_message(lorikeet: Lorikeet, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "adapter", rank=32)
    result = lorikeet.run("register", str(folder), "acme/support")
    assert result.exit_code == 1
    assert "rank" in result.stderr
    assert "32" in result.stderr


def test_list_shows_each_adapter_once(lorikeet: Lorikeet, tmp_path: Path) -> None:
    assert "No adapters yet" in lorikeet.do("list")
    register(lorikeet, tmp_path)
    register(lorikeet, tmp_path, seed=1)
    (row,) = [line for line in lorikeet.do("list").splitlines() if "acme/support" in line]
    assert row.split()[:4] == ["acme/support", "prod→1", "2", "4"]


def test_list_of_one_tenant(lorikeet: Lorikeet, tmp_path: Path) -> None:
    register(lorikeet, tmp_path)
    lorikeet.do("tenants", "create", "globex")
    assert json.loads(lorikeet.do("list", "--tenant", "globex", "--json")) == {"data": []}


def test_show_has_the_newest_version_first(lorikeet: Lorikeet, tmp_path: Path) -> None:
    register(lorikeet, tmp_path)
    newest = register(lorikeet, tmp_path, seed=1)
    lines = lorikeet.do("show", "acme/support").splitlines()
    rows = [line.split() for line in lines if "tiny" in line]
    assert [row[0] for row in rows] == ["2", "1"]
    assert str(newest["digest"]).startswith(rows[0][-1])
    assert lines[-1] == "Version 2, 1 changes q_proj of 2 layers, 128 parameters"


def test_register_show_and_why_tell_of_an_invocation(lorikeet: Lorikeet, tmp_path: Path) -> None:
    register(lorikeet, tmp_path)
    folder = peft_folder(tmp_path / "check", seed=1)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["alora_invocation_tokens"] = [7, 9]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    says = "is an activated LoRA: it changes a prompt from the last tokens 7, 9 on"
    assert f"\n{says}\n" in lorikeet.do("register", str(folder), "acme/support")
    shown = lorikeet.do("show", "acme/support").splitlines()
    assert [line for line in shown if "activated" in line] == [f"Version 2 {says}"]
    _, key = lorikeet.catalog.create_key("acme", {Scope.INFER}, actor="test")
    for version, never in ((1, False), (2, True)):
        answer = httpx.post(
            f"{lorikeet.url}/v1/completions",
            headers={"authorization": f"Bearer {key}"},
            json={"model": f"acme/support@{version}", "prompt": "hello"},
        )
        said = lorikeet.do("why", answer.headers["x-request-id"])
        assert ("does not have the adapter's invocation tokens" in said) == never


def test_register_and_show_tell_of_a_head(lorikeet: Lorikeet, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "tone")
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "adapter_model.safetensors")
    width = tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape[1]
    tensors["base_model.model.score.weight"] = np.ones((2, width), np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "config.json").write_text('{"id2label": {"0": "calm", "1": "wild"}}')
    says = "classifies texts by a head of 2 labels: calm, wild"
    assert f"\n{says}\n" in lorikeet.do("register", str(folder), "acme/tone")
    assert f"Version 1 {says}" in lorikeet.do("show", "acme/tone").splitlines()


def test_promote_then_rollback(lorikeet: Lorikeet, tmp_path: Path) -> None:
    register(lorikeet, tmp_path)
    register(lorikeet, tmp_path, seed=1)
    assert "acme/support@prod is now version 2." in lorikeet.do("promote", "acme/support@2")
    assert "acme/support@prod is now version 1." in lorikeet.do("rollback", "acme/support")


def test_promote_to_another_alias(lorikeet: Lorikeet, tmp_path: Path) -> None:
    register(lorikeet, tmp_path)
    lorikeet.do("promote", "acme/support@1", "--alias", "canary")
    shown = json.loads(lorikeet.do("show", "acme/support", "--json"))
    assert shown["aliases"] == {"canary": 1, "prod": 1}


def test_a_conflict_exits_with_status_3(lorikeet: Lorikeet, tmp_path: Path) -> None:
    for seed in range(3):
        register(lorikeet, tmp_path, seed=seed)
    lorikeet.do("promote", "acme/support@2")
    result = lorikeet.run("promote", "acme/support@3", "--expect", "1")
    assert result.exit_code == 3
    assert result.stdout == ""
    assert "2" in result.stderr


def test_retire_a_version_and_an_adapter(lorikeet: Lorikeet, tmp_path: Path) -> None:
    register(lorikeet, tmp_path)
    register(lorikeet, tmp_path, "--promote", seed=1)
    assert lorikeet.do("retire", "acme/support@1") == "Retired acme/support@1.\n"
    assert lorikeet.do("retire", "acme/support") == "Retired acme/support.\n"
    assert "retired" in lorikeet.do("list")


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "support"],
        ["show", "acme/"],
        ["show", "acme/support@3"],
        ["promote", "acme/support"],
        ["promote", "acme/support@canary"],
        ["retire", "acme/support@prod"],
        ["register", "/nowhere", "acme/support"],
        ["show", "acme/.."],
        ["show", "acme/../x"],
        ["promote", "acme/support@1", "--alias", "../x"],
        ["list", "--tenant", ".."],
    ],
    ids=" ".join,
)
def test_malformed_arguments_are_wrong_usage(lorikeet: Lorikeet, arguments: list[str]) -> None:
    assert lorikeet.run(*arguments).exit_code == 2


def test_a_malformed_name_is_refused_with_the_rule(lorikeet: Lorikeet) -> None:
    result = lorikeet.run("show", "Acme/Support")
    assert result.exit_code == 2
    assert "letter or digit first" in " ".join(result.stderr.split())


def test_an_upload_above_the_servers_limit_shows_the_servers_message(
    lorikeet: Lorikeet, tmp_path: Path
) -> None:
    folder = peft_folder(tmp_path / "adapter", hidden=200_000)  # 13 MB; the limit is 1 MiB
    result = lorikeet.run("register", str(folder), "acme/support")
    assert result.exit_code == 1
    assert "1048576" in result.stderr
