"""Pushed adapters on a replica: receiving their blobs and keeping them in host memory.

A replica on the gateway's machine links or copies the gateway's file; other replicas receive the
blob in parts. The blob enters the disk cache's folder complete and verified, like a download. The
engine then packs it into its host arena, where a pin keeps it until the gateway that took the push
reports that the blob is in the store, or is silent for HELD_S seconds.
"""

import asyncio
import logging
import os
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lorikeet.protocol.placement_decision import PinTarget
from lorikeet.protocol.pushing import (
    ExpectPushed,
    HoldPushed,
    HoldState,
    LookUp,
    PushedEnd,
    PushedPart,
    PushMessage,
    ReleasePushed,
    this_machine,
)
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.adapter_format import blob_digest
from lorikeet_engine.errors import EngineClosed
from lorikeet_engine.process.client import EngineProcessClient

log = logging.getLogger(__name__)

HELD_S = 60.0
"""Seconds for which a gateway's HoldPushed keeps an adapter in host memory, unless it is renewed.

The gateway that received the push renews it every few seconds.
"""
_LOAD_WAIT_S = 1.5
"""Maximum number of seconds that the answer to a HoldPushed waits until the adapter is in host
memory.

Gateways wait 2 s for the answer.
"""
_POLL_S = 0.01
_ABANDONED_S = 600.0
_REMEMBERED_TRANSFERS = 256
"""Number of ended transfers that are remembered, so that their late parts are not written."""


class _Held(NamedTuple):
    """Adapter that a gateway's request keeps in host memory.

    until_s: end of this hold, by the event loop's clock.
    """

    ref: AdapterRef
    until_s: float


