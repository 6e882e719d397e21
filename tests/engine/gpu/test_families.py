"""All families, on a GPU in bfloat16, equal the float32 reference however the work is split.

Within the family's tolerance of float32_reference.
"""

from dataclasses import replace

import pytest

from tests.engine.engine_driver import (
    PAGE,
    Answers,
    RecordingRunner,
    greedy,
    load_adapters,
    prompt,
)
from tests.engine.float32_reference import (
    FAMILIES,
    NAMES,
    Float32Reference,
    RecordingSampler,
    compare,
    run_to_end,
)

pytestmark = pytest.mark.gpu
TOKENS = 24
LENGTHS = (1, 5, 17, 63, 133, 300)
CHUNK = 40


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request, tmp_path_factory):
    return Float32Reference(request.param, tmp_path_factory.mktemp(request.param), "cuda")


def requests(reference, salt):
    """Ten requests, two under each adapter and two under none, all with different prompts."""
    for i in range(2 * len(NAMES)):
        name, ids = NAMES[i % len(NAMES)], prompt(LENGTHS[i % len(LENGTHS)], i)
        more = {"adapter": reference.refs[name], "salt": salt, "seed": 100 * i}
        yield name, greedy(f"r{i}", ids, max_tokens=TOKENS, **more)


@pytest.fixture
def run(engine, graphs, overlap, chunked):
    """The engine with recorders. One serves all modes, as building it takes the most time."""
    runner, sampler, captured = engine._runner, engine._sampler, engine._runner._graphs
    settings, limits = engine._settings, engine._scheduler._limits
    assert captured is not None
    runner._graphs = captured if graphs else None
    engine._settings = replace(settings, overlap=overlap)
    engine._scheduler._limits = replace(limits, tokens=CHUNK) if chunked else limits
    yield RecordingRunner(engine), RecordingSampler(engine), Answers(engine)
    engine._runner, engine._sampler, runner._graphs = runner, sampler, captured
    engine._settings, engine._scheduler._limits = settings, limits


@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "read_at_once"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no_graphs"])
def test_every_answer_equals_the_references(reference, run, chunked, request):
    witness, draws, answers = run
    load_adapters(answers, reference.refs.values())
    asked = list(requests(reference, salt=request.node.name))
    computed = []
    for _ in ("anew", "with prefix hits"):
        before = witness.tokens
        for _, call in asked:
            answers.submit(call)
        run_to_end(answers)
        computed.append(witness.tokens - before)
        clear = [compare(reference, call, name, draws, answers) for name, call in asked]
        assert sum(clear) / len(clear) > 0.5, "too few tokens are compared"
    hits = sum((len(call.prompts[0]) - 1) // PAGE * PAGE for _, call in asked)
    if witness.state_slots:  # a prompt with states begins behind the last of these
        hits = 1
    assert computed[1] <= computed[0] - hits
    assert max(len(batch.segments or ()) for batch in witness.batches) == len(NAMES) - 1
    assert (max(len(batch.token_ids) for batch in witness.batches) <= CHUNK) == chunked


def test_the_adapters_change_the_models_answers(reference):
    ids = prompt(63)
    base = reference.logprobs(None, ids)
    for name in NAMES[1:]:
        change = reference.logprobs(name, ids) - base
        assert change.square().mean().sqrt() > 2 * reference.tolerance
