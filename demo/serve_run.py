"""`serve run serve_app:app`, which Ctrl-C ends without a traceback while Ray is imported, too."""

import sys
from pathlib import Path

from demo.interrupts import killed_by_sigint

if __name__ == "__main__":
    with killed_by_sigint():
        from ray.serve.scripts import cli
    # Ray's workers look for modules beside this program, too: not in `demo/`, beside this file.
    sys.argv = [str(Path(sys.executable).with_name("serve")), "run", "serve_app:app"]
    cli()
