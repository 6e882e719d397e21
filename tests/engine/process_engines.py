"""Engines to build in processes of their own, some of them broken."""

import ctypes
import shutil
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

from lorikeet.logs import log_to_stderr
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.engine import Engine
from lorikeet_engine.errors import DeviceLost, ModelError
from lorikeet_engine.execution.ranks import LeadingRank
from lorikeet_engine.execution.step_timer import StepTimer
from lorikeet_engine.parallel import followers as followers_module
from lorikeet_engine.parallel.followers import Followers
from lorikeet_engine.process.client import EngineProcessClient
from lorikeet_engine.residency.gpu.rank_arenas import LeadingArena
from lorikeet_engine.settings import EngineSettings
from tests.engine import forked_followers
from tests.engine.engine_driver import build, greedy, prompt


class Blobs:
    """AdapterSource over the folder of a BlobShelf."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def fetch(self, ref: AdapterRef, path: Path) -> None:
        shutil.copyfile(self._folder / ref.digest, path)


def working(checkpoint: Path, folder: Path) -> Engine:
    """Build a working engine with its cache and its adapters' blobs in `folder`."""
    log_to_stderr()
    return build(checkpoint, Blobs(folder / "blobs"), folder / "cache", overlap=False)


def of_two_ranks(checkpoint: Path, folder: Path) -> Engine:
    """Build a working engine in two processes."""
    log_to_stderr()
    torch.set_num_threads(1)
    sizes = {"overlap": False, "max_running": 8, "max_batch_tokens": 64, "tensor_parallel": 2}
    return build(checkpoint, Blobs(folder / "blobs"), folder / "cache", measured=True, **sizes)


def of_two_forked_ranks(checkpoint: Path, folder: Path) -> Engine:
    """Build a working engine in this process of FORKSERVER and in a copy of the process."""
    followers_module._start = forked_followers.start_as_child  # type: ignore[assignment]
    return of_two_ranks(checkpoint, folder)


def of_two_refusing_ranks(checkpoint: Path, folder: Path) -> Engine:
    """Build an engine in two processes, which both refuse its checkpoint, the first one later."""
    followers_module._start = forked_followers.start_as_child  # type: ignore[assignment]
    settings = EngineSettings(checkpoint, folder / "cache", tensor_parallel=2)
    return Engine(settings, Blobs(folder), _refuse)


def _refuse(*given: Any, **_: Any) -> NoReturn:
    if given[-1].leads:
        time.sleep(0.2)
    raise ModelError("the checkpoint is at fault")


def losing_a_rank(stage: str, sent: int, build: Callable[[], Engine], folder: Path) -> Engine:
    """Build an engine of two processes; the second gets a signal when the first reaches a stage.

    The file `lost` in the folder is written just before the signal, and has the second process's
    id.

    stage: key of _STAGES.
    sent: number of the signal.
    build: builds the engine.
    """
    owner, name = _STAGES[stage]
    unharmed = getattr(owner, name)

    def lose(*arguments: Any, **others: Any) -> Any:
        setattr(owner, name, unharmed)
        (follower,) = followers()
        (folder / "lost").write_text(str(follower.pid))
        follower.send_signal(sent)
        return unharmed(*arguments, **others)

    setattr(owner, name, lose)
    return build()


# capture: KV pages are allocated and, on CUDA, steps captured; load: an image's copy begins.
_STAGES: dict[str, tuple[type, str]] = {
    "capture": (LeadingRank, "announce"),
    "warm-up": (StepTimer, "decodes_s"),
    "load": (LeadingArena, "copy"),
    "close": (Followers, "close"),
}


def close_and_open_others(checkpoint: Path, folder: Path) -> None:
    """Close an engine of two ranks; leave sockets open that get its descriptors' numbers."""
    of_two_ranks(checkpoint, folder).close()
    globals()["_sockets"] = [socket.socket() for _ in range(100)]  # until the process ends


def hanging(checkpoint: Path, folder: Path) -> Engine:
    """Engine whose steps hang in C without the interpreter lock."""
    return _stepping(lambda: time.sleep(600), checkpoint, folder)


def hanging_with_the_gil(checkpoint: Path, folder: Path) -> Engine:
    """Engine whose steps hang in C and keep the interpreter lock."""
    return _stepping(lambda: ctypes.PyDLL(None).sleep(600), checkpoint, folder)


def without_device(checkpoint: Path, folder: Path) -> Engine:
    """Engine whose first step raises DeviceLost."""

    def fail() -> None:
        raise DeviceLost("cuda:0 failed and stays so: an illegal memory access")

    return _stepping(fail, checkpoint, folder)


def unable_to_reset(checkpoint: Path, folder: Path) -> Engine:
    """Engine whose first step fails in its own code, and which cannot reset itself either."""

    def fail(_error: Exception | None = None) -> Any:
        raise AssertionError("the accounts do not add up")

    engine = _stepping(fail, checkpoint, folder)
    engine.fail_all = fail  # type: ignore[method-assign]
    return engine


def _stepping(step: Callable[[], Any], checkpoint: Path, folder: Path) -> Engine:
    engine = working(checkpoint, folder)
    wait = engine.wait

    def wait_for_a_request(timeout_s: float | None = None) -> None:
        while not engine._requests.submitted:
            wait(timeout_s)

    engine.wait, engine.step = wait_for_a_request, step  # type: ignore[method-assign]
    return engine


def processes() -> set[int]:
    """Ids of the engine processes that this process has started and that have not ended."""
    return {child.pid for child in psutil.Process().children() if _runs(child, "server")}


def followers() -> list[psutil.Process]:
    """Followers of this process's engines, in whichever process the engines run."""
    return [p for p in psutil.Process().children(recursive=True) if _runs(p, "follower")]


def has_ended(pid: int, within_s: float = 5.0) -> bool:
    """Whether a process ends in time; `followers` cannot tell once its parent has ended."""
    try:
        return not psutil.wait_procs([psutil.Process(pid)], within_s)[1]
    except psutil.NoSuchProcess:
        return True


def _runs(process: psutil.Process, module: str) -> bool:
    try:
        name, command = process.name(), process.cmdline()
        return name == module or f"lorikeet_engine.process.{module}" in command
    except psutil.NoSuchProcess:  # the process has just ended
        return False


def main() -> None:
    """Run a client whose engine hangs in a step; print a line and go on until killed."""
    client = EngineProcessClient(
        partial(hanging, *map(Path, sys.argv[1:])), print, print, lambda _status: None
    )
    client.submit(greedy("r", prompt(5))).result()
    print("steps", flush=True)
    time.sleep(600)
