"""What the system lets processes have: shared memory, open files."""

from collections.abc import Iterator

from lorikeet.doctor.finding import Finding, ok, warning
from lorikeet.doctor.planned_start import PlannedStart
from lorikeet.sizes import show_size

_RAY_SHARE = 0.3  # of the memory, for its object store
_RAY_MOST = 10**10
_FILES = 1024  # of a proxy or a gateway, without requests
_FILES_OF_REQUEST = 2


def check_system_limits(planned: PlannedStart) -> Iterator[Finding]:
    """/dev/shm for Ray, and files for as many requests as may be open."""
    host, settings = planned.host, planned.settings
    shm = min(_RAY_MOST, int(_RAY_SHARE * host.memory))
    if host.shm is not None and host.shm < shm:
        yield warning(
            "shared memory",
            f"/dev/shm has {show_size(host.shm)} and Ray wants {show_size(shm)}: "
            "it will use /tmp, on disk",
            f"docker run --shm-size={-(-shm >> 30) + 1}g, or a larger tmpfs",
        )
    else:
        yield ok("shared memory", "/dev/shm is large enough")
    requests = settings.max_ongoing_requests * planned.engines
    files = _FILES + _FILES_OF_REQUEST * requests
    if host.open_files < files:
        yield warning(
            "open files",
            f"{host.open_files} a process; {requests} requests at once take about {files}",
            f"ulimit -Hn {files}, LimitNOFILE= of the unit, or docker run --ulimit nofile={files}",
        )
    else:
        yield ok("open files", f"{host.open_files} a process")
