"""A replica of two ranks ends as a whole, soon, whichever of them is lost and when.

What they share has no name: memory goes with the last process.
"""

import multiprocessing
import os
import signal
import threading
import time
from functools import partial

import psutil
import pytest
import torch

from lorikeet_engine.errors import DeviceLost, EngineClosed, ModelError
from lorikeet_engine.execution import ranks
from lorikeet_engine.models.llama import load_model
from lorikeet_engine.process import client
from lorikeet_engine.process.client import EngineProcessClient
from lorikeet_engine.settings import EngineSettings
from tests.engine import forked_engines
from tests.engine.blob_shelf import BlobShelf
from tests.engine.engine_driver import greedy, prompt
from tests.engine.peft_adapters import save_adapter
from tests.engine.process_engines import (
    close_and_open_others,
    followers,
    has_ended,
    losing_a_rank,
    of_two_forked_ranks,
    of_two_ranks,
    of_two_refusing_ranks,
)

SLACK_S = 2.0  # for a machine that is busy with other tests
# From a signal on, until the replica has ended.
WITHIN_S = {signal.SIGKILL: 1.0 + SLACK_S, signal.SIGSTOP: 5.0 + SLACK_S}
SIGNALS = pytest.mark.parametrize("sent", WITHIN_S, ids=lambda sent: sent.name)


class Ended:
    """Notes the end of an engine's process."""

    def __init__(self) -> None:
        self.error: EngineClosed | None = None
        self._ended = threading.Event()

    def __call__(self, error: EngineClosed) -> None:
        self.error = error
        self._ended.set()

    def within(self, seconds: float) -> bool:
        return self._ended.wait(seconds)


class Replica:
    """An engine of two ranks in its processes."""

    def __init__(self, build) -> None:
        self.ended, self.tokens = Ended(), threading.Event()
        self.client = EngineProcessClient(
            build, lambda _outputs: self.tokens.set(), self.ended, lambda _status: None
        )
        (pid,) = forked_engines.processes()
        self.leader = psutil.Process(pid)
        (self.follower,) = followers()

    def gone(self) -> bool:
        """Whether no process is left."""
        return not psutil.wait_procs([self.leader, self.follower], 5.0)[1]

    def close(self) -> None:
        for process in (self.follower, self.leader):
            if process.is_running():
                os.kill(process.pid, signal.SIGCONT)
        self.client.close()
        assert self.gone()


@pytest.fixture(autouse=True)
def _forked(monkeypatch):
    monkeypatch.setattr(client, "_start", forked_engines.start)


@pytest.fixture
def checkpoint(tiny_checkpoints):
    return tiny_checkpoints["llama"]


@pytest.fixture(params=[of_two_forked_ranks], ids=["forked"])
def replica(request, checkpoint, tmp_path):
    replica = Replica(partial(request.param, checkpoint, tmp_path))
    yield replica
    replica.close()


# Its follower is a process of its own from the start.
as_served = pytest.mark.parametrize("replica", [of_two_ranks], indirect=True, ids=["as served"])


def losing(stage, sent, checkpoint, folder):
    """Builder of an engine of two ranks that loses one at a stage."""
    build = partial(of_two_forked_ranks, checkpoint, folder)
    return partial(losing_a_rank, stage, sent, build, folder)


def lost(folder) -> int:
    """The process to which losing_a_rank sent its signal."""
    return int((folder / "lost").read_text())


def since(folder) -> float:
    """Seconds since losing_a_rank sent its signal."""
    return time.time() - (folder / "lost").stat().st_mtime


@SIGNALS
def test_a_follower_that_is_lost_in_steps_ends_its_replica(replica, sent):
    replica.client.submit(greedy("r", prompt(5), max_tokens=400)).result()
    assert replica.tokens.wait(20), "it steps"
    replica.follower.send_signal(sent)
    assert replica.ended.within(WITHIN_S[sent])
    assert replica.gone(), "a stopped process is killed with its leader"
    with pytest.raises(EngineClosed):
        replica.client.submit(greedy("r", prompt(5))).result()


