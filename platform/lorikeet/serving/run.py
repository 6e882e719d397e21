"""Program that runs the application in a Ray of its own, with less of Ray's log.

`lorikeet serve` starts it: python -m lorikeet.serving.run HOST PORT. `serve run` takes a port from
a configuration file only, and with a file it does not exit when the application fails to start.
"""

import logging
import sys
from contextlib import suppress
from pathlib import Path

import lorikeet
from lorikeet.interrupts import killed_by_sigint

_QUIET = logging.WARNING


def main(host: str, port: int) -> None:
    """Serve until KeyboardInterrupt, which is raised. Raises SystemExit if the start fails.

    host, port: address of the tenants' listener.
    """
    with killed_by_sigint():
        import ray
        from ray import serve

        from lorikeet.serving.application import app  # reads the settings
        from lorikeet.serving.start import run_or_exit

    logging.getLogger("ray.serve").setLevel(_QUIET)
    try:
        ray.init(  # joins no Ray that runs
            address="local", namespace="serve", logging_level=_QUIET, include_dashboard=False
        )
    except Exception as error:  # Ray has no class for this
        sys.exit(
            f"Ray did not start: {error}\nTry again once the machine is less busy; Ray's logs are"
            " in /tmp/ray/session_latest/logs, or below RAY_TMPDIR."
        )
    serve.start(
        proxy_location="EveryNode",
        http_options={"host": host, "port": port},
        logging_config={"log_level": logging.getLevelName(_QUIET)},
    )
    try:
        run_or_exit(app, joins=False, blocking=True)
    except KeyboardInterrupt:
        serve.shutdown()  # type: ignore[no-untyped-call]
        raise


if __name__ == "__main__":
    _, given_host, given_port = sys.argv
    # Ray's workers also search the folder of argv[0] for modules, which must not be this one's.
    sys.argv = [str(Path(lorikeet.__file__).parents[1] / "lorikeet-serve")]
    with suppress(KeyboardInterrupt):  # during the start too
        main(given_host, int(given_port))
