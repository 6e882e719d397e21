"""Parity proofs: sound adapters are accepted, and planted faults found with their cause."""

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from demo.fill_catalog import fill_catalog
from lorikeet.catalog.catalog import blob_key
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.store.object_store import open_store
from lorikeet.errors import InvalidInput
from lorikeet.parity.figures import Bounds, Gap, GapCause, Verdict
from lorikeet.parity.probes import Probe, Probes
from lorikeet.protocol.parity import ParityTest
from lorikeet.replica.replica import Replica
from lorikeet.settings import Settings
from lorikeet_engine.adapter import Residency
from lorikeet_engine.adapter_format import write_blob
from tests.engine.conftest import TinyCheckpoints
from tests.engine.peft_adapters import save_adapter
from tests.replica.parity_world import ParityWorld, Trainer

Change = Callable[[str, np.ndarray], np.ndarray | None]
OFTEN = ("llama", "olmo2", "phi3", "glm4")  # the others differ in nothing that proofs read
FAMILIES = ("llama", "qwen2", "qwen3", "olmo2")
MORE = ("mistral", "phi3", "granite", "smollm3", "exaone4", "glm4")
DEMO = Path("demo/model")
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
WHOLE: dict[str, Any] = {
    "r": 8,
    "lora_alpha": 12,
    "target_modules": ATTENTION + MLP,
}
SHAPES: dict[str, dict[str, Any]] = {
    "whole": WHOLE,
    "rslora": {"r": 4, "lora_alpha": 3, "use_rslora": True, "target_modules": ["o_proj"]},
    "dora": {"r": 8, "lora_alpha": 8, "use_dora": True, "target_modules": ["down_proj"]},
    "head": {"r": 2, "lora_alpha": 4, "target_modules": ["o_proj", "lm_head"]},
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Case:
    """A family's checkpoint, its replica, and an adapter of all linears with its trainer."""

    def __init__(self, family: str, folder: Path) -> None:
        self.folder = folder
        self.base = TinyCheckpoints(folder / "models")[family]
        config = transformers.AutoConfig.from_pretrained(self.base)
        width = config.num_key_value_heads * getattr(config, "head_dim", 16)  # of square Bs
        ranks = {"k_proj": width, "v_proj": width}
        self.adapter = save_adapter(self.base, folder / "adapter", 1, **WHOLE, rank_pattern=ranks)
        self.world = ParityWorld(self.base, folder)
        self.trainer = Trainer(self.base, self.adapter)
        self.sequences = self.trainer.sampled()
        self.probes = self.trainer.probes(self.sequences)

    def copied(self, **config: Any) -> Path:
        """Copy the adapter's folder, with changes of its config."""
        copy = self.folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.adapter, copy)
        path = copy / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return copy

    def changed(
        self, change: Callable[[str, np.ndarray], np.ndarray | None], **config: Any
    ) -> Path:
        """Copy the adapter's folder, with each tensor changed, or left out for None."""
        copy = self.copied(**config)
        tensors = load_file(copy / "adapter_model.safetensors")
        made = {name: change(name, tensor) for name, tensor in tensors.items()}
        kept = {name: np.ascontiguousarray(t) for name, t in made.items() if t is not None}
        save_file(kept, copy / "adapter_model.safetensors")
        return copy


def of(families: Sequence[str]) -> list[Any]:
    """Parametrise with families; `make test` tries those of OFTEN alone."""
    marks = {name: [] if name in OFTEN else [pytest.mark.soak] for name in families}
    return [pytest.param(name, marks=marks[name]) for name in families]


@pytest.fixture(scope="module", params=of(FAMILIES))
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def transposed(name: str, tensor: np.ndarray) -> np.ndarray:
    square = "lora_B" in name and tensor.shape[0] == tensor.shape[1]
    return tensor.T if square else tensor


def without_attention(name: str, tensor: np.ndarray) -> np.ndarray | None:
    return None if "self_attn" in name else tensor


def of_zeros(name: str, tensor: np.ndarray) -> np.ndarray:
    return np.zeros_like(tensor) if "lora_B" in name else tensor


