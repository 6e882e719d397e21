"""Free TCP ports for servers that benchmarks and tests start."""

import socket


def free_port() -> int:
    """Return a port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
