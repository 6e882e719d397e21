"""Runs the regular expressions of PEFT's configs, which are untrusted input.

They run where an adapter is packed, never on a server. All expressions of one config run in a child
process with little CPU time and memory: an expression of thirty characters can run for years. The
timeout of the package `regex` is no substitute: it covers matching only, not compiling.
"""

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Self

from lorikeet_engine.errors import AdapterRejected

CONFIG_FILE = "adapter_config.json"
MAX_EXPRESSIONS = 2_000
MAX_EXPRESSION_CHARACTERS = 4_096
BUDGET_S = 0.75
_MEMORY_BYTES = 256 << 20
_WALL_S = 15.0  # BUDGET_S is CPU time; this is for a busy machine
_CHILD = Path(__file__).with_name("expression_child.py")


class Expressions:
    """Matcher for the regular expressions of one PEFT config, in the syntax of Python's `re`.

    The first call starts a child process. To be used as a context manager, which ends that process.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()

    def first_matches(
        self, expressions: Sequence[str], texts: Iterable[str], field: str
    ) -> Mapping[str, int]:
        """Return, for each text, the index of the first expression that matches all of it.

        Texts that no expression matches are left out.

        texts: names of modules, for instance.
        field: config key that holds the expressions, for errors.

        Raises AdapterRejected if an expression is too long or malformed, or if matching takes too
        much time or memory.
        """
        longest = max(map(len, expressions), default=0)
        if longest > MAX_EXPRESSION_CHARACTERS:
            raise bad_config(
                f"an expression of {longest} characters: the limit is {MAX_EXPRESSION_CHARACTERS}",
                field,
            )
        if not expressions:
            return {}
        answer = self._ask(expressions, list(texts))
        if answer is None:
            raise bad_config(
                f"its expressions run for over {BUDGET_S} s or take too much memory: name the "
                "modules, or nest no repetitions",
                field,
            )
        if isinstance(answer, str):
            raise bad_config(f"an entry that is no regular expression: {answer}", field)
        return answer

    def _ask(
        self, expressions: Sequence[str], texts: Sequence[str]
    ) -> Mapping[str, int] | str | None:
        """Send expressions and texts to the child process, and return its answer.

        The answer is, for each matched text, the index of the first expression that matches it; or
        a message about an invalid expression; or None if the child process died or is too slow.
        """
        if self._process is None:
            self._process = self._start()
        try:
            self._connection.send((list(expressions), texts))
            if not self._connection.poll(_WALL_S):
                return None
            answer: Mapping[str, int] | str = self._connection.recv()
        except (EOFError, OSError):
            return None
        return answer

    def _start(self) -> "subprocess.Popen[bytes]":
        self._connection, theirs = Pipe()
        limits = [str(BUDGET_S), str(_MEMORY_BYTES)]
        with theirs:
            return subprocess.Popen(
                [sys.executable, "-IS", str(_CHILD), str(theirs.fileno()), *limits],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # hides the message of a fatal signal
            )


def bad_config(message: str, field: str) -> AdapterRejected:
    """Return the error for a key of PEFT's config.

    message: the problem, in words.
    field: the key.
    """
    return AdapterRejected(f"{CONFIG_FILE}: {field}: {message}", field=field)
