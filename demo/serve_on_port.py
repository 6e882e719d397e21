"""`serve run serve_app:app` on another HTTP port than Serve's default.

`serve run` itself takes a port from a configuration file only, and with a file it does not exit
when the application fails to start.
"""

import sys
from contextlib import suppress

from demo.interrupts import killed_by_sigint


def main(host: str, port: int) -> None:
    """Serve until KeyboardInterrupt, which is raised. Raises SystemExit if the start fails."""
    with killed_by_sigint():
        import ray
        from ray import serve

        from lorikeet.serving.start import refuse_bad_start, run_or_exit

    refuse_bad_start(port)
    from serve_app import app  # reads the settings

    ray.init(namespace="serve")
    serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port})
    try:
        run_or_exit(app, joins=False, blocking=True)
    except KeyboardInterrupt:
        serve.shutdown()
        raise


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):  # during the start too
        main(sys.argv[1], int(sys.argv[2]))
