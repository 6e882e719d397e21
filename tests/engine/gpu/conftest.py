"""Engine of a module's float32 reference, and a check of its answers.

A test module here has a fixture `reference` of module scope, which returns a Float32Reference. It
may have ENGINE, settings of its engine.
"""

from collections.abc import Callable, Iterable, Iterator

import pytest

from lorikeet_engine.engine import Engine
from tests.engine.engine_driver import Answers, greedy, load_adapters
from tests.engine.float32_reference import (
    Float32Reference,
    RecordingSampler,
    build,
    compare,
    run_to_end,
)

Check = Callable[[Iterable[tuple[str | None, list[int]]], int], float]


@pytest.fixture(scope="module")
def engine(
    reference: Float32Reference,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    """Build the engine of a module; all adapters of its reference fit into one batch."""
    settings = {"max_batch_adapters": len(reference.refs), **getattr(request.module, "ENGINE", {})}
    engine = build(reference, tmp_path_factory.mktemp("cache"), **settings)
    yield engine
    engine.close()


@pytest.fixture(params=[True, False], ids=["graphs", "no_graphs"])
def check(
    reference: Float32Reference, engine: Engine, request: pytest.FixtureRequest
) -> Iterator[Check]:
    """Return a function that asks the engine, with and without graphs, and compares the answers.

    The function takes pairs of an adapter's name and a prompt, which are asked at once, and the
    number of tokens of each answer. It returns the share of tokens that `compare` finds clear.
    """
    runner, captured = engine._runner, engine._runner._graphs
    if reference.device == "cpu" and request.param:
        pytest.skip("graphs are CUDA's")
    runner._graphs = captured if request.param else None
    draws, answers = RecordingSampler(engine), Answers(engine)

    def check(prompts: Iterable[tuple[str | None, list[int]]], tokens: int) -> float:
        load_adapters(answers, reference.refs.values())
        asked = []
        for i, (name, ids) in enumerate(prompts):
            more = {"adapter": reference.refs[name], "salt": request.node.name, "seed": 100 * i}
            asked.append((name, greedy(f"r{i}", ids, max_tokens=tokens, **more)))
        for _, call in asked:
            answers.submit(call)
        run_to_end(answers)
        clear = [compare(reference, call, name, draws, answers) for name, call in asked]
        return sum(clear) / len(clear)

    yield check
    runner._graphs, engine._sampler = captured, draws._sampler
