"""Messages from a gateway that bring a pushed adapter into replicas' host memory."""

from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

from lorikeet_engine.adapter import AdapterRef


class HoldState(Enum):
    """State of a pushed adapter on a replica.

    SILENT: unknown, as the replica did not answer.
    LACKING: the replica lacks the blob.
    LOADING: the replica has the blob and loads it to the host.
    HELD: the adapter is in host memory or on the GPU.
    """

    SILENT = "silent"
    LACKING = "lacking"
    LOADING = "loading"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class PushedPart:
    """Part of a pushed adapter's blob.

    transfer: id of the transfer; a replica writes all parts of one transfer to one file.
    offset: position of the part's first byte in the blob.
    """

    digest: str
    transfer: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class PushedEnd:
    """End of a blob's transfer: the replica then verifies the blob and keeps it."""

    digest: str
    transfer: str


@dataclass(frozen=True, slots=True)
class HoldPushed:
    """Request to keep an adapter in host memory until a ReleasePushed, or until a minute has passed
    without another HoldPushed.

    file: the gateway's file of the verified blob. Replicas on the gateway's machine take the blob
        from it; other replicas need it as PushedParts first.
    """

    ref: AdapterRef
    file: str


@dataclass(frozen=True, slots=True)
class ExpectPushed:
    """Announcement of a blob that a gateway is writing to a file.

    Replicas on the same machine can pack the blob while it grows, and keep the result if a
    HoldPushed names the same file.

    digest: SHA-256 as the client claims, not verified yet.
    machine: `this_machine()` of the gateway.
    """

    digest: str
    file: str
    size_bytes: int
    machine: str


@dataclass(frozen=True, slots=True)
class ReleasePushed:
    """Release of a gateway's hold on a pushed adapter, which the replica may evict from now on."""

    digest: str


@dataclass(frozen=True, slots=True)
class LookUp:
    """Question about a pushed adapter's state on a replica; changes nothing."""

    digest: str


PushMessage = PushedPart | PushedEnd | ExpectPushed | HoldPushed | ReleasePushed | LookUp


@cache
def this_machine() -> str | None:
    """Return the kernel's boot id, which identifies this machine; None if it is unknown.

    Processes with the same id see the same growing file.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
