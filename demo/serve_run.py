"""`serve run serve_app:app`, which Ctrl-C ends without a traceback even while Ray is imported."""

import sys
from pathlib import Path

from demo.interrupts import killed_by_sigint

if __name__ == "__main__":
    with killed_by_sigint():
        from ray.serve.scripts import cli
    # Ray's workers also search the folder of argv[0] for modules: it must not be `demo/`.
    sys.argv = [str(Path(sys.executable).with_name("serve")), "run", "serve_app:app"]
    cli()
