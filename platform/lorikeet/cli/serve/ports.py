"""Ports of the service: the usual ones, or free ones in their place."""

import socket
from collections.abc import Mapping

from lorikeet.addresses import SERVES_PORT, public_port
from lorikeet.cli.output import say
from lorikeet.settings import PREFIX, Settings

_PORT, _ADMIN = "PORT", f"{PREFIX}ADMIN_ADDRESS"
_TRIED = 100


def with_free_ports(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with the ports of both listeners, and print a line for each that is not the
    usual one.

    Ports that `environ` names stay, free or not. Raises InvalidSetting.
    """
    chosen = {
        _PORT: str(public_port(environ)),
        _ADMIN: str(Settings.from_env(environ).admin_address),
    }
    named = {int(chosen[each].rpartition(":")[2]) for each in chosen if environ.get(each)}
    for name, listener in ((_PORT, "tenants"), (_ADMIN, "administrators")):
        if environ.get(name):
            continue
        host, _, usual = chosen[name].rpartition(":")
        port = _free_port(int(usual), named)
        named.add(port)
        if port != int(usual):
            say(f"Port {usual} is taken: {listener} use {port}.")
            chosen[name] = f"{host}:{port}" if host else str(port)
    return {**environ, **chosen}


def _free_port(usual: int, named: set[int]) -> int:
    """Return the usual port, or the next free one from SERVES_PORT + 80 on.

    named: ports of other listeners.
    """
    candidates = (usual, *range(SERVES_PORT + 80, SERVES_PORT + 80 + _TRIED))
    return next((port for port in candidates if port not in named and _is_free(port)), usual)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
