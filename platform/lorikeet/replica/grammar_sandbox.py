"""A sandbox for grammars: compiles them first in a process that may die of it.

A schema of a few bytes can take minutes, gigabytes, or more stack than there is; then this process
ends and not a replica. Run by GrammarSandbox: python -m lorikeet.replica.grammar_sandbox.
"""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from lorikeet.errors import InvalidInput
from lorikeet.protocol.messages import Call
from lorikeet.replica.grammar import ModelGrammars
from lorikeet_engine.errors import InvalidRequest

_CPU_S = 0.5
_MEMORY_BYTES = 128 << 20
_STACK_BYTES = 4 << 20  # half of what the engine's thread has
_WALL_S = 15.0  # for a machine that has no time for it
_CACHED = 256
_TOO_COMPLEX = "it takes too much time or memory: make it smaller or less nested"


class GrammarSandbox:
    """Checks grammars of one base model, one after the other; its process starts with the first.

    Lives on one event loop.
    """

    def __init__(self, model: Path) -> None:
        self._model = model
        self._process: subprocess.Popen[bytes] | None = None
        # A thread of its own: encoders are for those whose prompts wait.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._problems: dict[str, str | None] = {}  # of each grammar, the last used last

    async def check(self, call: Call, grammar: str | None) -> None:
        """Raise InvalidInput if no engine should see the grammar of a call."""
        if grammar is None:
            return
        if grammar in self._problems:
            problem = self._problems.pop(grammar)
        else:
            loop = asyncio.get_running_loop()
            problem = await loop.run_in_executor(self._thread, self._problem, grammar)
        self._problems[grammar] = problem
        if len(self._problems) > _CACHED:
            del self._problems[next(iter(self._problems))]
        if problem is not None:
            of_tools = call.tools is not None and (call.tools.forced or call.format is None)
            param = "tools" if of_tools else "response_format"
            raise InvalidInput(
                f"the JSON schema of {param} cannot be followed: {problem}", param=param
            )

    def close(self) -> None:
        """End the sandbox's process. Safe to call twice."""
        self._thread.shutdown(cancel_futures=True)
        self._end()

    def _problem(self, grammar: str) -> str | None:
        if self._process is None:
            self._start()
        try:
            self._connection.send(grammar)
            if self._connection.poll(_WALL_S):
                problem: str | None = self._connection.recv()
                return problem
        except (EOFError, OSError):
            pass
        self._end()
        return _TOO_COMPLEX

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(self._model)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C at a terminal is not for it
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what it dies of may quote a schema
            )

    def _end(self) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()
            self._process = None


def main() -> None:
    """Serve one GrammarSandbox to its end. Arguments: the connection's descriptor, the model."""
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(int(sys.argv[1]), Path(sys.argv[2])))
    thread.start()
    thread.join()


def _serve(connection_fd: int, model: Path) -> None:
    connection = Connection(connection_fd)
    grammars = ModelGrammars(model, cached=0)
    _try(grammars, "start: /a/")  # reads the tokenizer
    if sys.platform == "linux":
        data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (data + _MEMORY_BYTES, resource.RLIM_INFINITY))
    while True:
        try:
            grammar = connection.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, _CPU_S)  # of this process; then it is killed
        problem = _try(grammars, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(problem)


def _try(grammars: ModelGrammars, grammar: str) -> str | None:
    """Compile a grammar, and compute its first mask; return what is wrong with it."""
    try:
        matcher = grammars.compile(grammar)
    except InvalidRequest as error:
        return error.message
    (problem,) = grammars.fill_bitmasks([matcher], np.zeros((1, 1), np.uint8))
    return problem.message if problem else None


if __name__ == "__main__":
    main()
