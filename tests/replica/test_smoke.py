"""Trying adapters on a replica: the demo model, real adapters and broken ones."""

import asyncio
import hashlib
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
from safetensors.numpy import load_file, save_file

from demo.fill_catalog import ADAPTERS, fill_catalog
from demo.tasks import TASKS
from lorikeet.catalog.catalog import blob_key
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.store.object_store import open_store
from lorikeet.gateway.admin.smoke import smoke_report
from lorikeet.protocol.messages import Refusal, SmokeTest
from lorikeet.replica.replica import Replica
from lorikeet.replica.smoke import Completions, run_smoke_test
from lorikeet.settings import Settings
from lorikeet.text.prompts import PromptEncoder
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.adapter_format import BaseCopy, WholeModule, row_digests, write_blob

TASK = TASKS[0]
PEFT = ADAPTERS / TASK.tenant / TASK.name


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    root = tmp_path_factory.mktemp("test")
    given = {"LORIKEET_CATALOG": str(root / "catalog"), "LORIKEET_CACHE_DIR": str(root / "cache")}
    settings = Settings.from_env(given)
    fill_catalog(settings, root)
    return settings


@pytest.fixture(scope="module")
def ask(settings):
    """ask(call): what call(replica) gives on the one replica of these tests."""

    async def start():
        return Replica("r0", "lorikeet-demo", settings)

    with asyncio.Runner() as loop:
        replica = loop.run(start())
        try:
            yield lambda asked: loop.run(asyncio.wait_for(asked(replica), 60))
        finally:
            replica.close()


@pytest.fixture
def try_out(ask):
    """try_out(test): the answer of the one replica of these tests."""
    return lambda test: ask(lambda replica: replica.smoke(test))


def trained(settings):
    return CatalogReader(open_store(settings.catalog)).refresh().resolve(TASK.model, TASK.tenant)


def stored(settings, tmp_path, change):
    """The ref of the task's adapter with every B changed; no version names it."""
    tensors = load_file(PEFT / "adapter_model.safetensors")
    changed = {
        name: change(tensor) if "lora_B" in name else tensor for name, tensor in tensors.items()
    }
    save_file(changed, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes((PEFT / "adapter_config.json").read_bytes())
    digest = write_blob(tmp_path, tmp_path / "blob")
    open_store(settings.catalog).put_file(blob_key(digest), tmp_path / "blob")
    return AdapterRef(TASK.tenant, "tried", 1, digest)


PROMPTS = (TASK.example.prompt, "hello")


def smoke_test_of(ref, *prompts):
    encode = PromptEncoder(Path("demo/model")).encode_turn
    return SmokeTest("t", ref, tuple(encode(each, 2**20) for each in prompts or PROMPTS), 48)


def test_a_fine_tune_does_its_task_and_the_base_model_does_not(settings, try_out):
    test = smoke_test_of(trained(settings))
    cold, warm = try_out(test), try_out(replace(test, request_id="again"))
    assert cold.adapted[0].text == TASK.example.answer
    assert cold.base[0].text != TASK.example.answer
    assert cold.residency < warm.residency == Residency.GPU
    assert (cold.base, cold.adapted) == (warm.base, warm.adapted)
    seen = smoke_report(PROMPTS, cold)
    assert seen["equal_share"] < 1
    assert seen["warnings"] == []


def test_prompts_of_a_smoke_test_invoke_an_activated_lora():
    asked = []

    async def run(request):
        asked.append(request.prompts)
        return Completions(None, [()] * len(request.prompts))

    ref = AdapterRef("acme", "check", 1, "d", (5, 6))
    test = SmokeTest("t", ref, (array("i", [1, 5, 6, 2]), array("i", [1, 2])), 4)
    asyncio.run(run_smoke_test(test, "r0", str, run))
    assert asked[1:] == [((1, 5, 6, 2), (1, 2, 5, 6))] * 2


def test_an_adapter_of_zeros_changes_nothing_and_gets_a_warning(settings, try_out, tmp_path):
    test = smoke_test_of(stored(settings, tmp_path, np.zeros_like))
    result = try_out(test)
    assert result.base == result.adapted
    (warning,) = smoke_report(PROMPTS, result)["warnings"]
    assert "changed none" in warning


def test_an_adapter_that_overflows_is_refused_by_name(settings, try_out, tmp_path):
    huge = stored(settings, tmp_path, lambda tensor: np.full_like(tensor, 1e38))
    refusal = try_out(smoke_test_of(huge))
    assert isinstance(refusal, Refusal)
    assert refusal.code == "invalid_adapter"
    assert str(huge) in refusal.message
    assert try_out(smoke_test_of(trained(settings))).adapted[0].text == TASK.example.answer


def test_a_prompt_that_cannot_fit_is_refused(settings, try_out):
    refusal = try_out(smoke_test_of(trained(settings), "word " * 5000))
    assert refusal.code == "context_length_exceeded"
    assert refusal.message.startswith("This model's maximum context length is")


def test_a_replica_compares_copies_with_its_base_models_matrices(settings, ask):
    model = safetensors.torch.load_file(settings.base_models["lorikeet-demo"] / "model.safetensors")
    matrix = model["model.embed_tokens.weight"].float().numpy()
    same, changed = (
        BaseCopy("embed_tokens", "F32", each.shape, hashlib.sha256(each.tobytes()).hexdigest())
        for each in (matrix, matrix * 2)
    )
    assert ask(lambda replica: replica.changed_copies([same])) == []
    assert ask(lambda replica: replica.changed_copies([same, changed])) == ["embed_tokens"]


def test_a_replica_compares_rows_with_its_base_models(settings, ask):
    model = safetensors.torch.load_file(settings.base_models["lorikeet-demo"] / "model.safetensors")
    matrix = model["model.embed_tokens.weight"].float()
    matrix[[3, 70]] += 1
    digests = row_digests(row.numpy().tobytes() for row in matrix)
    modules = [
        WholeModule("embed_tokens", "F32", digests),
        WholeModule("lm_head", "F32", digests[:-8]),
    ]
    both = {"embed_tokens": [3, 70], "lm_head": [3, 70]}
    assert ask(lambda replica: replica.changed_rows(modules)) == both
    more = [WholeModule("lm_head", "F32", digests + digests[:16])]
    assert ask(lambda replica: replica.changed_rows(more)) == {"lm_head": [3, 70, 262, 263]}
