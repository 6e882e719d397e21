"""Child process of expressions.py: runs untrusted regular expressions, with little time and memory.

Imports only the standard library, so that it starts in 30 ms. Arguments: descriptor of a
connection, seconds of CPU time for all expressions, and bytes of memory.
"""

import re
import resource
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

_NAME = re.compile(r"(?:\(\.\*\\\.\)\?\()?([\w.]+)\)?")
"""Pattern of expressions that match only a name, or a name after any prefix.

PEFT may write such an expression for each linear.
"""


def main() -> None:
    """Answer the parent's messages on the connection in argv until its other end is closed.

    Each message has expressions and texts; the answer is the index of the first expression that
    matches each text, or an error message.
    """
    connection = Connection(int(sys.argv[1]))
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        memory = int(sys.argv[3])
        memory = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
        resource.setrlimit(resource.RLIMIT_AS, (memory, hard))
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[2]))  # its signal kills this process
    while True:
        try:
            expressions, texts = connection.recv()
        except EOFError:
            return
        try:
            connection.send(_first_matches(expressions, texts))
        except (re.error, RecursionError, OverflowError) as error:
            connection.send(str(error))


def _first_matches(expressions: Sequence[str], texts: Sequence[str]) -> dict[str, int]:
    compiled = [(_ending(expression), re.compile(expression)) for expression in expressions]
    found = {}
    for text in texts:
        for number, (ending, pattern) in enumerate(compiled):
            if text.endswith(ending) and pattern.fullmatch(text):
                found[text] = number
                break
    return found


def _ending(expression: str) -> str:
    """Return an ending of all texts that an expression can match; other texts need no matching.

    For an expression of one module name, with any prefix or none, this is the name's last part;
    for others "".
    """
    name = _NAME.fullmatch(expression)
    return name[1].rpartition(".")[2] if name else ""


if __name__ == "__main__":
    main()
