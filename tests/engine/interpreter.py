"""Whether this process runs Triton's kernels in Triton's interpreter, on a CPU.

The interpreter must be chosen before Triton is first imported, so it gets a process of its own:
kernels/test_in_interpreter.py starts it.
"""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