class PushedAdapters:
    """Receiver of pushed adapters (uploaded to a gateway that passes them on) on one replica.

    Keeps them in host memory while their gateways ask for it. For one event loop.

    Constructor arguments:
    folder: folder of the disk cache.
    residency: returns the tier of an adapter, by digest, as the engine last reported it.
    pinned: returns the controller's pin of an adapter, by digest; None if it has no pin.
    """

    def __init__(
        self,
        folder: Path,
        engine: EngineProcessClient,
        residency: Callable[[str], Residency],
        pinned: Callable[[str], PinTarget | None],
    ) -> None:
        self._folder, self._engine = folder, engine
        self._residency, self._pinned = residency, pinned
        self._held: dict[str, _Held] = {}  # by digest
        self._started_s: dict[Path, float] = {}  # unfinished transfers, by file
        self._ended = deque[Path](maxlen=_REMEMBERED_TRANSFERS)
        self._transfers = threading.Lock()  # guards these two and the creation and removal of files

    async def answer(self, message: PushMessage) -> HoldState:
        """Do what a gateway's message asks for a pushed adapter, such as to write a part of the
        adapter's blob or to keep the adapter in host memory; return its state on this replica.
        """
        match message:
            case PushedPart():
                await asyncio.to_thread(self._write, message)
                return HoldState.LACKING
            case PushedEnd():
                kept = await asyncio.to_thread(self._finish_transfer, message)
                return HoldState.LOADING if kept else HoldState.LACKING
            case ExpectPushed():
                return await self._expect(message)
            case HoldPushed(ref=ref, file=file):
                return await self._hold(ref, file)
            case ReleasePushed(digest=digest):
                self._release(digest)
                return await self._state(digest)
            case LookUp(digest=digest):
                return await self._state(digest)

    def unpinned(self, digest: str) -> None:
        """Forget that a gateway keeps an adapter in host memory, since the controller has removed
        its pin.
        """
        self._held.pop(digest, None)

    async def _expect(self, message: ExpectPushed) -> HoldState:
        state = await self._state(message.digest)
        if state is HoldState.LACKING and message.machine == this_machine():
            self._engine.expect(message.digest, Path(message.file), message.size_bytes)
        return state

    async def _hold(self, ref: AdapterRef, file: str) -> HoldState:
        digest = ref.digest
        is_lacking = await self._state(digest) is HoldState.LACKING
        if is_lacking and not await asyncio.to_thread(self._copy_file, digest, file):
            return HoldState.LACKING
        loop = asyncio.get_running_loop()
        if digest not in self._held and not self._kept_by_controller(digest):
            self._engine.pin(ref, Residency.HOST, passing=True)
        self._held[digest] = _Held(ref, loop.time() + HELD_S)
        loop.call_later(HELD_S, self._expire, digest)
        due_s = loop.time() + _LOAD_WAIT_S
        while await self._residency_of(digest) < Residency.HOST and loop.time() < due_s:
            await asyncio.sleep(_POLL_S)
        return await self._state(digest)

    def _expire(self, digest: str) -> None:
        held = self._held.get(digest)
        if held is not None and held.until_s <= asyncio.get_running_loop().time():
            self._release(digest)

    def _release(self, digest: str) -> None:
        if self._held.pop(digest, None) is None:
            return
        if (target := self._pinned(digest)) is not None:
            self._engine.pin(target.ref, target.tier)
        else:
            self._engine.unpin(digest)

    def _kept_by_controller(self, digest: str) -> bool:
        target = self._pinned(digest)
        return target is not None and target.tier >= Residency.HOST

    async def _state(self, digest: str) -> HoldState:
        residency = await self._residency_of(digest)
        if residency >= Residency.HOST:
            return HoldState.HELD
        if residency is Residency.DISK or await asyncio.to_thread(self._blob(digest).exists):
            return HoldState.LOADING
        return HoldState.LACKING

    async def _residency_of(self, digest: str) -> Residency:
        """Return an adapter's tier as last reported; ask the engine if a held adapter seems not to
        be in host memory.
        """
        found, held = self._residency(digest), self._held.get(digest)
        if found < Residency.HOST and held is not None:
            with suppress(EngineClosed):
                found = await asyncio.wrap_future(self._engine.residency(held.ref))
        return found

    def _copy_file(self, digest: str, file: str) -> bool:
        """Link or copy a gateway's verified blob into the disk cache; return whether that
        worked.

        file: path of the blob on the gateway's machine.
        """
        path = self._path(digest, uuid.uuid4().hex)
        try:
            try:
                os.link(file, path)
            except FileNotFoundError:
                return False
            except OSError:  # on another file system
                shutil.copyfile(file, path)
                if blob_digest(path) != digest:
                    raise OSError(f"the copy of {file} has other bytes") from None
            self._place(path, self._blob(digest))
            return True
        except OSError as error:  # the file is gone, or the disk is full; parts would fail as well
            log.warning("pushed_file_not_taken", extra={"error": str(error)})
            return False
        finally:
            path.unlink(missing_ok=True)

    def _place(self, path: Path, blob: Path) -> None:
        with self._transfers:
            if not blob.exists():  # never replace a blob: the engine may have pinned it by now
                path.replace(blob)

    def _write(self, part: PushedPart) -> None:
        """Write one part of a blob unless the blob is complete or the transfer has ended."""
        path = self._path(part.digest, part.transfer)
        if self._blob(part.digest).exists():
            return
        with self._transfers:
            if path in self._ended:
                return
            if path not in self._started_s:
                self._remove_abandoned()
                self._started_s[path] = time.monotonic()
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, part.data, part.offset)
        finally:
            os.close(descriptor)

    def _finish_transfer(self, end: PushedEnd) -> bool:
        """Verify a transferred blob and move it into the disk cache.

        Returns False if the blob is damaged or missing.
        """
        path, blob = self._path(end.digest, end.transfer), self._blob(end.digest)
        try:
            if blob.exists():
                return True
            if blob_digest(path) != end.digest:
                return False
            self._place(path, blob)
            return True
        except FileNotFoundError:
            return False
        finally:
            with self._transfers:
                self._ended.append(path)
                self._started_s.pop(path, None)
                path.unlink(missing_ok=True)

    def _path(self, digest: str, transfer: str) -> Path:
        return self._folder / f"{digest}.{transfer}.part"

    def _blob(self, digest: str) -> Path:
        return self._folder / digest

    def _remove_abandoned(self) -> None:
        """Delete the parts of transfers that began long ago and have not ended: their gateways have
        died. The caller holds the lock `_transfers`.
        """
        before_s = time.monotonic() - _ABANDONED_S
        for path in [path for path, started_s in self._started_s.items() if started_s < before_s]:
            path.unlink(missing_ok=True)
            del self._started_s[path]
