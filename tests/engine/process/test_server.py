"""The engine's thread sleeps when idle, wakes at once, and survives errors."""

import importlib.util
import threading
import time
from dataclasses import replace

import pytest
import torch

from lorikeet_engine.errors import AdapterNotReady, EngineClosed, StepFailed
from lorikeet_engine.process import server
from lorikeet_engine.process.server import EngineLoop, StatusReporter
from lorikeet_engine.request import Failed, SchedulingParams
from tests.engine.engine_driver import RecordingRunner, build, greedy, prompt
from tests.engine.peft_adapters import save_adapter
from tests.waiting import eventually


class Received:
    """Outputs that a loop has delivered."""

    def __init__(self):
        self.outputs = []
        self.changed = threading.Condition()
        self.error = None

    def __call__(self, outputs):
        assert outputs
        with self.changed:
            self.outputs += outputs
            self.changed.notify_all()
        if self.error is not None:
            raise self.error

    def of(self, request_id):
        return [output for output in self.outputs if output.request_id == request_id]

    def ended(self, request_id):
        return any(isinstance(o, Failed) or o.finish is not None for o in self.of(request_id))

    def until(self, holds, timeout_s=20):
        with self.changed:
            assert self.changed.wait_for(holds, timeout_s)


@pytest.fixture
def engine(tiny_checkpoints, shelf, tmp_path):
    return build(tiny_checkpoints["llama"], shelf, tmp_path / "cache", max_running=8)


@pytest.fixture
def received():
    return Received()


@pytest.fixture
def loop(engine, received):
    loop = EngineLoop(engine, received, step_timeout_s=60)
    loop.start()
    yield loop
    loop.close()


