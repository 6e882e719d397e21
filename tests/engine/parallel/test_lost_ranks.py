"""A replica of two ranks ends as a whole, soon, whichever of them is lost and when."""

import os
import signal
import threading
import time
from functools import partial

import psutil
import pytest

from lorikeet_engine.errors import DeviceLost, EngineClosed
from lorikeet_engine.process.client import EngineProcessClient
from tests.engine.engine_driver import greedy, prompt
from tests.engine.process_engines import of_two_ranks

KILLED_S, STOPPED_S = 1.0, 5.0
SLACK_S = 2.0  # for a machine that is busy with other tests


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

    def __init__(self, checkpoint, folder) -> None:
        self.ended, self.tokens = Ended(), threading.Event()
        self.client = EngineProcessClient(
            partial(of_two_ranks, checkpoint, folder),
            lambda _outputs: self.tokens.set(),
            self.ended,
            lambda _status: None,
        )
        (self.leader,) = leaders()
        (self.follower,) = followers()

    def gone(self) -> bool:
        """Whether no process is left."""
        return not psutil.wait_procs([self.leader, self.follower], 5.0)[1]


def leaders() -> list[psutil.Process]:
    return running("lorikeet_engine.process.server")


def followers() -> list[psutil.Process]:
    return running("lorikeet_engine.process.follower")


def running(module: str) -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if module in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            pass
    return found


@pytest.fixture
def replica(tiny_checkpoints, tmp_path):
    replica = Replica(tiny_checkpoints["llama"], tmp_path)
    yield replica
    for process in (replica.follower, replica.leader):
        if process.is_running():
            os.kill(process.pid, signal.SIGCONT)
    replica.client.close()
    assert replica.gone()


def test_a_follower_that_is_killed_in_steps_ends_its_replica_at_once(replica):
    reply = replica.client.submit(greedy("r", prompt(5), max_tokens=400))
    reply.result()
    assert replica.tokens.wait(20), "it steps"
    replica.follower.kill()
    assert replica.ended.within(KILLED_S + SLACK_S)
    assert replica.gone()
    with pytest.raises(EngineClosed):
        replica.client.submit(greedy("r", prompt(5))).result()


def test_a_follower_that_is_stopped_while_it_is_idle_ends_its_replica_soon(replica):
    replica.follower.suspend()
    assert replica.ended.within(STOPPED_S + SLACK_S)
    assert replica.gone(), "a stopped process is killed with its leader"


def test_followers_end_with_their_leader(replica):
    replica.leader.kill()
    assert replica.ended.within(KILLED_S + SLACK_S)
    assert replica.gone()


def test_a_follower_that_is_stopped_does_not_hold_up_a_close(replica):
    replica.follower.suspend()
    began_s = time.monotonic()
    replica.client.close()
    assert time.monotonic() - began_s < STOPPED_S + SLACK_S
    assert replica.gone()
    assert not replica.ended.within(0)


@pytest.mark.parametrize("end", ["kill", "suspend"])
def test_a_follower_that_is_lost_while_it_starts_ends_the_start(tiny_checkpoints, tmp_path, end):
    def lose() -> None:
        while not (found := followers()):
            time.sleep(0.01)
        getattr(found[0], end)()

    threading.Thread(target=lose, daemon=True).start()
    with pytest.raises((EngineClosed, DeviceLost)):  # whichever is seen first
        Replica(tiny_checkpoints["llama"], tmp_path)
    assert not followers()
