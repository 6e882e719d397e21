"""`serve run serve_app:app`, on another HTTP port than Serve's own.

`serve run` takes a port from a configuration file alone, and then does not end where what the file
names has failed to start.
"""

import sys
from contextlib import suppress

from demo.interrupts import killed_by_sigint


def main(host: str, port: int) -> None:
    """Serve until KeyboardInterrupt. Raises it, and what keeps the service from starting."""
    with killed_by_sigint():
        import ray
        from ray import serve

        from serve_app import app  # the settings are read here

    ray.init(namespace="serve")
    serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port})
    try:
        serve.run(app, blocking=True)
    finally:
        serve.shutdown()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):  # that of a start too
        main(sys.argv[1], int(sys.argv[2]))
