"""Adapters on experts, on a GPU in bfloat16, equal the float32 reference."""

from collections.abc import Iterator

import pytest

from lorikeet_engine.engine import Engine
from tests.engine.engine_driver import Answers, greedy, load_adapters, prompt
from tests.engine.float32_reference import (
    TOLERANCE,
    Float32Reference,
    RecordingSampler,
    build,
    compare,
    run_to_end,
)
from tests.engine.moe_adapters import BOTH

pytestmark = pytest.mark.gpu
ADAPTERS = {
    "moe": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj"],
        "target_parameters": BOTH,
        "rank_pattern": {"experts.down_proj": 24},
    }
}
LENGTHS = (1, 17, 63, 300)


@pytest.fixture(scope="module", params=("qwen3_moe", "mixtral", "gpt_oss"))
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Float32Reference:
    folder = tmp_path_factory.mktemp(request.param)
    return Float32Reference(request.param, folder, "cuda", ADAPTERS)


@pytest.fixture(scope="module")
def engine(
    reference: Float32Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    engine = build(reference, tmp_path_factory.mktemp("cache"))
    yield engine
    engine.close()


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no_graphs"])
def test_every_answer_equals_the_references(
    reference: Float32Reference, engine: Engine, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not graphs:
        monkeypatch.setattr(engine._runner, "_graphs", None)
    monkeypatch.setattr(engine, "_sampler", engine._sampler)  # monkeypatch restores it afterwards
    draws, answers = RecordingSampler(engine), Answers(engine)
    load_adapters(answers, reference.refs.values())
    asked = []
    for i in range(2 * len(LENGTHS)):
        name = "moe" if i % 2 else None
        adapter, salt = reference.refs[name], str(graphs)
        ids = prompt(LENGTHS[i // 2], i)
        more = {"adapter": adapter, "salt": salt, "seed": 100 * i}
        asked.append((name, greedy(f"r{i}-{graphs}", ids, max_tokens=24, **more)))
    for _, call in asked:
        answers.submit(call)
    run_to_end(answers)
    clear = [compare(reference, call, name, draws, answers) for name, call in asked]
    assert sum(clear) / len(clear) > 0.5, "too few tokens are compared"


def test_the_adapter_changes_the_models_answers(reference: Float32Reference) -> None:
    change = reference.logprobs("moe", prompt(63)) - reference.logprobs(None, prompt(63))
    assert change.square().mean().sqrt() > 3 * TOLERANCE