def earlier(name: str, tensor: np.ndarray) -> np.ndarray:
    draw = np.random.default_rng(len(name))
    return tensor + draw.normal(0, 0.1, tensor.shape).astype(np.float32)


SERVED: dict[str, tuple[Callable[[Case], Path], GapCause]] = {
    "doubled_alpha": (lambda case: case.copied(lora_alpha=24), GapCause.SCALING),
    "two_thirds_of_alpha": (lambda case: case.copied(lora_alpha=8), GapCause.SCALING),
    "rslora_forgotten": (lambda case: case.copied(use_rslora=True), GapCause.SCALING),
    "transposed_b": (lambda case: case.changed(transposed), GapCause.TRANSPOSED),
    "attention_not_saved": (
        lambda case: case.changed(without_attention, target_modules=MLP, rank_pattern={}),
        GapCause.MODULES,
    ),
    "untrained": (lambda case: case.changed(of_zeros), GapCause.VERSION),
    "stale": (lambda case: case.changed(earlier), GapCause.VERSION),
}
"""Faults of the served folder: the folder, and the cause to be found."""


@pytest.mark.parametrize("fault", SERVED)
def test_a_served_folder_with_a_fault_is_not_accepted_and_the_cause_is_named(case, fault):
    make, cause = SERVED[fault]
    parity = case.world.prove(make(case), case.probes)
    assert parity.verdict is not Verdict.ACCEPTED
    assert parity.cause is cause, parity


@pytest.mark.parametrize("left_out", [MLP, ["o_proj"]], ids=["mlp", "o_proj"])
def test_modules_that_the_trainer_does_not_compute_are_named(case, left_out):
    trainer = Trainer(case.base, case.adapter).without(left_out)
    parity = case.world.prove(case.adapter, trainer.probes(case.sequences))
    assert parity.verdict is not Verdict.ACCEPTED
    assert parity.cause is GapCause.MODULES
    assert ("without mlp" if left_out is MLP else "without self_attn.o_proj") in parity.reason


def test_probes_without_the_adapter_are_named(case):
    trainer = Trainer(case.base, case.adapter).without(ATTENTION + MLP)
    parity = case.world.prove(case.adapter, trainer.probes(case.sequences))
    assert (parity.verdict, parity.cause) == (Verdict.REFUSED, GapCause.NO_ADAPTER)


def test_another_base_model_is_named(case):
    other = case.folder / "other"
    model = transformers.AutoModelForCausalLM.from_pretrained(case.base, dtype=torch.float32)
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.data += 0.2 * weight.data.std() * torch.randn_like(weight) if weight.dim() > 1 else 0
    model.save_pretrained(other)
    parity = case.world.prove(case.adapter, Trainer(other, case.adapter).probes(case.sequences))
    assert (parity.verdict, parity.cause) == (Verdict.REFUSED, GapCause.BASE_MODEL)
    assert parity.base_mean > 0.5


@pytest.mark.parametrize("shape", SHAPES)
def test_sound_adapters_of_usual_families_are_accepted(case, shape, tmp_path):
    adapter = save_adapter(case.base, tmp_path / shape, 2, **SHAPES[shape])
    check_sound(case.world, case.base, adapter)


@pytest.mark.parametrize("family", of(MORE))
def test_sound_adapters_of_further_families_are_accepted(family, tmp_path):
    base = TinyCheckpoints(tmp_path / "models")[family]
    world = ParityWorld(base, tmp_path)
    for shape in SHAPES:
        check_sound(world, base, save_adapter(base, tmp_path / shape, 2, **SHAPES[shape]))


def test_activated_adapters_are_proved_behind_their_invocation(case, tmp_path):
    lora = {"r": 8, "target_modules": ["q_proj", "v_proj"], "alora_invocation_tokens": [7, 9]}
    adapter = save_adapter(case.base, tmp_path / "activated", 2, lora_alpha=8, **lora)
    doubled = shutil.copytree(adapter, tmp_path / "doubled")
    config = json.loads((doubled / "adapter_config.json").read_text())
    (doubled / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 16}))
    sequences = [([*prompt, 7, 9], completion) for prompt, completion in case.sequences]
    probes = Trainer(case.base, adapter).probes(sequences)
    sound, wrong = (
        case.world.prove_ref(
            replace(case.world.shelf.add(folder, "activated"), invocation_tokens=(7, 9)), probes
        )
        for folder in (adapter, doubled)
    )
    assert (sound.verdict, sound.mean < 1e-4) == (Verdict.ACCEPTED, True)
    assert wrong.cause is GapCause.SCALING


