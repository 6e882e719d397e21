"""Registration from an admin's folder to an answer: parts, smoke test, version, request."""

import hashlib
import json
import shutil

import httpx
import pytest
import safetensors.torch
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from demo.fill_catalog import ADAPTERS
from demo.tasks import TASKS
from lorikeet.cli import app
from lorikeet_engine.adapter_format import write_blob

TASK = TASKS[0]


EMBEDDINGS = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path):
    """A new adapter with another's task, beside the base model's embeddings."""
    made = tmp_path / "peft"
    shutil.copytree(ADAPTERS / TASK.tenant / TASK.name, made)
    weights = made / "adapter_model.safetensors"
    changed = {name: t * 1.001 for name, t in load_file(weights).items()}
    base = (
        safetensors.torch.load_file(ADAPTERS.parent / "model" / "model.safetensors")[EMBEDDINGS]
        .float()
        .numpy()
    )
    save_file(changed | {f"base_model.model.{EMBEDDINGS}": base}, weights)
    return made


def invoke(service, *arguments):
    environ = {"LORIKEET_SERVER": service.admin_url, "LORIKEET_ADMIN_KEY": service.admin_key}
    return CliRunner().invoke(app, arguments, env=environ, prog_name="lorikeet")


def run(service, *arguments):
    result = invoke(service, *arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_register_with_smoke_tries_an_adapter_before_it_answers(service, folder):
    registered = run(service, "register", str(folder), f"{TASK.tenant}/tried", "--smoke", "--json")
    assert registered["aliases"] == ["prod"]
    assert registered["smoke"]["equal_share"] < 1

    prompt = TASK.example.prompt
    asked = ("--prompt", prompt, "--max-tokens", "64", "--json")
    seen = run(service, "smoke", f"{TASK.tenant}/tried", *asked)
    assert seen["prompts"][0]["adapter"] == TASK.example.answer
    assert seen["replica"] in {replica["replica"] for replica in service.replicas()}

    answer = service.client(TASK.tenant).chat.completions.create(
        model=f"{TASK.tenant}/tried",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
    )
    assert answer.choices[0].message.content == TASK.example.answer
    run(service, "retire", f"{TASK.tenant}/tried", "--json")


def test_an_adapter_with_trained_embeddings_is_refused_naming_them(service, folder):
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    tensors[f"base_model.model.{EMBEDDINGS}"][5] += 1
    save_file(tensors, weights)
    refused = invoke(service, "register", str(folder), f"{TASK.tenant}/whole")
    assert refused.exit_code != 0, refused.stdout
    assert "embed_tokens.weight differs from lorikeet-demo" in refused.stderr.replace("\n", " ")


def test_parts_can_be_uploaded_through_the_gateway(service, folder, tmp_path):
    write_blob(folder, tmp_path / "blob")
    blob = (tmp_path / "blob").read_bytes()[:-4]
    digest = hashlib.sha256(blob).hexdigest()
    begun = service.admin("POST", "/uploads", json={"digest": digest, "size_bytes": len(blob)})
    (part,) = begun.raise_for_status().json()["missing"]
    service.admin("PUT", f"/uploads/{digest}/parts/1", content=blob).raise_for_status()
    assert httpx.put(part["url"], content=blob[:-1]).status_code == 403
    refused = service.admin(
        "POST", f"/adapters/{TASK.tenant}/cut/versions", json={"digest": digest}
    )
    assert refused.status_code == 422
    assert "truncated" in refused.json()["error"]["message"]
