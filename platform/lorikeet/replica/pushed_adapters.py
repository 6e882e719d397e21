"""Pushed adapters on a replica: their blobs come in parts, and stay on the host as they are asked.

A blob goes into the disk cache's folder, as one that was downloaded would: whole, verified, by one
rename. From there the engine packs it into its host arena, where a pin keeps it until the gateway
that took the push says that it is in the store, or is not heard of for HELD_S.
"""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

from lorikeet.protocol.placement_decision import PinTarget
from lorikeet.protocol.pushing import (
    HoldPushed,
    HoldState,
    LookUp,
    PushedEnd,
    PushedPart,
    PushMessage,
    ReleasePushed,
)
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.adapter_format import blob_digest
from lorikeet_engine.process.client import EngineProcessClient

HELD_S = 60.0
"""A gateway that carries a push asks every few seconds."""
_LOADED_S = 1.5
"""How long an answer waits for a load; gateways wait for 2 s."""
_LOOK_S = 0.01
_ABANDONED_S = 600.0


class PushedAdapters:
    """Answers a gateway's messages about pushes. For one event loop.

    residency: where the engine has an adapter, by digest. pinned: the controller's pin of one.
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
        self._until_s: dict[str, float] = {}  # of those that are held, by digest
        self._begun_s: dict[Path, float] = {}  # transfers that have not ended

    async def answer(self, message: PushMessage) -> HoldState:
        """Do what a gateway asks, and say how far the adapter is."""
        match message:
            case PushedPart():
                await asyncio.to_thread(self._write, message)
                return HoldState.LACKING
            case PushedEnd():
                kept = await asyncio.to_thread(self._keep, message)
                return HoldState.LOADING if kept else HoldState.LACKING
            case HoldPushed(ref=ref):
                return await self._hold(ref)
            case ReleasePushed(digest=digest):
                self._release(digest)
                return self._state(digest)
            case LookUp(digest=digest):
                return self._state(digest)

    def unpinned(self, digest: str) -> None:
        """Take in that the controller has taken a pin away: the next hold pins it again."""
        self._until_s.pop(digest, None)

    async def _hold(self, ref: AdapterRef) -> HoldState:
        digest = ref.digest
        if self._state(digest) is HoldState.LACKING:
            return HoldState.LACKING
        loop = asyncio.get_running_loop()
        if digest not in self._until_s and not self._kept_by_controller(digest):
            self._engine.pin(ref, Residency.HOST)
        self._until_s[digest] = loop.time() + HELD_S
        loop.call_later(HELD_S, self._expire, digest)
        due_s = loop.time() + _LOADED_S
        while self._state(digest) is not HoldState.HELD and loop.time() < due_s:
            await asyncio.sleep(_LOOK_S)
        return self._state(digest)

    def _expire(self, digest: str) -> None:
        if self._until_s.get(digest, 0.0) <= asyncio.get_running_loop().time():
            self._release(digest)

    def _release(self, digest: str) -> None:
        if self._until_s.pop(digest, None) is None:
            return
        if (target := self._pinned(digest)) is not None:
            self._engine.pin(target.ref, target.tier)
        else:
            self._engine.unpin(digest)

    def _kept_by_controller(self, digest: str) -> bool:
        target = self._pinned(digest)
        return target is not None and target.tier >= Residency.HOST

    def _state(self, digest: str) -> HoldState:
        if self._residency(digest) >= Residency.HOST:
            return HoldState.HELD
        on_disk = self._residency(digest) is Residency.DISK or (self._folder / digest).exists()
        return HoldState.LOADING if on_disk else HoldState.LACKING

    def _write(self, part: PushedPart) -> None:
        path = self._path(part.digest, part.transfer)
        if path not in self._begun_s:
            self._remove_abandoned()
            self._begun_s[path] = time.monotonic()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, part.data, part.offset)
        finally:
            os.close(descriptor)

    def _keep(self, end: PushedEnd) -> bool:
        """Put a blob under its digest; False if what came is another."""
        path = self._path(end.digest, end.transfer)
        try:
            if blob_digest(path) != end.digest:
                return False
            path.replace(self._folder / end.digest)
            return True
        except FileNotFoundError:
            return False
        finally:
            path.unlink(missing_ok=True)
            self._begun_s.pop(path, None)

    def _path(self, digest: str, transfer: str) -> Path:
        return self._folder / f"{digest}.{transfer}.part"

    def _remove_abandoned(self) -> None:
        """Remove what gateways that are no more have begun."""
        before_s = time.monotonic() - _ABANDONED_S
        for path in [path for path, begun_s in self._begun_s.items() if begun_s < before_s]:
            path.unlink(missing_ok=True)
            del self._begun_s[path]
