"""Delivery of a pushed adapter to the host memory of every replica of a deployment.

replica/pushed_adapters.py is the receiver; protocol/pushing.py defines the messages.
"""

import asyncio
import logging
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

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
from lorikeet.serving.replica_calls import REPLICA_LOST, broadcast_with_failures
from lorikeet_engine.adapter import AdapterRef

log = logging.getLogger(__name__)

_PART_BYTES = 2**19
"""Size of a blob's part: Serve's gRPC takes messages of 4 MiB, or less if so configured."""
_IN_FLIGHT = 8
"""Number of a blob's parts that are sent at once; they take 4 MiB of the gateway's memory."""
_ANSWER_S = 2.0
"""Seconds that replicas have to answer a message."""
_AFTER_SILENCE_S = 0.25
"""Timeout in seconds for a part of a blob once a replica has left an earlier part unanswered.

A blob of 1 GiB then takes 64 s, not 512 s.
"""
_END_S = 30.0
"""Seconds that replicas have to verify a blob: 8 GiB take 5 s."""


class PushDelivery:
    """Sender of pushed adapters (uploaded to this gateway) to all replicas of one deployment."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def deliver(self, ref: AdapterRef, blob: Path) -> bool:
        """Have all replicas keep an adapter in host memory; return True if all confirm that they
        have it there or on the GPU.

        Replicas on this machine read the file `blob`. If any replica still lacks the adapter, the
        blob is sent to all replicas. A replica that does not answer counts as lacking the
        adapter.

        blob: the gateway's file of the verified adapter.
        """
        hold = HoldPushed(ref, str(blob))
        states = await self._ask(hold)
        if HoldState.LACKING in states:
            await self._send(ref.digest, blob)
            states = await self._ask(hold)
        return _all_hold(states)

    async def expect(self, digest: str, blob: Path, size_bytes: int) -> None:
        """Let the replicas on this machine pack (bring into the engine's layout) a pushed adapter
        while its file is still being written.

        digest: the adapter's SHA-256 as its client claims.
        blob: file that the gateway writes.
        size_bytes: size of the complete file.
        """
        if (machine := this_machine()) is not None:
            await self._ask(ExpectPushed(digest, str(blob), size_bytes, machine))

    async def holds(self, digest: str) -> bool:
        """Return whether all replicas have an adapter in host memory or on the GPU."""
        return _all_hold(await self._ask(LookUp(digest)))

    async def release(self, digest: str) -> None:
        """Allow all replicas to evict an adapter that `deliver` has put into their host memory."""
        await self._ask(ReleasePushed(digest))

    async def _send(self, digest: str, blob: Path) -> None:
        transfer, size = uuid.uuid4().hex, blob.stat().st_size
        slots, answer_s = asyncio.Semaphore(_IN_FLIGHT), _ANSWER_S

        async def send(offset: int) -> None:
            nonlocal answer_s
            try:
                data = await asyncio.to_thread(_read, blob, offset)
                part = PushedPart(digest, transfer, offset, data)
                if HoldState.SILENT in await self._ask(part, answer_s):
                    answer_s = _AFTER_SILENCE_S
            finally:
                slots.release()

        async with asyncio.TaskGroup() as parts:
            for offset in range(0, size, _PART_BYTES):
                await slots.acquire()
                parts.create_task(send(offset))
        await self._ask(PushedEnd(digest, transfer), _END_S)

    async def _ask(self, message: PushMessage, timeout_s: float = _ANSWER_S) -> Sequence[HoldState]:
        """Send a message to all replicas; return each one's answer, SILENT if none came in time.

        Empty if there is no replica.
        """
        try:
            answers, failures = await broadcast_with_failures(
                self._handle, "push", message, timeout_s=timeout_s
            )
        except (DeploymentUnavailableError, RayError, *REPLICA_LOST) as error:
            answers, failures = [], [error]
        for failure in failures:
            known = {"asked": type(message).__name__, "error": repr(failure)}
            log.warning("push_unanswered", extra=known)
        return [*answers, *(HoldState.SILENT for _ in failures)]


def _all_hold(states: Sequence[HoldState]) -> bool:
    return bool(states) and all(state is HoldState.HELD for state in states)


def _read(blob: Path, offset: int) -> bytes:
    with blob.open("rb") as file:
        file.seek(offset)
        return file.read(_PART_BYTES)
