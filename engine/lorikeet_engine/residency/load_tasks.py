"""What the loader knows of a load, and what it says of one that has ended."""

from dataclasses import dataclass

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.errors import AdapterError


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A load that ended.

    residency: HOST if the image is there, and held for the receiver of this result. DISK without
    an error if that was asked for, or the host had no room: try again once its `frees` has changed.
    elements, read_s: of the image that was loaded to the host, what one GPU takes of it, None
    without one, and how long that took from the disk, or, of one that was packed while it came, the
    processor time of that. download_s: the blob's, None if it was there.
    """

    ref: AdapterRef
    residency: Residency
    error: AdapterError | None
    frees: int
    elements: int | None
    read_s: float
    download_s: float | None


@dataclass(frozen=True, slots=True)
class SourceFailure:
    """A download that hung until the source was given up, and when that was."""

    error: Exception
    at_s: float


@dataclass(slots=True)
class LoadTask:
    """A load that has not ended. asked_s, reading_since_s: by the clocks of `Loader`.

    past_disk: it goes on without the disk. downloads: how many were begun for it.
    """

    ref: AdapterRef
    tier: Residency
    urgent: bool
    passing: bool
    asked_s: float
    started: bool = False
    past_disk: bool = False
    downloads: int = 0
    download_s: float | None = None
    reading_since_s: float = 0.0


def error_about(ref: AdapterRef, error: AdapterError, kind: type[AdapterError]) -> AdapterError:
    """An error of this kind, which names the adapter."""
    return kind(f"{ref}: {error.message}", **{**error.fields, "adapter": str(ref)})
