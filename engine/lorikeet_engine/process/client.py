"""Client of an engine in a process of its own: starts the process and calls it. Loads no torch."""

import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.errors import EngineClosed
from lorikeet_engine.process.wire import MessageSender, Reply, from_rows, receive
from lorikeet_engine.request import Output, Request
from lorikeet_engine.telemetry.status import AdapterRows, EngineInfo, EngineStatus, SlotUse

if TYPE_CHECKING:
    from lorikeet_engine.engine import Engine

log = logging.getLogger(__name__)


class _PendingCall(NamedTuple):
    """Call whose reply has not come yet.

    reply: future that gets the reply.
    at_s: time of the call, by the monotonic clock.
    """

    reply: Future[Any]
    at_s: float


class EngineProcessClient:
    """Client of a replica's engine, which runs in a process of its own.

    Results and errors of Engine's methods come back through futures, in the order of the calls. No
    call waits for the engine. Methods may be called on any thread.
    """

    def __init__(
        self,
        build: Callable[[], "Engine"],
        on_outputs: Callable[[list[Output]], None],
        on_ended: Callable[[EngineClosed], None],
        on_status: Callable[[EngineStatus], None],
        step_timeout_s: float = 120.0,
    ) -> None:
        """Start the process and wait until its engine is built. Raises the errors of `build`.

        build: returns the engine; picklable, since it is called in the new process.
        on_outputs: called with each step's outputs.
        on_ended: called once, as the last callback, if the process ends without `close`. The
            argument is the error with which all open requests fail.
        on_status: called with each status that the engine reports: at most ten a second, and two a
            second while it works. The first status comes before the constructor returns, and names
            every adapter on the GPU, in host memory or on the disk.
        step_timeout_s: time after which a step counts as hanging, and the process ends.

        All callbacks are called on a thread of the client's own, and must not block.
        """
        self._on_outputs = on_outputs
        self._on_ended = on_ended
        self._on_status = on_status
        self._lock = threading.Lock()  # guards the four below
        self._pending: deque[_PendingCall] = deque()
        self._replied_s = 0.0  # when the last reply came
        self._reported_s = 0.0  # when the last status came
        self._closing = False
        self._error: EngineClosed | None = None
        self._status: EngineStatus  # received before info
        calls, to_engine = Pipe(duplex=False)
        from_engine, messages = Pipe(duplex=False)
        self._sender = MessageSender(to_engine)
        self._started: Future[EngineInfo] = self._call(build, step_timeout_s)
        self._thread = threading.Thread(
            target=self._run, args=(calls, messages, from_engine), name="engine-client", daemon=True
        )
        self._thread.start()
        try:
            self.info = self._started.result()
        except Exception:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether the engine's process runs. If not, every call fails with EngineClosed."""
        return self._error is None

    @property
    def silent_s(self) -> float:
        """Seconds for which the engine has given no sign of life: has reported no status, or has
        not replied although a call waits.

        A working engine reports every half second, and replies to each call within milliseconds,
        however many wait.
        """
        with self._lock:
            heard_s = self._reported_s
            if self._pending:
                heard_s = min(heard_s, max(self._pending[0].at_s, self._replied_s))
        return time.monotonic() - heard_s

    @property
    def status(self) -> EngineStatus:
        """Status that the engine reported last, at most a tenth of a second old.

        Values that change without an event, such as waiting times and recent uses, may be half a
        second old. Raises EngineClosed once the engine process has ended.
        """
        if self._error is not None:
            raise self._error
        return self._status

    def submit(self, request: Request) -> Future[Residency | None]:
        """Submit a request; return the tier that holds its adapter, None for the base model.

        The request's tokens are passed to on_outputs. The future fails with InvalidRequest if the
        request can never run, and with EngineOverloaded if the estimated wait is more than twice
        max_queue_s or too many of the tenant's grammars are in use.
        """
        return self._call("submit", request)

    def abort(self, request_id: str, choice: int | None = None) -> Future[None]:
        """End a request, or one choice of it, without an output; do nothing if it has ended.

        choice: index of the choice; None: all choices.
        """
        return self._call("abort", request_id, choice)

    def residency(self, ref: AdapterRef) -> Future[Residency]:
        """Return the tier nearest to the GPU that holds an adapter now.

        After a change of tier, `status` may lag behind this result by a tenth of a second.
        """
        return self._call("residency", ref)

    def pin(
        self,
        ref: AdapterRef,
        tier: Residency = Residency.GPU,
        passing: bool = False,
        draft: bool = False,
    ) -> Future[None]:
        """Load an adapter up to a tier and keep it there until `unpin`.

        passing: whether the pin is temporary, so that the adapter's image (its matrices packed for
            the GPU) is not written to the disk.
        draft: whether the adapter drafts tokens of all answers, in place of an earlier one.
        """
        return self._call("pin", ref, tier, passing, draft)

    def unpin(self, digest: str) -> Future[None]:
        """Remove an adapter's pin, so that the adapter may be evicted."""
        return self._call("unpin", digest)

    def keep_prompts(self, names: Collection[str]) -> Future[Collection[str] | None]:
        """Keep in host memory the pages of the prompts with these names (Request.keeps) alone.

        Returns the names of the prompts that need not be computed again; None without host memory
        for pages.
        """
        return self._call("keep_prompts", names)

    def expect(self, digest: str, file: Path, size_bytes: int) -> Future[None]:
        """Begin to pack an adapter's blob (safetensors file) for the GPU while it is being written.

        Does nothing if MAX_CONCURRENT blobs (residency/disk/incoming_blobs.py) are being packed
        already.

        digest: SHA-256 of the blob.
        file: local file to which another process writes the blob.
        size_bytes: size of the complete blob.
        """
        return self._call("expect", digest, file, size_bytes)

    def prefetch(
        self, ref: AdapterRef, tier: Residency = Residency.GPU, uses: float = 0.0
    ) -> Future[None]:
        """Load an adapter up to a tier before a request asks for it, if there is memory for it.

        uses: recent uses of the adapter on other replicas that this replica could serve instead.
            Adapters with fewer uses may be evicted for this adapter.
        """
        return self._call("prefetch", ref, tier, uses)

    def forget(self, digest: str) -> Future[None]:
        """Drop a transient adapter (AdapterRef) from GPU and host once no request uses it."""
        return self._call("forget", digest)

    def adapters(self, tier: Residency = Residency.DISK) -> Future[AdapterRows]:
        """List the adapters on the GPU, and the remembered adapters at `tier` or nearer to the GPU.

        Remembered adapters are those last requested, pinned or prefetched. Each row of the result
        holds the fields of an AdapterStatus.
        """
        return self._call("adapters", tier)

    def take_use(self) -> Future[list[SlotUse]]:
        """Return the use of each adapter's place on the GPU by each tenant since the last call:
        seconds, loads and loaded bytes.

        To be called from one place only.
        """
        return self._call("take_use")

    def close(self) -> None:
        """End the engine's process.

        The current step is finished; open requests fail with EngineClosed.
        """
        with self._lock:
            self._closing = True
        self._sender.close()
        self._thread.join()

    def _call(self, *call: Any) -> Future[Any]:
        reply: Future[Any] = Future()
        reply.set_running_or_notify_cancel()  # makes cancelling impossible: the call is made anyway
        with self._lock:
            if self._error is not None:
                reply.set_exception(self._error)
            else:
                self._sender.send(call)
                self._pending.append(_PendingCall(reply, time.monotonic()))
        return reply

    def _run(self, calls: Connection, messages: Connection, from_engine: Connection) -> None:
        status: int | None = None
        try:
            # On this thread, since it outlives the process: Linux kills a child with the thread
            # that started it (PR_SET_PDEATHSIG).
            process = _start(calls, messages)
            try:
                while True:
                    for message in receive(from_engine):
                        self._receive(message)
            except EOFError:
                status = process.wait()
        finally:
            from_engine.close()
            self._sender.close()
            self._end(status)

    def _receive(self, message: Any) -> None:
        match message:
            case Reply():
                self._complete(message)
            case EngineStatus():
                self._status, self._reported_s = message, time.monotonic()
                _notify(self._on_status, message)
            case rows:
                _notify(self._on_outputs, from_rows(rows))

    def _complete(self, reply: Reply) -> None:
        with self._lock:
            future = self._pending.popleft().reply
            self._replied_s = time.monotonic()
        if reply.error is not None:
            future.set_exception(reply.error)
        else:
            future.set_result(reply.result)

    def _end(self, status: int | None) -> None:
        with self._lock:
            closing = self._closing
            ending = "was closed" if closing else f"ended with status {status}"
            error = self._error = EngineClosed(f"the engine {ending}: send the request again")
            pending, self._pending = self._pending, deque()
        for call in pending:
            call.reply.set_exception(error)
        if not closing:
            log.critical("engine_process_ended", extra={"status": status})
            if self._started.exception() is None:
                _notify(self._on_ended, error)


def _notify(callback: Callable[[Any], None], argument: object) -> None:
    try:
        callback(argument)
    except Exception:
        log.exception("engine_callback_failed")


def _start(calls: Connection, messages: Connection) -> "subprocess.Popen[bytes]":
    """Start the engine's process, pass its ends of the pipes to it, and close these ends in this
    process.

    multiprocessing is not used: it would import this program's main module in the process.

    calls: end from which the process reads calls.
    messages: end to which the process writes replies, outputs and statuses.
    """
    with calls, messages:
        return subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "lorikeet_engine.process.server",
                str(calls.fileno()),
                str(messages.fileno()),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            pass_fds=(calls.fileno(), messages.fileno()),
            process_group=0,  # Ctrl-C at a terminal reaches the client, which then ends its engine
            stdin=subprocess.DEVNULL,
        )
