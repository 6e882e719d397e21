"""Whole engine under adapters with DoRA and biases beside others, compared with float32."""

import pytest

from tests.engine.engine_driver import Answers, greedy, load_adapters, prompt
from tests.engine.float32_reference import (
    ADAPTERS,
    ALL,
    Float32Reference,
    RecordingSampler,
    build,
    compare,
    run_to_end,
)

TOKENS = 16
LENGTHS = (17, 63, 133, 300)
WITH_VECTORS = {
    "dora": {"r": 8, "lora_alpha": 16, "target_modules": ALL, "use_dora": True},
    "dora_of_some": {
        "r": 24,
        "lora_alpha": 8,
        "target_modules": ["k_proj", "down_proj"],
        "use_rslora": True,
        "use_dora": True,
    },
    "biases": {"r": 4, "target_modules": ["q_proj", "o_proj", "up_proj"], "lora_bias": True},
}
CASES = [
    *(pytest.param(("cuda", n), id=f"cuda-{n}", marks=pytest.mark.gpu) for n in ("llama", "qwen2")),
    pytest.param(("cpu", "qwen2"), id="cpu-qwen2"),
]


@pytest.fixture(scope="module", params=CASES)
def reference(request, tmp_path_factory):
    device, family = request.param
    adapters = WITH_VECTORS | {"rank8_all": ADAPTERS["rank8_all"]}
    return Float32Reference(family, tmp_path_factory.mktemp(family), device, adapters)


@pytest.fixture(scope="module")
def engine(reference, tmp_path_factory):
    settings = {"max_batch_adapters": len(reference.refs)}
    engine = build(reference, tmp_path_factory.mktemp("cache"), **settings)
    yield engine
    engine.close()


@pytest.mark.parametrize("beside", [True, False], ids=["beside others", "alone"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no_graphs"])
def test_every_answer_equals_the_references(reference, engine, graphs, beside):
    runner, captured = engine._runner, engine._runner._graphs
    if reference.device == "cpu" and graphs:
        pytest.skip("graphs are CUDA's")
    runner._graphs = captured if graphs else None
    draws, answers = RecordingSampler(engine), Answers(engine)
    try:
        load_adapters(answers, [ref for ref in reference.refs.values() if ref is not None])
        asked = []
        for i, name in enumerate([*reference.refs, "dora"] if beside else ["dora_of_some"]):
            ids, salt = prompt(LENGTHS[i % len(LENGTHS)], i), f"{graphs} {beside}"
            more = {"adapter": reference.refs[name], "salt": salt, "seed": 100 * i}
            asked.append((name, greedy(f"r{i}", ids, max_tokens=TOKENS, **more)))
        for _, call in asked:
            answers.submit(call)
        run_to_end(answers)
        for name, call in asked:
            compare(reference, call, name, draws, answers)
    finally:
        runner._graphs, engine._sampler = captured, draws._sampler
