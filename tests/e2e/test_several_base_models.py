"""Two base models of different families in one service, each with its own adapters.

Torch, transformers and PEFT, 8 s of processor time, are imported only where these tests run.
"""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo.fill_catalog import ADAPTERS, fill_catalog
from demo.tasks import TASKS
from lorikeet.settings import Settings
from lorikeet_engine.adapter_format import write_blob
from tests.e2e.conftest import ROOT, Service, free_port
from tests.waiting import eventually

pytestmark = pytest.mark.soak

LLAMA, QWEN = "lorikeet-demo", "tiny-qwen"
TASK = TASKS[0]
PROMPT = list(range(20, 40))
TOKENS = 12
SIZES = {
    "vocab_size": 262,  # of the demo's tokenizer
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Qwen:
    """A tiny Qwen 3 with random weights, and an adapter of it."""

    model: Path
    adapter: Path

    def answer(self) -> str:
        """Return the answer of transformers and PEFT to PROMPT."""
        import torch
        import transformers
        from peft import PeftModel

        base = transformers.AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        tuned = PeftModel.from_pretrained(base, self.adapter).eval()
        ids = torch.tensor([PROMPT])
        with torch.inference_mode():
            made = tuned.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                do_sample=False,
                pad_token_id=2,
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.model)
        return str(tokenizer.decode(made[0, len(PROMPT) :], skip_special_tokens=True))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Qwen:
    import torch
    import transformers

    from tests.engine.peft_adapters import save_adapter

    folder = tmp_path_factory.mktemp("models") / QWEN
    config = transformers.AutoConfig.for_model("qwen3", **SIZES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "demo" / "model" / name, folder)
    adapter = save_adapter(
        folder, folder.with_name("adapter"), r=8, target_modules=["q_proj", "down_proj"]
    )
    return Qwen(folder, adapter)


@pytest.fixture(scope="module")
def two(
    service: Service, s3_bucket: str, qwen: Qwen, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """Second application beside the session's."""
    from ray import serve

    from lorikeet.serving.deployments import controller, engine, gateway

    root = tmp_path_factory.mktemp("two")
    settings = Settings.from_env(
        {
            "LORIKEET_CATALOG": f"{s3_bucket}/two",
            "LORIKEET_CACHE_DIR": str(root / "cache"),
            "LORIKEET_ADMIN_ADDRESS": f"127.0.0.1:{free_port()}",
            "LORIKEET_BASE_MODELS": f"{LLAMA}={ROOT / 'demo' / 'model'},{QWEN}={qwen.model}",
            "LORIKEET_REPLICAS": f"{LLAMA}=1,{QWEN}=2",
            "LORIKEET_MAX_CONTEXT": f"{QWEN}=256",
        }
    )
    keys = fill_catalog(settings, root / "keys")
    engines = {name: engine(settings, name) for name in settings.base_models}
    app = gateway(settings, engines, controller(settings, engines))
    serve.run(app, name="two", route_prefix="/two")
    yield Service(
        f"{service.url}/two",
        f"http://{settings.admin_address}",
        settings.catalog,
        keys.admin,
        keys.tenants,
    )
    serve.delete("two")


@pytest.fixture(scope="module")
def registered(two: Service, qwen: Qwen, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Name of the Qwen adapter, registered without naming its base model."""
    blob = tmp_path_factory.mktemp("blob") / "blob"
    write_blob(qwen.adapter, blob)
    name = f"{TASK.tenant}/for-qwen"
    answer = two.admin("PUT", f"/adapters/{name}/versions", content=blob.read_bytes())
    assert answer.raise_for_status().json()["base_model"] == QWEN
    return name


def say(service: Service, model: str, prompt: Any) -> str:
    answer = service.client(TASK.tenant).completions.create(
        model=model, prompt=prompt, max_tokens=TOKENS, temperature=0
    )
    return str(answer.choices[0].text)


def test_each_model_has_its_configured_number_of_replicas(two: Service) -> None:
    assert eventually(lambda: len(two.replicas()) == 3, within_s=60)
    served = sorted(replica["base_model"] for replica in two.replicas())
    assert served == [LLAMA, QWEN, QWEN]


def test_adapters_and_base_models_answer_alike_at_once_and_alone(
    two: Service, registered: str, qwen: Qwen
) -> None:
    models = (registered, QWEN, TASK.model, LLAMA)
    alone = {model: say(two, model, PROMPT) for model in models}
    assert alone[registered] == qwen.answer()
    assert len(set(alone.values())) == len(models)
    with ThreadPoolExecutor(16) as pool:
        asked = models * 8
        said = list(pool.map(lambda model: say(two, model, PROMPT), asked))
    assert said == [alone[model] for model in asked]


def test_a_chat_with_an_adapter_of_the_other_model_does_its_task(two: Service) -> None:
    message = {"role": "user", "content": TASK.example.prompt}
    answer = two.client(TASK.tenant).chat.completions.create(
        model=TASK.model, messages=[message], temperature=0, max_tokens=100
    )
    assert answer.choices[0].message.content == TASK.example.answer


def test_the_list_of_models_names_each_adapters_base_model(two: Service, registered: str) -> None:
    parents = {
        model.id: model.model_extra["parent"] for model in two.client(TASK.tenant).models.list()
    }
    assert parents[LLAMA] is None
    assert parents[QWEN] is None
    assert (parents[registered], parents[TASK.model]) == (QWEN, LLAMA)


def test_a_pin_to_all_replicas_counts_only_replicas_of_its_base_model(
    two: Service, registered: str
) -> None:
    two.admin("PUT", f"/pins/{registered}", json={"reason": "test"}).raise_for_status()
    replicas = {r["replica"] for r in two.replicas() if r["base_model"] == QWEN}
    assert eventually(lambda: two.holders(registered) == replicas, within_s=30)


def test_an_adapter_of_the_wrong_base_model_is_refused_naming_both(
    two: Service, tmp_path: Path
) -> None:
    write_blob(ADAPTERS / TASK.tenant / TASK.name, tmp_path / "blob")
    path, data = f"/adapters/{TASK.tenant}/wrong/versions", (tmp_path / "blob").read_bytes()
    misfit = two.admin("PUT", path, content=data, params={"base_model": QWEN})
    assert misfit.status_code == 422
    assert "was trained for another" in misfit.json()["error"]["message"]
    unknown = two.admin("PUT", path, content=data, params={"base_model": "gemma"})
    assert unknown.status_code == 400
    assert f"is not served here: {LLAMA}, {QWEN}" in unknown.json()["error"]["message"]


def test_one_model_may_have_a_shorter_context(two: Service) -> None:
    import openai

    say(two, LLAMA, [30] * 400)
    with pytest.raises(openai.BadRequestError, match="256"):
        say(two, QWEN, [30] * 400)
