"""Engine on a GPU with too few KV pages, aborted requests, and failing steps."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from lorikeet_engine.errors import StepFailed
from tests.engine.engine_driver import (
    Answers,
    RecordingRunner,
    greedy,
    load_adapters,
    nothing_is_held,
    prompt,
)
from tests.engine.float32_reference import (
    NAMES,
    Float32Reference,
    RecordingSampler,
    build,
    compare,
    run_to_end,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return Float32Reference("llama", tmp_path_factory.mktemp("llama"), "cuda")


@pytest.fixture(scope="module")
def engine(reference, tmp_path_factory):
    """Engine of 20 KV pages, which hold 320 tokens."""
    sizes = {"kv_pages": 10, "max_context": 208, "max_running": 8, "max_batch_tokens": 64}
    engine = build(reference, tmp_path_factory.mktemp("cache"), **sizes)
    assert engine.status().live.kv_pages_total == 20
    yield engine
    engine.close()


@pytest.fixture
def run(engine, reference):
    """The engine with every adapter on the GPU, with recorders."""
    runner, sampler = engine._runner, engine._sampler
    seen = RecordingRunner(engine), RecordingSampler(engine), Answers(engine)
    load_adapters(seen[-1], reference.refs.values())
    yield seen
    engine._runner, engine._sampler = runner, sampler


def test_too_few_pages_change_no_answer(reference, run):
    witness, draws, answers = run
    asked = []
    for i in range(10):
        name = NAMES[i % len(NAMES)]
        more = {"adapter": reference.refs[name], "seed": 100 * i}
        asked.append((name, greedy(f"r{i}", prompt(20 + 5 * i, i), max_tokens=60, **more)))
        answers.submit(asked[-1][1])
    run_to_end(answers)
    once = sum(len(call.prompts[0]) + 59 for _, call in asked)
    assert witness.tokens > once, "somebody was computed twice"
    for name, call in asked:
        assert len(answers.of(call.request_id)) == 60
        compare(reference, call, name, draws, answers)
    assert nothing_is_held(answers.engine)


def test_requests_that_stop_or_are_aborted_change_no_other_answer(reference, run):
    _, draws, answers = run
    chance, asked, left = random.Random(7), {}, set()
    for i in range(80):
        name = chance.choice(NAMES)
        call = greedy(
            f"r{i}",
            prompt(chance.choice((1, 9, 30, 70)), i % 11),
            adapter=reference.refs[name],
            n=chance.choice((1, 1, 3)),
            salt=chance.choice(("acme", "globex")),
            max_tokens=chance.randint(1, 30),
            temperature=chance.choice((0.0, 1.0)),
            stop_token_ids=tuple(range(chance.choice((0, 100, 400)))),
            seed=100 * i,
        )
        asked[call.request_id] = name, call
        answers.submit(call)
        for _ in range(chance.randint(0, 3)):
            answers.step()
        if answers.pending and chance.random() < 0.4:
            leaver = chance.choice(sorted(answers.pending))
            answers.engine.abort(leaver)
            del answers.pending[leaver]
            left.add(leaver)
    run_to_end(answers)
    answers.step()
    assert 10 < len(left) < 60
    assert not answers.errors
    for request_id in asked.keys() - left:
        name, call = asked[request_id]
        compare(reference, call, name, draws, answers)
    assert nothing_is_held(answers.engine)


def test_an_exception_fails_only_the_requests_of_its_step(reference, run):
    witness, draws, answers = run
    calls = {}
    for i in range(16):
        name = NAMES[i % len(NAMES)]
        more = {"adapter": reference.refs[name], "seed": 100 * i}
        calls[f"r{i}"] = name, greedy(f"r{i}", prompt(5, i), max_tokens=10, **more)
        answers.submit(calls[f"r{i}"][1])
    answers.until(lambda: answers.tokens)
    witness.error = RuntimeError("a bug of ours")
    run_to_end(answers)
    failed = answers.errors.keys()
    assert 0 < len(failed) <= 8, "those of one step"
    assert all(isinstance(error, StepFailed) for error in answers.errors.values())
    for request_id in calls.keys() - failed:
        name, call = calls[request_id]
        compare(reference, call, name, draws, answers)
    assert nothing_is_held(answers.engine)


LOSE_THE_DEVICE = """
import os
import sys
from dataclasses import replace
from pathlib import Path

from loadtest.engine.random_model import random_model, write_config
from lorikeet_engine.engine import Engine, EngineSettings
from lorikeet_engine.errors import DeviceLost
from tests.engine.engine_driver import greedy

folder = Path(sys.argv[1])
config = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 512, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
settings = EngineSettings(
    write_config(folder / "model", config), folder / "cache", device="cuda", dtype="bfloat16",
    adapter_dtype="bfloat16", kv_bytes=4 << 20, max_running=2, max_batch_adapters=1,
)
engine = Engine(settings, None, random_model)
forward = engine._runner.forward
engine._runner.forward = lambda batch, _: forward(
    replace(batch, token_ids=batch.token_ids + 10**6)  # far outside of the embeddings
)
engine.submit(greedy("r", [5, 6, 7]))
for _ in range(3):
    try:
        outputs = engine.step()
    except DeviceLost as error:
        print(error, flush=True)
        os._exit(0)  # what torch would say of the device on its way out is of no interest
    assert not outputs, outputs
"""


def test_a_persistent_device_error_is_raised_as_device_lost(tmp_path):
    """Run in a process of its own, which cannot use the device afterwards."""
    run = subprocess.run(
        [sys.executable, "-c", LOSE_THE_DEVICE, tmp_path],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        timeout=240,
    )
    assert run.stdout.startswith("cuda failed and stays so"), run.stderr
