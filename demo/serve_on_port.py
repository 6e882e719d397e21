"""`serve run serve_app:app` on any HTTP port, with less of Ray's own log.

`serve run` itself takes a port from a configuration file only, and with a file it does not exit
when the application fails to start.
"""

import logging
import sys
from contextlib import suppress
from pathlib import Path

from demo.interrupts import killed_by_sigint

_QUIET = logging.WARNING


def main(host: str, port: int) -> None:
    """Serve until KeyboardInterrupt, which is raised. Raises SystemExit if the start fails."""
    with killed_by_sigint():
        import ray
        from ray import serve

        from lorikeet.serving.start import refuse_bad_start, run_or_exit

    refuse_bad_start(port)
    from serve_app import app  # reads the settings

    logging.getLogger("ray.serve").setLevel(_QUIET)
    ray.init(namespace="serve", logging_level=_QUIET)
    serve.start(
        proxy_location="EveryNode",
        http_options={"host": host, "port": port},
        logging_config={"log_level": logging.getLevelName(_QUIET)},
    )
    try:
        run_or_exit(app, joins=False, blocking=True)
    except KeyboardInterrupt:
        serve.shutdown()
        raise


if __name__ == "__main__":
    _, given_host, given_port = sys.argv
    # Ray's workers also search the folder of argv[0] for modules: it must not be `demo/`.
    sys.argv = [str(Path(__file__).parents[1] / "serve_app.py")]
    with suppress(KeyboardInterrupt):  # during the start too
        main(given_host, int(given_port))
