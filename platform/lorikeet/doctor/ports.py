"""The ports that the service listens on, and Ray's."""

import socket
from collections.abc import Iterator

from lorikeet.doctor.finding import Finding, ok, problem, warning
from lorikeet.doctor.planned_start import PlannedStart

_RAY = {6379: "ray start", 8265: "Ray's dashboard"}


def check_ports(planned: PlannedStart) -> Iterator[Finding]:
    """Whether they are free, and the admin listener's address is of this machine."""
    admin = planned.settings.admin_address
    if admin.port == planned.http_port:
        found = f"{admin.port} is to be the public listener's and the admin listener's"
        yield problem("ports", found, "set LORIKEET_ADMIN_ADDRESS or PORT to another port")
    if why := _refusal(admin.host):
        found = f"LORIKEET_ADMIN_ADDRESS={admin}: {why}"
        yield problem("ports", found, "give an address of this machine, such as 127.0.0.1:8001")
    wanted = {planned.http_port: "the public listener", admin.port: "the admin listener"}
    taken = {port: what for port, what in wanted.items() if not _free(port)}
    for port, what in taken.items():
        fix = f"stop what listens there: `ss -ltnp 'sport = :{port}'`"
        if port == admin.port:
            fix += ", or set LORIKEET_ADMIN_ADDRESS to another port"
        yield problem("ports", f"{port}, for {what}, is taken: does the service run already?", fix)
    ray = [port for port in _RAY if not _free(port)]
    for port in ray:
        yield warning(
            "ports",
            f"{port} is taken: Ray may be running already, and `serve run` would join it, with "
            "the environment that it was started in",
            "stop it, unless that is wanted: `make stop` for `make serve`, Ctrl-C for `serve run`; "
            "`ray stop` ends every Ray of this machine",
        )
    if not taken and not ray:
        yield ok("ports", f"{', '.join(map(str, (*wanted, *_RAY)))} are free")


def _refusal(host: str) -> str | None:
    """Why nothing can listen at a host's address; None where it can."""
    try:
        family, *_, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(where)
    except OSError as error:
        return error.strerror
    return None


def _free(port: int) -> bool:
    """Whether nobody listens there, on any address of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