def test_requests_of_many_threads_are_all_answered(engine, loop, received):
    def submit(name):
        for i in range(5):
            engine.submit(greedy(f"{name}{i}", prompt(5 + i), max_tokens=4))

    threads = [threading.Thread(target=submit, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    names = [f"{name}{i}" for name in "abcd" for i in range(5)]
    received.until(lambda: all(received.ended(name) for name in names))
    for name in names:
        assert sum(len(output.token_ids) for output in received.of(name)) == 4


def test_an_idle_engine_does_not_step(engine, loop):
    assert eventually(lambda: engine._idle)
    steps = []
    engine.step, step = lambda: steps.append(1) or step(), engine.step
    time.sleep(0.3)
    assert len(steps) <= 1


def test_a_request_that_waits_for_its_adapter_is_aborted_within_a_second(
    engine, loop, received, shelf, tiny_checkpoints, tmp_path
):
    folder = save_adapter(tiny_checkpoints["llama"], tmp_path / "a", target_modules=["q_proj"])
    ref = shelf.add(folder, "a")
    shelf.hold(ref)
    engine.submit(greedy("gone", prompt(5), adapter=ref))
    engine.submit(greedy("kept", prompt(5), adapter=ref))
    assert eventually(lambda: engine.status().live.waiting == 2)
    engine.abort("gone")
    assert eventually(lambda: engine.status().live.waiting == 1)
    shelf.release(ref)
    received.until(lambda: received.ended("kept"))
    assert not received.of("gone")


def test_aborting_a_running_request_frees_its_pages_within_a_second(engine, loop, received):
    engine.submit(greedy("r", prompt(5), max_tokens=400))
    received.until(lambda: received.of("r"))
    engine.abort("r")
    assert eventually(lambda: engine.status().live.kv_pages_used == 0)
    assert not received.ended("r")


def test_a_failing_forward_pass_fails_its_step_and_the_loop_goes_on(engine, loop, received):
    witness = RecordingRunner(engine)
    witness.error = RuntimeError("device-side assert")
    engine.submit(greedy("bad", prompt(5)))
    received.until(lambda: received.ended("bad"))
    assert isinstance(received.of("bad")[-1].error, StepFailed)
    engine.submit(greedy("good", prompt(5)))
    received.until(lambda: received.ended("good"))
    assert len(received.of("good")) == 12


def test_a_bug_in_the_engine_fails_open_requests_and_the_loop_goes_on(engine, loop, received):
    engine.submit(greedy("running", prompt(5), max_tokens=500))
    received.until(lambda: received.of("running"))

    def plan(_goal):
        raise AssertionError("the accounts do not add up")

    engine._scheduler.plan = plan
    received.until(lambda: received.ended("running"))
    assert isinstance(received.of("running")[-1].error, StepFailed)
    engine.submit(greedy("good", prompt(5)))
    received.until(lambda: received.ended("good"))
    assert eventually(lambda: engine.status().live.kv_pages_used == 0)


def test_only_the_request_that_is_late_before_the_engine_takes_it_fails(
    engine, loop, received, shelf, tiny_checkpoints, tmp_path
):
    folder = save_adapter(tiny_checkpoints["llama"], tmp_path / "a", target_modules=["q_proj"])
    ref, advance = shelf.add(folder, "a"), engine._tiers.advance
    shelf.hold(ref)
    at_once = SchedulingParams(max_load_s=0.0)
    late = replace(greedy("late", prompt(5), adapter=ref, n=2), scheduling=at_once)

    def submit_beside():  # between the step's look at submitted requests and its look at deadlines
        engine._tiers.advance = advance
        caller = threading.Thread(target=engine.submit, args=(late,))
        caller.start()
        caller.join()
        return advance()

    engine.submit(greedy("running", prompt(5), max_tokens=100))
    received.until(lambda: received.of("running"))
    engine._tiers.advance = submit_beside
    received.until(lambda: received.ended("late") and received.ended("running"))
    shelf.release(ref)
    engine.submit(greedy("next", prompt(5), adapter=ref))
    received.until(lambda: received.ended("next"))
    (failed,) = received.of("late")
    assert isinstance(failed.error, AdapterNotReady)
    assert sum(len(output.token_ids) for output in received.of("running")) == 100
    assert not engine._requests.open_choices


def test_outputs_of_an_interrupted_step_are_delivered(engine, received):
    finish = engine._scheduler.finish

    def finish_the_first(sequence):
        if sequence.request.request_id == "second":
            raise AssertionError("the accounts do not add up")
        finish(sequence)

    engine._scheduler.finish = finish_the_first
    for name in ("first", "second"):
        engine.submit(greedy(name, prompt(5), max_tokens=1))
    loop = EngineLoop(engine, received, step_timeout_s=60)
    loop.start()
    received.until(lambda: received.ended("first") and received.ended("second"))
    loop.close()
    (answer,) = received.of("first")
    assert len(answer.token_ids) == 1
    assert isinstance(received.of("second")[0].error, StepFailed)


def test_an_error_of_on_outputs_does_not_stop_the_loop(engine, loop, received):
    received.error = RuntimeError("the event loop is closed")
    engine.submit(greedy("r", prompt(5)))
    received.until(lambda: received.ended("r"))


def test_closing_ends_the_thread_and_fails_open_requests(engine, loop, received):
    engine.submit(greedy("r", prompt(5), max_tokens=400))
    received.until(lambda: received.of("r"))
    loop.close()
    assert "lorikeet-engine" not in {thread.name for thread in threading.enumerate()}
    assert isinstance(received.of("r")[-1].error, EngineClosed)
    with pytest.raises(EngineClosed):
        engine.submit(greedy("late", prompt(5)))
    loop.close()


def test_a_loop_that_never_started_can_be_closed(engine, received):
    engine.submit(greedy("r", prompt(5)))
    EngineLoop(engine, received, step_timeout_s=60).close()
    assert isinstance(received.of("r")[0].error, EngineClosed)


@pytest.fixture
def crowded(tiny_checkpoints, shelf, received, tmp_path):
    """A loop with six adapters, whose GPU holds one of them and whose host holds two."""
    target = ["q_proj", "down_proj"]
    folders = [
        save_adapter(tiny_checkpoints["llama"], tmp_path / f"{i}", i, r=8, target_modules=target)
        for i in range(6)
    ]
    refs = [shelf.add(folder, folder.name) for folder in folders]
    elements = 2 * 8 * (64 + 64 + 96 + 64)  # layers × rank × (d_in + d_out of both linears)
    cache, sizes = tmp_path / "crowded", {"adapter_gpu_bytes": 5 * elements}
    sizes["adapter_host_bytes"] = 10 * elements
    engine = build(tiny_checkpoints["llama"], shelf, cache, max_running=1, **sizes)
    loop = EngineLoop(engine, received, step_timeout_s=60)
    loop.start()
    yield engine, refs
    loop.close()


def test_more_adapters_than_fit_anywhere_are_all_served(crowded, received):
    engine, refs = crowded
    names = [f"{i}" for i in range(18)]
    for i, name in enumerate(names):
        engine.submit(greedy(name, prompt(5 + i), adapter=refs[i % 6], max_tokens=3))
        if i % 5 == 0:
            engine.submit(greedy(f"aborted {i}", prompt(5), adapter=refs[-i % 6], max_tokens=99))
            engine.abort(f"aborted {i}")
    received.until(lambda: all(received.ended(name) for name in names))
    assert not any(isinstance(output, Failed) for output in received.outputs)
    assert eventually(lambda: engine.status().live.kv_pages_used == 0)
    assert not any(adapter.leases for adapter in engine.adapters())


def test_an_engine_that_does_not_work_reports_no_status(engine):
    told, works = [], threading.Event()
    reporter = StatusReporter(engine, told.append, works.is_set)
    reporter.start()
    assert len(told) == 1
    engine.changed.set()
    time.sleep(1.2)
    assert len(told) == 1
    works.set()
    assert eventually(lambda: len(told) > 2)
    reporter.close()


def test_a_loop_tells_how_long_its_step_takes(engine, loop):
    assert eventually(lambda: engine._idle and not loop.step_s)
    begun, goes_on = threading.Event(), threading.Event()
    engine.step, step = lambda: (begun.set(), goes_on.wait(), step())[-1], engine.step
    engine.submit(greedy("r", prompt(5)))
    begun.wait()
    time.sleep(0.1)
    assert 0.1 <= loop.step_s < 10
    goes_on.set()


def test_the_process_logs_under_the_packages_name_though_it_runs_as_main():
    spec = importlib.util.spec_from_file_location("as_if_main", server.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.log.name == server.__name__


def test_torch_starts_no_cpu_threads_beside_a_gpu(monkeypatch):
    usual = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        server._leave_cores()
        assert torch.get_num_threads() == 2
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        server._leave_cores()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(usual)