def check_sound(world: ParityWorld, base: Path, adapter: Path) -> None:
    requests = len(world.requests)
    parity = world.prove(adapter, Trainer(base, adapter).probes())
    assert (parity.verdict, parity.cause, parity.reason) == (Verdict.ACCEPTED, None, "")
    assert parity.mean < 1e-4
    assert len(world.requests) == requests + 2  # with the adapter and without it


TRAINED = [Path("demo/adapters") / name for name in ("quillon/reverse", "kestrel/spell")]


@pytest.fixture(scope="module")
def demo_probes():
    """demo_probes(adapter, dtype): probes of a trained adapter of the demo model."""
    made: dict[tuple[Path, str], Probes] = {}

    def probes(adapter, dtype):
        if (adapter, dtype) not in made:
            made[adapter, dtype] = Trainer(DEMO, adapter, dtype).probes()
        return made[adapter, dtype]

    return probes


@pytest.fixture(scope="module")
def served_in_bfloat16(tmp_path_factory):
    settings = {"dtype": "bfloat16", "adapter_dtype": "bfloat16"}
    return ParityWorld(DEMO, tmp_path_factory.mktemp("bfloat16"), **settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapter", TRAINED, ids=lambda path: path.name)
def test_roundings_of_bfloat16_are_within_the_default_bounds(
    served_in_bfloat16, demo_probes, adapter, dtype
):
    parity = served_in_bfloat16.prove(adapter, demo_probes(adapter, dtype))
    assert parity.verdict is Verdict.ACCEPTED, parity
    assert 1e-3 < parity.mean < 0.03


@pytest.mark.parametrize("adapter", TRAINED, ids=lambda path: path.name)
def test_a_strict_bound_warns_of_bfloat16_under_a_trainer_in_float32(
    served_in_bfloat16, demo_probes, adapter
):
    probes = demo_probes(adapter, "float32")
    parity = served_in_bfloat16.prove(adapter, probes, Bounds(warn_above=1e-3))
    assert (parity.verdict, parity.cause) == (Verdict.WARNED, GapCause.PRECISION)
    assert "in float32, the replica in bfloat16" in parity.reason


@pytest.mark.parametrize("adapter", TRAINED, ids=lambda path: path.name)
def test_a_base_model_rounded_to_fp8_is_named(demo_probes, adapter, tmp_path):
    world = ParityWorld(DEMO, tmp_path, weight_dtype="fp8")
    parity = world.prove(adapter, demo_probes(adapter, "float32"), Bounds(warn_above=0.02))
    assert (parity.verdict, parity.cause) == (Verdict.WARNED, GapCause.QUANTIZATION)
    assert "rounded to fp8" in parity.reason


def test_figures_are_those_of_the_formulas(case):
    served, trained = np.array([-1.0, -2.0, -0.5]), np.array([-1.5, -2.0, -0.25])
    gap = Gap.of(served, trained)
    assert gap.mean == pytest.approx(0.25)
    assert gap.max == pytest.approx(0.5)
    delta = served - trained
    assert gap.kl == pytest.approx(np.mean(np.exp(delta) - 1 - delta))
    parity = case.world.prove(case.copied(lora_alpha=24), case.probes)
    assert 0 < parity.mean < parity.max
    assert parity.tokens == sum(len(probe.logprobs) for probe in case.probes.probes)


def test_without_scores_of_the_base_model_the_bounds_alone_decide(case):
    probes = [probe.model_copy(update={"base_logprobs": []}) for probe in case.probes.probes]
    bare = Probes(probes=probes)
    assert case.world.prove(case.adapter, bare).verdict is Verdict.ACCEPTED
    wrong = case.copied(lora_alpha=24)
    assert case.world.prove(wrong, bare).cause is GapCause.SCALING
    lenient = case.world.prove(wrong, bare, Bounds(9.0, 9.0))
    assert (lenient.verdict, lenient.base_mean) == (Verdict.ACCEPTED, None)
    assert case.world.prove(case.changed(earlier), bare).cause is GapCause.UNKNOWN


def test_variants_leave_no_blobs_behind(case):
    adapter = case.copied(lora_alpha=24)
    case.world.prove(adapter, case.probes)
    blobs = {path.name for path in case.world.cache.iterdir() if len(path.name) == 64}
    assert blobs <= set(case.world.shelf.fetched)


def test_variants_leave_nothing_in_the_engine_and_count_no_loads(case):
    engine = case.world.engine
    served = case.world.shelf.add(case.copied(lora_alpha=36), "policy")
    before = {tier: status.adapters for tier, status in engine.status().tiers.items()}
    engine.take_use()
    assert case.world.prove_ref(served, case.probes).cause is GapCause.SCALING
    engine.step()
    added = {tier: status.adapters - before[tier] for tier, status in engine.status().tiers.items()}
    assert max(added[Residency.GPU], added[Residency.HOST]) <= 1
    listed = {(each.name, each.version, each.digest) for each in engine.adapters(Residency.REMOTE)}
    assert (served.name, served.version, served.digest) in listed
    assert {digest for _, _, digest in listed} <= set(case.world.shelf.fetched)
    assert {use.tenant for use in engine.take_use()} == {""}
    assert {path.name[:64] for path in case.world.cache.iterdir()} <= set(case.world.shelf.fetched)


def test_a_variant_that_is_another_version_of_the_adapter_stays(case):
    version = case.world.shelf.add(case.adapter, "policy")
    case.world.prove_ref(version, case.probes)
    (case.world.cache / version.digest).touch()  # pinned or not, it was fetched
    case.world.prove(case.copied(lora_alpha=24), case.probes)
    assert (case.world.cache / version.digest).exists()


def test_probes_that_the_model_cannot_score_are_refused(case):
    for ids in ([5] * 600, [5, 10**6]):
        with pytest.raises(InvalidInput, match="probes: ") as refused:
            case.world.prove(case.adapter, Probes(probes=[Probe(token_ids=ids, logprobs=[-1.0])]))
        assert refused.value.param == "probes"


def test_a_replica_proves_parity_of_a_stored_adapter(demo_probes, tmp_path):
    settings = Settings.from_env(
        {"LORIKEET_CATALOG": str(tmp_path / "catalog"), "LORIKEET_CACHE_DIR": str(tmp_path / "c")}
    )
    fill_catalog(settings, tmp_path)
    store = open_store(settings.catalog)
    probes = demo_probes(TRAINED[0], "float32")
    state = CatalogReader(store).refresh()
    sound = state.resolve("quillon/reverse", "quillon")
    wrong = tmp_path / "wrong"
    shutil.copytree(TRAINED[0], wrong)
    config = json.loads((wrong / "adapter_config.json").read_text())
    (wrong / "adapter_config.json").write_text(
        json.dumps(config | {"lora_alpha": 2 * config["lora_alpha"]})
    )
    digest = write_blob(wrong, tmp_path / "blob")
    store.put_file(blob_key(digest), tmp_path / "blob")

    async def prove():
        replica = Replica("r0", "lorikeet-demo", settings)
        try:
            refs = sound, replace(sound, digest=digest)
            tests = [ParityTest(f"p{i}", ref, probes, Bounds()) for i, ref in enumerate(refs)]
            proved = [await replica.parity(test) for test in tests]
            async with asyncio.timeout(60):
                while any("variant" in str(row) for row in (await replica.report()).rows):
                    await asyncio.sleep(0.05)
            return proved
        finally:
            replica.close()

    accepted, refused = asyncio.run(prove())
    assert (accepted.verdict, accepted.cause) == (Verdict.ACCEPTED, None)
    assert (refused.verdict, refused.cause) == (Verdict.REFUSED, GapCause.SCALING)
