"""Process of a replica's second or later GPU: python -m lorikeet_engine.process.follower.

The engine's process starts this one (parallel/followers.py) and sends commands through a ring;
Follower (execution/follower.py) carries them out. The process ends with its leader, or at the first
error.
"""

import ctypes
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from lorikeet_engine.parallel.followers import CopyReport
from lorikeet_engine.parallel.ring import RingReader, SharedMemory

log = logging.getLogger("lorikeet_engine.process.follower")

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Follow one leader (the process that sends commands to this one) until the leader ends.

    The command line is built by parallel/followers.py, which starts the process: process id of the
    leader, rank, number of ranks, then file descriptors of pipes and shared memory, with sizes.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    leader, rank, world, ring_fd, ring_bytes, wake_fd, reports_fd, answers_fd, *host = map(
        int, sys.argv[1:]
    )
    host_fd, host_bytes = host
    if os.getppid() != leader:  # the leader ended before the line above
        os._exit(1)
    for fd in (ring_fd, wake_fd, reports_fd, answers_fd, host_fd):
        os.set_inheritable(fd, False)
    ring = RingReader(SharedMemory(ring_bytes, ring_fd), world - 1, rank - 1, wake_fd)
    reports, questions = Connection(reports_fd, readable=False), Connection(answers_fd)
    try:
        _follow(ring, SharedMemory(host_bytes, host_fd), reports, questions, rank, world)
    except EOFError:  # the leader has closed the ring
        os._exit(0)  # at once: a thread may wait for a device that others have left
    except BaseException:
        log.critical("follower_failed", exc_info=True, extra={"rank": rank})
        os._exit(1)


def _follow(
    ring: RingReader,
    host: SharedMemory,
    reports: Connection,
    questions: Connection,
    rank: int,
    world: int,
) -> None:
    # Imported only here: from now on the leader notices if this process stands still.
    from lorikeet_engine.execution.follower import Follower
    from lorikeet_engine.parallel.shard import Shard

    lock = threading.Lock()

    def report(copy: CopyReport) -> None:
        with lock:
            reports.send(copy)

    (start, *rest) = pickle.loads(ring.read())
    assert not rest, "nothing comes with the first message"
    follower = Follower(start, Shard(rank, world), host, report)
    answering = partial(_answer, questions, follower.answer)
    threading.Thread(target=answering, name="lorikeet-answers", daemon=True).start()
    while True:
        for message in pickle.loads(ring.read()):
            follower.do(message)


def _answer(questions: Connection, answer: Callable[[Any], object]) -> None:
    """Answer the leader's questions until the leader closes the pipe.

    questions: pipe on which questions come and answers go.
    answer: returns the answer to a question.

    An error ends the process, since the leader waits for an answer.
    """
    try:
        while True:
            questions.send(answer(questions.recv()))
    except (EOFError, OSError):
        return
    except BaseException:
        log.critical("follower_failed", exc_info=True)
        os._exit(1)


if __name__ == "__main__":
    main()
