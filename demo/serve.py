"""Start the service with the demo: `make serve`, and `python -m demo.serve`."""

import sys

from demo.interrupts import killed_by_sigint

if __name__ == "__main__":
    with killed_by_sigint():
        from demo.start import main
    sys.exit(main())
