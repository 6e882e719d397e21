"""Writes images that were packed to the disk, behind the loads."""

import logging
from collections.abc import Callable
from functools import partial

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.residency.disk.cache import DiskCache
from lorikeet_engine.residency.disk.image_file import write_image
from lorikeet_engine.residency.host_arena import HostArena
from lorikeet_engine.residency.workers import Workers

log = logging.getLogger(__name__)


class ImageWriter:
    """Writes one image after another. on_release: called once the host may evict one again."""

    def __init__(self, disk: DiskCache, host: HostArena, on_release: Callable[[], None]) -> None:
        self._disk, self._host, self._on_release = disk, host, on_release
        self._worker = Workers(1, "write")

    def write(self, ref: AdapterRef, *, urgent: bool) -> None:
        """Write an image in its turn, unless it is there or has left the host by then."""
        self._worker.submit(partial(self._write, ref), urgent=urgent, tenant=ref.tenant)

    def close(self) -> None:
        """Begin no more."""
        self._worker.close()

    def _write(self, ref: AdapterRef) -> None:
        held = None if self._disk.has_image(ref.digest) else self._host.hold(ref.digest)
        if held is None:
            return
        try:
            with self._disk.adding_image(ref.digest) as part:
                try:
                    write_image(part, self._disk.image_name(ref.digest), held)
                finally:  # not held while the disk takes it in, which can be seconds
                    self._host.release(ref.digest)
                    self._on_release()  # a load may have waited for the room
        except OSError as error:
            log.warning("image_not_written", extra={"adapter": str(ref), "error": str(error)})
