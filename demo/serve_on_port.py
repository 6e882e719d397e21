"""`serve run serve_app:app` on another HTTP port than Serve's default.

`serve run` itself takes a port from a configuration file only, and with a file it does not exit
when the application fails to start.
"""

import sys
from contextlib import suppress

from demo.interrupts import killed_by_sigint


def main(host: str, port: int) -> None:
    """Serve until KeyboardInterrupt, which is raised, as is any failure of the start."""
    with killed_by_sigint():
        import ray
        from ray import serve

        from serve_app import app  # reads the settings

    ray.init(namespace="serve")
    serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port})
    try:
        serve.run(app, blocking=True)
    finally:
        serve.shutdown()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):  # during the start too
        main(sys.argv[1], int(sys.argv[2]))
