"""What a gateway asks of replicas to have a pushed adapter in their host memory."""

from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

from lorikeet_engine.adapter import AdapterRef


class HoldState(Enum):
    """How far a replica is: LACKING the blob, LOADING it to the host, or HELD there or nearer.

    SILENT is one that did not answer: what it has is not known.
    """

    SILENT = "silent"
    LACKING = "lacking"
    LOADING = "loading"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class PushedPart:
    """Some bytes of a blob from `offset` on; transfer: names the file that they go into."""

    digest: str
    transfer: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class PushedEnd:
    """All parts of a transfer were sent: verify the blob and keep it."""

    digest: str
    transfer: str


@dataclass(frozen=True, slots=True)
class HoldPushed:
    """Keep an adapter in host memory until it is released, or not asked for any more.

    file: the gateway's own, of the verified blob: replicas of its machine take that and no parts.
    """

    ref: AdapterRef
    file: str


@dataclass(frozen=True, slots=True)
class ExpectPushed:
    """A blob of this size and, it is said, digest is being written to a gateway's file.

    Replicas of the machine can pack it meanwhile. They keep it if HoldPushed names the same file.
    """

    digest: str
    file: str
    size_bytes: int
    machine: str


@dataclass(frozen=True, slots=True)
class ReleasePushed:
    """Let an adapter be evicted again: it is in the store."""

    digest: str


@dataclass(frozen=True, slots=True)
class LookUp:
    """Say how far an adapter is, and change nothing."""

    digest: str


PushMessage = PushedPart | PushedEnd | ExpectPushed | HoldPushed | ReleasePushed | LookUp


@cache
def this_machine() -> str | None:
    """Return what all processes have that see a file alike while it grows: their kernel's boot.

    None where that is not known.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
