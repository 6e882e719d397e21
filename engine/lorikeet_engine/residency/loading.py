"""Brings adapters from remote to disk and to the host, on background threads.

Downloads and packing have threads of their own, so a source that hangs does not keep what is on
disk already from being packed.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.adapter_format import AdapterLimits, AdapterSpec, BaseShape, read_spec
from lorikeet_engine.errors import AdapterError, AdapterLoadFailed, AdapterTooLarge
from lorikeet_engine.residency.disk import DiskCache
from lorikeet_engine.residency.host import HostArena
from lorikeet_engine.residency.packing import PackedLayout, pack
from lorikeet_engine.residency.workers import Workers

log = logging.getLogger(__name__)

_DOWNLOADERS = 8
_PACKERS = 2
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Landing:
    """A load that ended. HOST: the image is there, and held for whoever takes this.

    DISK without an error: that was asked for, or the host had no room, which is worth another try
    when its count of `frees` is no longer `frees`.
    """

    ref: AdapterRef
    residency: Residency
    error: AdapterError | None = None
    frees: int = 0


@dataclass(slots=True)
class _Task:
    ref: AdapterRef
    tier: Residency
    urgent: bool
    started: bool = False


class Loader:
    """One load at a time for each digest. `landed` is called on the loading threads."""

    def __init__(
        self,
        shape: BaseShape,
        limits: AdapterLimits,
        disk: DiskCache,
        host: HostArena,
        gpu_elements: int,
        landed: Callable[[], None],
    ) -> None:
        self._shape, self._limits = shape, limits
        self._disk, self._host = disk, host
        self._most_elements = min(gpu_elements, host.elements)
        self._landed = landed
        self._lock = threading.Lock()
        self._tasks: dict[str, _Task] = {}
        self._landings: deque[Landing] = deque()
        self._downloaders = Workers(_DOWNLOADERS, "download")
        self._packers = Workers(_PACKERS, "pack")

    def load(self, ref: AdapterRef, tier: Residency, *, urgent: bool) -> None:
        """Bring it up to DISK or HOST. Does nothing when that is under way already."""
        with self._lock:
            task = self._tasks.get(ref.digest)
            if task is None:
                task = self._tasks[ref.digest] = _Task(ref, tier, urgent)
            elif task.started or (task.urgent >= urgent and task.tier >= tier):
                return
            task.tier, task.urgent = max(task.tier, tier), task.urgent or urgent
        if self._disk.holds(ref.digest):
            self._packers.submit(partial(self._begin, task, self._pack), urgent=urgent)
        else:
            self._downloaders.submit(partial(self._begin, task, self._download), urgent=urgent)

    def landings(self) -> list[Landing]:
        """What ended since the last call."""
        return [self._landings.popleft() for _ in range(len(self._landings))]

    def close(self) -> None:
        """Start no more loads."""
        self._downloaders.close()
        self._packers.close()

    def _begin(self, task: _Task, work: Callable[[_Task], None]) -> None:
        with self._lock:
            if task.started:
                return
            task.started = True
        self._attempt(task, work)

    def _attempt(self, task: _Task, work: Callable[[_Task], None]) -> None:
        try:
            work(task)
        except AdapterTooLarge as error:
            self._land(task, error=_about(task.ref, error, AdapterTooLarge))
        except AdapterError as error:
            self._land(task, error=_about(task.ref, error, AdapterLoadFailed))
        except Exception as error:  # its text is for the log: it may name the machine's folders
            log.exception("adapter_load_failed", extra={"adapter": str(task.ref)})
            failure = AdapterLoadFailed(
                f"its weights could not be brought to the engine ({type(error).__name__}): try "
                "again, or ask your admin to look into the log"
            )
            self._land(task, error=_about(task.ref, failure, AdapterLoadFailed))

    def _download(self, task: _Task) -> None:
        self._disk.get(task.ref)
        if task.tier is Residency.DISK:
            self._land(task, Residency.DISK)
        else:
            work = partial(self._attempt, task, self._pack)
            self._packers.submit(work, urgent=task.urgent)

    def _pack(self, task: _Task) -> None:
        if task.tier is Residency.DISK:
            self._disk.get(task.ref)
            return self._land(task, Residency.DISK)
        for attempt in range(_ATTEMPTS):
            try:
                blob = self._disk.get(task.ref)
                return self._pack_blob(task, blob, read_spec(blob, self._shape, self._limits))
            except FileNotFoundError:  # removed by another process's cache in between
                if attempt == _ATTEMPTS - 1:
                    raise
        return None

    def _pack_blob(self, task: _Task, blob: Path, spec: AdapterSpec) -> None:
        digest, layout = task.ref.digest, PackedLayout.of(spec, self._shape)
        if layout.elements > self._most_elements:
            raise AdapterTooLarge(
                f"the adapter has {layout.elements} elements and the arenas hold "
                f"{self._most_elements}: enlarge the adapter memory",
                elements=layout.elements,
                max_elements=self._most_elements,
            )
        frees = self._host.frees
        out = self._host.reserve(digest, layout, insist=task.urgent)
        if out is None:
            return self._land(task, Residency.DISK, frees=frees)
        try:
            pack(blob, spec, layout, out)
        except BaseException:
            self._host.abandon(digest)
            raise
        self._host.commit(digest)
        return self._land(task, Residency.HOST)

    def _land(
        self,
        task: _Task,
        residency: Residency = Residency.REMOTE,
        error: AdapterError | None = None,
        frees: int = 0,
    ) -> None:
        with self._lock:
            del self._tasks[task.ref.digest]
            self._landings.append(Landing(task.ref, residency, error, frees))
        self._landed()


def _about(ref: AdapterRef, error: AdapterError, kind: type[AdapterError]) -> AdapterError:
    return kind(f"{ref}: {error.message}", **{**error.fields, "adapter": str(ref)})
