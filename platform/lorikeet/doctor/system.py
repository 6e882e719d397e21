"""Checks of the operating system: folders, ports, shared memory, open files."""

import asyncio
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from lorikeet.addresses import port_is_free
from lorikeet.doctor.finding import Finding, ok, problem, warning
from lorikeet.doctor.planned_start import PlannedStart
from lorikeet.gateway.audit import STDOUT, is_collector
from lorikeet.sizes import show_size


def check_disk(planned: PlannedStart) -> Iterator[Finding]:
    """Check that the disk cache's folder is writable and that its disk has enough space.

    Free bytes and those that the folder takes already must reach LORIKEET_ADAPTER_DISK and each
    engine's LORIKEET_KV_DISK.
    """
    faults = list(check_cache_folder(planned))
    if faults:
        yield from faults
        return
    folder, pages = planned.settings.cache_dir, planned.engines * (planned.settings.kv_disk or 0)
    wanted = planned.settings.adapter_disk + pages
    there = _existing(folder)
    free, used = shutil.disk_usage(there).free, _used(folder)
    found = f"{folder}: {show_size(wanted)} wanted, "
    found += f"{show_size(pages)} of them for KV pages, " if pages else ""
    found += f"{show_size(used)} used and {show_size(free)} free"
    if free + used < wanted:
        most = (free + used - pages) * 9 // 10 >> 20
        fix = f"LORIKEET_ADAPTER_DISK={most}MiB, or " if most > 0 else ""
        fix += "a smaller LORIKEET_KV_DISK, or " if pages else ""
        fix += "LORIKEET_CACHE_DIR on a larger disk"
        yield problem("disk cache", found, fix)
    else:
        yield ok("disk cache", found)


def check_cache_folder(planned: PlannedStart) -> Iterator[Finding]:
    """Report a disk cache's folder that cannot be written."""
    folder = planned.settings.cache_dir
    there = _existing(folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield problem(
            "disk cache",
            f"{folder} cannot be written: {there} {_owner(there)}",
            f"`chown {os.getuid()} {there}`, or set LORIKEET_CACHE_DIR to another folder",
        )


def check_load_from(planned: PlannedStart) -> Iterator[Finding]:
    """Check that the folder that tenants load adapters from, if there is one, can be read."""
    folder = planned.settings.load_from
    if folder is None:
        return
    if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK):
        yield ok("shared folder", f"{folder} can be read")
    else:
        yield warning(
            "shared folder",
            f"LORIKEET_LOAD_FROM={folder} is no folder that can be read: every load is refused",
            "mount the file system of the trainers there, and let this user read it",
        )


def check_audit_log(planned: PlannedStart) -> Iterator[Finding]:
    """Check that the file of the audit stream, if there is one, can be written."""
    name = planned.settings.audit_log
    if name is None or name == STDOUT or is_collector(name):
        return
    file = Path(name).absolute()
    is_fit = not file.is_dir() if file.exists() else file.parent.is_dir()
    if is_fit and os.access(file if file.exists() else file.parent, os.W_OK):
        yield ok("audit stream", f"{file} can be written")
    else:
        yield problem(
            "audit stream",
            f"LORIKEET_AUDIT_LOG={name} cannot be written: no gateway starts",
            f"make the folder {file.parent} for this user, or set LORIKEET_AUDIT_LOG=stdout",
        )


def check_identity_provider(planned: PlannedStart) -> Iterator[Finding]:
    """Check that this machine can read the keys of the issuer of tokens, if one is set."""
    issuer = planned.settings.oidc
    if issuer is None:
        return
    from lorikeet.gateway.oidc_tokens import read_signing_keys

    try:
        count = len(asyncio.run(read_signing_keys(issuer.jwks)))
    except Exception as error:  # any other content than keys may raise any
        yield warning(
            "identity provider",
            f"{issuer.jwks} cannot be read: {error!r}; until then tokens are refused",
            "correct jwks in LORIKEET_OIDC, or let gateways reach it",
        )
    else:
        yield ok("identity provider", f"keys of {issuer.issuer}: {count}")


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())


def _owner(path: Path) -> str:
    return f"belongs to user {path.stat().st_uid}" if path.is_dir() else "is no folder"


def _used(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


_RAY = {6379: "ray start", 8265: "Ray's dashboard"}


def check_ports(planned: PlannedStart) -> Iterator[Finding]:
    """Check that listeners' and Ray's ports are free, and the admin's address is this machine's."""
    admin = planned.settings.admin_address
    if admin.port == planned.http_port:
        found = f"{admin.port} is set for both the public and the admin listener"
        yield problem("ports", found, "set LORIKEET_ADMIN_ADDRESS or PORT to another port")
    if why := _refusal(admin.host):
        found = f"LORIKEET_ADMIN_ADDRESS={admin}: {why}"
        yield problem("ports", found, "give an address of this machine, such as 127.0.0.1:8001")
    wanted = {planned.http_port: "the public listener", admin.port: "the admin listener"}
    taken = {port: what for port, what in wanted.items() if not port_is_free(port)}
    for port, what in taken.items():
        fix = f"stop the process that listens there: `ss -ltnp 'sport = :{port}'`"
        if port == admin.port:
            fix += ", or set LORIKEET_ADMIN_ADDRESS to another port"
        elif planned.makes_missing:
            fix += ", or choose another port with --port or PORT"
        yield problem("ports", f"{port}, for {what}, is taken: is the service running?", fix)
    ray = [port for port in _RAY if not planned.makes_missing and not port_is_free(port)]
    for port in ray:
        yield warning(
            "ports",
            f"{port} is taken: Ray may be running already, and `serve run` would join it, with "
            "the environment in which Ray was started",
            "stop Ray, unless you want to join it: `make stop` for `make serve`, Ctrl-C for "
            "`serve run`; `ray stop` ends every Ray of this machine",
        )
    if not taken and not ray:
        free = (*wanted, *(() if planned.makes_missing else _RAY))
        yield ok("ports", f"{', '.join(map(str, free))} are free")


def _refusal(host: str) -> str | None:
    """Explain why no process can listen at a host's address; None if one can."""
    try:
        family, *_, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(where)
    except OSError as error:
        return error.strerror
    return None


_RAY_SHARE = 0.3  # of the machine's memory, for Ray's object store
_RAY_MOST = 10**10
_FILES = 1024  # open in a proxy or a gateway without requests
_FILES_OF_REQUEST = 2


def check_system_limits(planned: PlannedStart) -> Iterator[Finding]:
    """Check that /dev/shm is large enough for Ray's object store, and that a process may open
    enough files for all requests.
    """
    host, settings = planned.host, planned.settings
    shm = min(_RAY_MOST, int(_RAY_SHARE * host.memory))
    if host.shm is not None and host.shm < shm:
        yield warning(
            "shared memory",
            f"/dev/shm has {show_size(host.shm)}, Ray wants {show_size(shm)}, so Ray will use "
            "/tmp, on disk",
            f"docker run --shm-size={-(-shm >> 30) + 1}g, or a larger tmpfs",
        )
    else:
        yield ok("shared memory", "/dev/shm is large enough")
    requests = settings.max_ongoing_requests * planned.engines
    files = _FILES + _FILES_OF_REQUEST * requests
    if host.open_files < files:
        yield warning(
            "open files",
            f"{host.open_files} per process; {requests} requests at once need about {files}",
            f"ulimit -Hn {files}, LimitNOFILE= of the unit, or docker run --ulimit nofile={files}",
        )
    else:
        yield ok("open files", f"{host.open_files} per process")
