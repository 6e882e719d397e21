"""Check constraints.txt against the package registry: python -m tests.constraints.

Asks the registry alone: a folder of wheels on one machine must not decide what others can install.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
# C library of Debian 12, on which the CPU image is built, or a newer one.
PLATFORM = "x86_64-manylinux_2_36"
PYTHONS = ("3.11", "3.12")  # of the CPU image and of the CUDA image
OTHER_SOURCES = ("UV_FIND_LINKS", "UV_INDEX", "UV_EXTRA_INDEX_URL")
EXTRAS: tuple[tuple[str, ...], ...] = ((), ("cuda",))


class Unreachable(Exception):
    """The registry gave no answer."""


class Unresolved(Exception):
    """The registry's packages do not fit the pins."""


def main() -> int:
    """Print missing and unused pins; return the exit status."""
    try:
        with ThreadPoolExecutor() as pool:
            resolved = pool.map(lambda each: resolve(*each), product(PYTHONS, EXTRAS))
            wanted = set[str]().union(*resolved)
    except Unreachable:
        print("constraints.txt: not checked, as the package registry cannot be reached")
        return 0
    except Unresolved as error:
        print(f"constraints.txt cannot be installed from the package registry:\n{error}")
        return 1
    wrong = list(differences(pins(CONSTRAINTS.read_text()), wanted))
    print("\n".join(wrong) or f"constraints.txt: all {len(wanted)} packages are pinned")
    return len(wrong) > 0


def resolve(python: str, extras: tuple[str, ...]) -> set[str]:
    """Resolve all packages that an installation needs, as name==version."""
    words = [sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--quiet", "--no-header"]
    words += ["--no-annotate", "--no-python-downloads", "--only-binary", ":all:"]
    words += ["--python-platform", PLATFORM, "--python-version", python, "--group", "dev"]
    words += [word for extra in extras for word in ("--extra", extra)]
    words += ["--constraint", str(CONSTRAINTS), "pyproject.toml"]
    environment = {name: value for name, value in os.environ.items() if name not in OTHER_SOURCES}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    if "Failed to fetch" in done.stderr:
        raise Unreachable
    if done.returncode != 0:
        raise Unresolved(f"Python {python} {' '.join(extras)}: {done.stderr}")
    return pins(done.stdout)


def pins(text: str) -> set[str]:
    """Return the name==version lines of a requirements file, with names normalized as registries
    do.
    """
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    named = (line.partition("==") for line in lines if line)
    return {re.sub(r"[-_.]+", "-", name).lower() + "==" + version for name, _, version in named}


def differences(pinned: set[str], wanted: set[str]) -> Iterator[str]:
    """Describe the pins to add and to remove."""
    yield from (f"constraints.txt: add {pin}" for pin in sorted(wanted - pinned))
    yield from (f"constraints.txt: remove {pin}: unused" for pin in sorted(pinned - wanted))


if __name__ == "__main__":
    sys.exit(main())
