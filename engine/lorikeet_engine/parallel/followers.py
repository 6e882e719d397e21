"""Follower processes of a tensor parallel replica, as the leader manages them.

    leader ── ring: commands, in one order for all ──▶ every follower     (process/follower.py)
           ◀── a pipe each: reports of finished copies ── follower
           ◀─ a pipe each: questions of loads, answers ─▶ a thread of the follower

A follower executes the leader's commands in order and has no notion of requests. No rank can
continue without all others. So the leader's process ends as soon as a follower has ended or is
stopped, and Linux ends a follower whose leader has ended.
"""

import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from lorikeet_engine.errors import DeviceLost
from lorikeet_engine.parallel.ring import RingWriter, SharedMemory

log = logging.getLogger(__name__)

_LOOK_S = 0.25  # between checks of the followers' state
_EXITING = 0x4  # PF_EXITING of the kernel's include/linux/sched.h
_REAPED_S = 0.2  # limit of the wait for the exit status of an ended follower
_STOPPED_S = 3.0  # a debugger or a snapshot may stop a follower for a moment
_FAILED = 1  # exit status of a follower that ended by an error of its own
_TELL_S = 0.5  # left then for this process to meet the same error and report it
_END_S = 2.0  # limit of a follower's end after the ring is closed


class CopyReport(NamedTuple):
    """Report of a follower that it has finished a copy to its GPU.

    copy: number of the copy, as in the leader's command.
    total: checksum (word_sum) of the copied bytes as they arrived on the GPU; for KV pages, the
        number of damaged ones.
    """

    copy: int
    total: int


class RankCopies:
    """Reports of all followers that they have finished one copy to their GPUs."""

    def __init__(self, followers: int) -> None:
        self._totals: list[int] = []
        self._followers = followers
        self._over = threading.Event()

    def add(self, total: int) -> None:
        """Add the report of one follower.

        total: checksum of the bytes that it copied; for KV pages, its number of damaged ones.
        """
        self._totals.append(total)
        if len(self._totals) == self._followers:
            self._over.set()

    @property
    def is_over(self) -> bool:
        """Whether all followers have finished the copy."""
        return self._over.is_set()

    def wait(self) -> list[int]:
        """Wait until all followers have finished the copy, and return each report's `total`: a
        checksum; for KV pages, the number of damaged ones.
        """
        self._over.wait()
        return self._totals