@SIGNALS
def test_a_follower_that_is_lost_while_it_is_idle_ends_its_replica(replica, sent):
    replica.follower.send_signal(sent)
    assert replica.ended.within(WITHIN_S[sent])
    assert replica.gone()


@as_served
def test_a_killed_follower_is_missed_before_its_memory_is_given_back(replica):
    *_, reports_fd, _answers_fd, _host_fd, _host_bytes = replica.follower.cmdline()
    pipe = os.open(f"/proc/{replica.follower.pid}/fd/{reports_fd}", os.O_WRONLY)
    replica.follower.kill()  # and its pipe stays open, as one's whose end takes long
    assert replica.ended.within(WITHIN_S[signal.SIGKILL])
    os.close(pipe)


@SIGNALS
def test_a_follower_that_is_lost_while_an_adapter_comes_ends_its_replica(
    checkpoint, tmp_path, sent
):
    lora = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
    ref = BlobShelf(tmp_path / "blobs").add(save_adapter(checkpoint, tmp_path / "a", **lora), "a")
    replica = Replica(losing("load", sent, checkpoint, tmp_path))
    replica.client.submit(greedy("r", prompt(5), adapter=ref)).result()
    assert replica.ended.within(WITHIN_S[sent] + 10)
    assert since(tmp_path) < WITHIN_S[sent]
    assert not replica.tokens.is_set()
    replica.close()


@as_served
def test_followers_end_with_their_leader(replica):
    replica.leader.kill()
    assert replica.ended.within(WITHIN_S[signal.SIGKILL])
    assert replica.gone()


@SIGNALS
def test_a_follower_that_is_lost_does_not_hold_up_a_close(checkpoint, tmp_path, sent):
    replica = Replica(losing("close", sent, checkpoint, tmp_path))
    replica.client.close()
    assert since(tmp_path) < WITHIN_S[sent]
    assert replica.gone()
    assert not replica.ended.within(0)


@SIGNALS
def test_a_follower_that_is_lost_while_it_is_imported_ends_the_start(checkpoint, tmp_path, sent):
    found = []

    def lose() -> None:
        while not (started := followers()):
            time.sleep(0.01)
        found.extend(started)
        started[0].send_signal(sent)

    threading.Thread(target=lose, daemon=True).start()
    with pytest.raises((EngineClosed, DeviceLost)):  # whichever is seen first
        Replica(partial(of_two_ranks, checkpoint, tmp_path))
    assert has_ended(found[0].pid)


@SIGNALS
@pytest.mark.parametrize("stage", ["capture", "warm-up"])
def test_a_follower_that_is_lost_before_it_can_step_ends_the_start(
    checkpoint, tmp_path, stage, sent
):
    with pytest.raises((EngineClosed, DeviceLost)):
        Replica(losing(stage, sent, checkpoint, tmp_path))
    assert since(tmp_path) < WITHIN_S[sent]
    assert has_ended(lost(tmp_path))
    assert not forked_engines.processes()


def test_an_error_of_all_ranks_is_reported_whichever_rank_meets_it_first(checkpoint, tmp_path):
    with pytest.raises(ModelError, match="at fault"):
        Replica(partial(of_two_refusing_ranks, checkpoint, tmp_path))
    assert not forked_engines.processes()


def test_a_leader_without_memory_to_join_the_others_says_so(
    tiny_checkpoints, tmp_path, monkeypatch, one_thread
):
    def out_of_memory(*_group):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(ranks, "RankGroup", out_of_memory)
    settings = EngineSettings(tiny_checkpoints["llama"], tmp_path, tensor_parallel=2)
    with pytest.raises(torch.OutOfMemoryError):
        ranks.start_ranks(settings, load_model)
    assert not followers()


def test_a_process_ends_well_that_has_closed_an_engine_of_ranks(checkpoint, tmp_path):
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=close_and_open_others, args=(checkpoint, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 0
