"""Brings a pushed adapter into the host memory of every replica of a deployment."""

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

_PART_BYTES = 2**19  # Serve's gRPC takes 4 MiB, and may be set to less
_IN_FLIGHT = 8
"""Parts on their way at once: 4 MiB in the gateway's memory."""
_ANSWER_S = 2.0
_AFTER_SILENCE_S = 0.25
"""What a part gives replicas once one was silent: a blob of 1 GiB then takes 64 s and not 512."""
_END_S = 30.0
"""How long replicas may take to verify a blob: one of 8 GiB takes 5 s."""


class PushDelivery:
    """One deployment's replicas, asked all at once."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def deliver(self, ref: AdapterRef, blob: Path) -> bool:
        """Have all replicas hold an adapter; send its blob if any says it lacks it.

        Those that see the file take it from there. Whether all do: one that is silent does not.
        """
        hold = HoldPushed(ref, str(blob))
        states = await self._ask(hold)
        if HoldState.LACKING in states:
            await self._send(ref.digest, blob)
            states = await self._ask(hold)
        return _all_hold(states)

    async def expect(self, digest: str, blob: Path, size_bytes: int) -> None:
        """Let replicas of this machine pack a blob while it is written to a file."""
        if (machine := this_machine()) is not None:
            await self._ask(ExpectPushed(digest, str(blob), size_bytes, machine))

    async def holds(self, digest: str) -> bool:
        """Whether all replicas hold an adapter."""
        return _all_hold(await self._ask(LookUp(digest)))

    async def release(self, digest: str) -> None:
        """Let all replicas evict an adapter again."""
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
        """Return what each replica says; nothing where there is no replica."""
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