class Followers:
    """Follower processes, one for each rank but the leader: started by the constructor, commanded
    by `send`, ended by `close`.

    Only one thread may call `queue`, `send` and `expect_copy`: the engine's thread, once the engine
    runs steps. Any thread may call `ask`. When a follower is lost, `on_lost` is called with its
    rank and the reason, on another thread.

    memory: memory shared with the followers, in addition to the ring buffer through which commands
        go.
    """

    def __init__(
        self,
        world: int,
        start: object,
        memory: SharedMemory,
        ring_bytes: int,
        fds: Sequence[int] = (),
        on_lost: Callable[[int, str], None] | None = None,
    ) -> None:
        """Start world − 1 processes. Linux ends them if the thread that calls this ends.

        world: number of ranks, including the leader.
        start: first message to the followers, picklable.
        memory: shared memory, which the followers map too.
        ring_bytes: size of the ring buffer of commands: bytes for messages that some follower has
            not read yet. No message can be larger.
        fds: file descriptors that the followers inherit under the same numbers.
        on_lost: called with rank and reason if a follower is lost; None: this process then ends.
        """
        self._on_lost = on_lost or _end_process
        self._queued: list[object] = []
        self._copies: dict[int, RankCopies] = {}
        self._closing = threading.Event()
        self.memory = memory
        size = ring_bytes + 8 * (world - 1)
        ring = SharedMemory(size)
        pipes = [os.pipe() for _ in range(1, world)]
        self._ring = RingWriter(ring, [wake for _, wake in pipes])
        self._reports, self._processes = list[Connection](), list["subprocess.Popen[bytes]"]()
        self._questions = list[tuple[threading.Lock, Connection]]()
        for rank, (woken, _) in enumerate(pipes, 1):
            reports, report_to = Pipe(duplex=False)
            questions, answer_to = Pipe()
            own = (ring.fd, woken, report_to.fileno(), answer_to.fileno(), memory.fd)
            numbers = rank, world, ring.fd, size, *own[1:], memory.size
            with report_to, answer_to:
                self._processes.append(_start(numbers, (*own, *fds)))
            os.close(woken)
            self._reports.append(reports)
            self._questions.append((threading.Lock(), questions))
        ring.close()
        memory.close()
        self._watcher = threading.Thread(target=self._run, name="lorikeet-ranks", daemon=True)
        self._watcher.start()
        self.send(start)

    @property
    def pids(self) -> list[int]:
        """Process ids of the followers, in the order of their ranks, which begin at 1."""
        return [process.pid for process in self._processes]

    def queue(self, *messages: object) -> None:
        """Queue messages to the followers. The next `send` sends them first."""
        self._queued += messages

    def send(self, *messages: object) -> None:
        """Send all queued messages, then the given messages, to every follower.

        Raises DeviceLost if a follower is gone.
        """
        queued, self._queued = self._queued, []
        try:
            self._ring.write(pickle.dumps([*queued, *messages], pickle.HIGHEST_PROTOCOL))
        except OSError as error:
            raise DeviceLost("a process of another GPU of this replica is gone") from error

    def ask(self, rank: int, question: object) -> Any:
        """Send a follower a question and wait for the answer, which another thread of the follower
        gives while its commands go on.

        rank: the follower's rank.
        question: picklable, like the answer.

        Raises DeviceLost if the follower is gone.
        """
        lock, pipe = self._questions[rank - 1]
        try:
            with lock:
                pipe.send(question)
                return pipe.recv()
        except (EOFError, OSError) as error:
            raise DeviceLost("a process of another GPU of this replica is gone") from error

    def expect_copy(self, copy: int) -> RankCopies:
        """Register a copy that followers will make, and return an object that collects their
        reports.

        Call this before the copy is commanded.

        copy: number of the copy.
        """
        copies = self._copies[copy] = RankCopies(len(self._processes))
        return copies

    def close(self) -> None:
        """Let the followers execute all messages sent so far; kill those that then do not end."""
        self._closing.set()
        self._ring.close()
        deadline_s = time.monotonic() + _END_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._watcher.join()
        for reports in self._reports:
            reports.close()
        for _, questions in self._questions:
            questions.close()

    def _run(self) -> None:
        stopped_since_s: dict[int, float] = {}
        while not self._closing.is_set():
            ready = wait(self._reports, _LOOK_S)
            for rank, reports in enumerate(self._reports, 1):
                if reports not in ready:
                    continue
                try:
                    report: CopyReport = reports.recv()
                except (EOFError, OSError):
                    self._ended(rank)
                    return
                self._copied(report)
            for rank, process in enumerate(self._processes, 1):
                state = _state_of(process.pid)
                if state is _State.ENDING:
                    self._ended(rank)
                    return
                if state is _State.ALIVE:
                    stopped_since_s.pop(rank, None)
                elif (
                    time.monotonic() - stopped_since_s.setdefault(rank, time.monotonic())
                    > _STOPPED_S
                ):
                    self._on_lost(rank, "it was stopped and does not go on")
                    return

    def _ended(self, rank: int) -> None:
        status = self._status(rank)
        if not self._closing.wait(_TELL_S if status == _FAILED else 0.0):
            self._on_lost(rank, f"it ended with status {status}")

    def _copied(self, report: CopyReport) -> None:
        copies = self._copies[report.copy]
        copies.add(report.total)
        if copies.is_over:
            del self._copies[report.copy]

    def _status(self, rank: int) -> int | None:
        try:
            return self._processes[rank - 1].wait(_REAPED_S)
        except subprocess.TimeoutExpired:
            return None


@contextmanager
def for_good() -> Iterator[None]:
    """Context manager for work that all ranks do, which turns every error into DeviceLost.

    After an error in one rank alone, the ranks differ and can never work together again.
    """
    try:
        yield
    except DeviceLost:
        raise
    except Exception as error:
        raise DeviceLost(f"the ranks of this replica are out of step: {error}") from error


def _start(numbers: Sequence[int], fds: Sequence[int]) -> "subprocess.Popen[bytes]":
    module = "lorikeet_engine.process.follower"
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(os.getpid()), *map(str, numbers)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
    )


class _State(Enum):
    """State of a follower process: alive, stopped by a signal, or ending."""

    ALIVE = auto()
    STOPPED = auto()  # by a signal: exists, but executes nothing
    ENDING = auto()


def _state_of(pid: int) -> _State:
    """Read from /proc whether a child process is alive, stopped or ending.

    Other signs are less reliable. A heartbeat stops while torch is imported or kernels compile. The
    pipe from the process is closed only after the process has freed its memory, 0.1 s for each GB.
    """
    try:
        facts = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # another thread has reaped the process meanwhile
        return _State.ENDING
    state, *_, flags = facts.rpartition(")")[2].split()[:7]
    if int(flags) & _EXITING:
        return _State.ENDING
    return _State.STOPPED if state in "tT" else _State.ALIVE


def _end_process(rank: int, reason: str) -> NoReturn:
    log.critical("rank_lost", extra={"rank": rank, "reason": reason})
    os._exit(1)
