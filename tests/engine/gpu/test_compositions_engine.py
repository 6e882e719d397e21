"""Whole engine under compositions, beside adapters alone and DoRA, compared with float32."""

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
SINGLE = {
    "rank8_all": ADAPTERS["rank8_all"],
    "rank16_all": {"r": 16, "lora_alpha": 16, "target_modules": [*ALL, "lm_head", "embed_tokens"]},
    "rank24_some": {
        "r": 24,
        "lora_alpha": 8,
        "target_modules": ["k_proj", "down_proj"],
        "use_rslora": True,
    },
    "dora": {"r": 8, "lora_alpha": 16, "target_modules": ALL, "use_dora": True},
}
COMPOSITIONS = {
    "two": {"rank8_all": 0.5, "rank16_all": -1.0},
    "three": {"rank8_all": 1.5, "rank16_all": 0.5, "rank24_some": 0.75},
}
BESIDE = {
    "alone": ["two"],
    "beside others": [*COMPOSITIONS, "rank8_all", "rank24_some", None],
    "beside DoRA": ["two", "dora", "three", None, "two"],
}
CASES = [
    *(pytest.param(("cuda", n), id=f"cuda-{n}", marks=pytest.mark.gpu) for n in ("llama", "qwen2")),
    pytest.param(("cpu", "qwen2"), id="cpu-qwen2"),
]


@pytest.fixture(scope="module", params=CASES)
def reference(request, tmp_path_factory):
    device, family = request.param
    made = Float32Reference(family, tmp_path_factory.mktemp(family), device, SINGLE)
    for name, weights in COMPOSITIONS.items():
        made.compose(name, weights)
    return made


@pytest.fixture(scope="module")
def engine(reference, tmp_path_factory):
    settings = {"max_batch_adapters": len(reference.refs)}
    engine = build(reference, tmp_path_factory.mktemp("cache"), **settings)
    yield engine
    engine.close()


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no_graphs"])
def test_every_answer_equals_the_references(reference, engine, graphs, beside):
    runner, captured = engine._runner, engine._runner._graphs
    if reference.device == "cpu" and graphs:
        pytest.skip("graphs are CUDA's")
    runner._graphs = captured if graphs else None
    draws, answers = RecordingSampler(engine), Answers(engine)
    try:
        load_adapters(answers, reference.refs.values())
        asked = []
        for i, name in enumerate(BESIDE[beside]):
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
