"""Sandbox that compiles each grammar in a child process before the engine does.

A schema of a few bytes can take minutes, gigabytes, or overflow the stack; the child process then
dies instead of the replica. GrammarSandbox runs it: python -m lorikeet.replica.grammars.sandbox.
"""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher

from lorikeet.errors import InvalidInput
from lorikeet.protocol.messages import Call, Format
from lorikeet.replica.grammars.format_grammar import LAYOUT
from lorikeet.replica.grammars.matcher import ModelGrammars
from lorikeet.replica.grammars.schema_faults import answer_schemas, find_fault, in_own_words
from lorikeet_engine.errors import EngineOverloaded, InvalidRequest
from lorikeet_engine.sampling.grammar_worker import GrammarWorker

_CPU_S = 0.5
_MEMORY_BYTES = 128 << 20
_STACK_BYTES = 4 << 20  # half of the engine thread's stack
_WALL_S = 15.0  # for a machine too busy to run the child
_TRIED_TOKENS = 2
"""Number of tokens sampled to try a compiled grammar.

Some grammars fail only once a token opens an object.
"""
_LARGEST_VOCABULARY = 2**20
_FIND_FAULT = "\0"
"""Prefix of a message to the child process that asks for a JSON schema's fault.

The message is then a schema, not a grammar to try.
"""
_FIND_CPU_S = 0.3
"""Seconds of CPU time after which the search for the exact place of a fault ends."""
_TOO_COMPLEX = "it takes too much time or memory: make it smaller or less nested"


class GrammarSandbox:
    """Checker of grammars for one base model, in a child process that tenants share fairly.

    The process starts with the first grammar.
    """

    def __init__(self, model: Path) -> None:
        self._model = model
        self._process: subprocess.Popen[bytes] | None = None
        self._trials = GrammarWorker(self._problem)

    async def check(self, call: Call, grammar: str) -> None:
        """Raise InvalidInput if a call's grammar is invalid or too complex; the error names the
        fault.

        Raises EngineOverloaded if too many grammars of the tenant are waiting, if this grammar
        waited longer than the call allows, or if the machine is too busy to try it.
        """
        problem = await self._tried(call, grammar)
        if problem is None:
            return
        for each in answer_schemas(call):  # which of them, and where in it
            if found := await self._tried(call, _FIND_FAULT + json.dumps(each.schema)):
                raise InvalidInput(
                    f"the JSON schema of {each.place} cannot be followed: {found}", param=each.param
                )
        of_tools = call.tools is not None and (call.tools.forced or call.format is None)
        answer = Format("", param="tools") if of_tools else call.format or Format("")
        raise InvalidInput(
            f"the {answer.kind.value} of {answer.param} cannot be followed: {problem}",
            param=answer.param,
        )

    async def _tried(self, call: Call, text: str) -> str | None:
        """Try a grammar, or find the fault of a schema after _FIND_FAULT; return the problem, or
        None.

        Raises EngineOverloaded as `check` does.
        """
        max_queue_s = call.scheduling.max_queue_s
        try:
            async with asyncio.timeout(max_queue_s):
                return await asyncio.wrap_future(self._trials.result(text, call.tenant))
        except TimeoutError:
            raise EngineOverloaded(
                "this replica could not try the request's JSON schema within the "
                f"{max_queue_s:g} s that it may wait: send it again, or use fewer schemas at once",
                retry_after_s=max_queue_s,  # by then the waiting ones were tried or gave up
            ) from None

    def close(self) -> None:
        """End the sandbox's process. Safe to call twice."""
        self._trials.close()
        self._end()

    def _problem(self, grammar: str) -> str | None:
        if self._process is None:
            self._start()
        try:
            self._connection.send(grammar)
            tried = self._connection.poll(_WALL_S)
            problem: str | None = self._connection.recv() if tried else None
        except (EOFError, OSError):  # the grammar has killed the process
            self._end()
            return _TOO_COMPLEX
        if not tried:
            self._end()
            raise EngineOverloaded(
                f"this replica's machine found no {_CPU_S:g} s in {_WALL_S:g} s to try the "
                "request's JSON schema: send it again",
                retry_after_s=_WALL_S,
            )
        return problem

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(self._model)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=(theirs.fileno(),),
                process_group=0,  # no Ctrl-C from a terminal
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a crash message may quote a schema
            )

    def _end(self) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()
            self._process = None


def main() -> None:
    """Serve one GrammarSandbox until it closes the connection.

    Command-line arguments: file descriptor of the connection, folder of the model.
    """
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(int(sys.argv[1]), Path(sys.argv[2])))
    thread.start()
    thread.join()


def _serve(connection_fd: int, model: Path) -> None:
    connection = Connection(connection_fd)
    grammars = ModelGrammars(model)
    _try(grammars, "start: /a/")  # loads the tokenizer
    if sys.platform == "linux":
        data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = data + _MEMORY_BYTES
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))  # only root may raise the hard limit
    while True:
        try:
            grammar = connection.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, _CPU_S)  # CPU time; the signal kills this process
        if grammar.startswith(_FIND_FAULT):
            problem = _fault(grammars, json.loads(grammar.removeprefix(_FIND_FAULT)))
        else:
            problem = _try(grammars, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(problem)


def _try(grammars: ModelGrammars, grammar: str) -> str | None:
    """Compile a grammar and sample some tokens; return the problem, None if there is none."""
    try:
        matcher = grammars.compile(grammar)
        for _ in range(_TRIED_TOKENS):
            bitmask = np.zeros((1, _LARGEST_VOCABULARY // 8), np.uint8)
            (problem,) = grammars.fill_bitmasks([matcher], bitmask)
            if problem is not None:
                raise problem
            allowed = np.flatnonzero(np.unpackbits(bitmask, bitorder="little"))
            if not allowed.size:
                break
            matcher.accept(int(allowed[0]))
            if matcher.must_end:
                break
    except InvalidRequest as error:
        return in_own_words(error.message)
    return None


def _fault(grammars: ModelGrammars, schema: Mapping[str, Any]) -> str | None:
    """Return the place of a schema's fault and the problem at this place, as text; None if there is
    no fault.
    """
    began_s = time.process_time()

    def problem(held: Mapping[str, Any]) -> str | None:
        if time.process_time() - began_s > _FIND_CPU_S:
            return None
        text = json.dumps({**held, "x-guidance": LAYOUT})
        return _try(grammars, LLMatcher.grammar_from_json_schema(text))

    fault = find_fault(schema, problem)
    return None if fault is None else f"at {fault.path}: {fault.reason}"


if __name__ == "__main__":
    main()
