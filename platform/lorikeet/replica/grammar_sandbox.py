"""Sandbox that compiles each grammar in a child process before the engine does. The child process
also checks answers against schemas.

A schema of a few bytes can take minutes, gigabytes, or overflow the stack: then the child process
dies instead of the replica. GrammarSandbox runs it: python -m lorikeet.replica.grammar_sandbox.
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
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher

from lorikeet.errors import InvalidInput
from lorikeet.protocol.messages import Call, Format
from lorikeet.replica.grammar_matcher import MORE_TOKENS, ModelGrammars
from lorikeet.text.grammars.format_grammar import LAYOUT
from lorikeet.text.grammars.schema_check import NO_JSON, broken_keyword
from lorikeet.text.grammars.schema_faults import (
    AnswerSchema,
    answer_schemas,
    find_fault,
    in_own_words,
    may_be_checked,
)
from lorikeet_engine.errors import EngineOverloaded, InvalidRequest
from lorikeet_engine.sampling.grammar_worker import GrammarWorker

_CPU_S = 0.5
_MEMORY_BYTES = 128 << 20
_STACK_BYTES = 4 << 20  # half of the engine thread's stack
_CHECK_WALL_S = 5.0
_WALL_S = 15.0  # for a machine too busy to run the child
_TRIED_TOKENS = 2
"""Number of tokens sampled to try a compiled grammar.

Some grammars fail only once a token opens an object.
"""
_LARGEST_VOCABULARY = 2**20
_FIND_FAULT = "\0"
"""Prefix of a message to the child process that asks for the fault of a JSON schema. The schema
follows the prefix.
"""
_FIND_LOOSE_FAULT = "\2"
"""Prefix of a message to the child process that asks for the fault of a JSON schema. Unlike with
_FIND_FAULT, keywords that grammars cannot enforce are no faults.
"""
_CHECK = "\1"
"""Prefix of a message to the child process that is a JSON schema and a text to check against it."""
_FIND_CPU_S = 0.3
"""Seconds of CPU time after which the search for the exact place of a fault ends."""
TOO_COMPLEX = "it takes too much time or memory: make it smaller or less nested"
_HAS_STRICT = ("tools", "response_format", "text.format", "output_config.format", "output_format")
"""Fields of requests whose schemas may be sent with `strict`."""
_OR_CHECKED = ". With strict: false the answer is checked instead"


class SchemasRefused(InvalidInput):
    """Refusal of a grammar because of schemas that may be left out of it (AnswerSchema.lets_go).

    A grammar cannot follow these schemas, but a finished answer can be checked against them.

    schemas: all schemas of the call that are at fault.
    """

    def __init__(self, message: str, schemas: Sequence[AnswerSchema]) -> None:
        super().__init__(message, param=schemas[0].param)
        self.schemas = tuple(schemas)


class Unchecked(Exception):
    """Raised if an answer cannot be checked against a schema; the message says why."""


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

        The error is SchemasRefused if all schemas at fault may be left out of the grammar. Raises
        EngineOverloaded if too many grammars of the tenant are waiting, if this grammar waited
        longer than the call allows, or if the machine is too busy to try it.
        """
        problem = await self._tried(call, grammar)
        if problem is None:
            return
        loose = list[AnswerSchema]()
        message = ""
        for each in answer_schemas(call):  # which of them, and where in it
            kind = _FIND_LOOSE_FAULT if each.lets_go else _FIND_FAULT
            if not (found := await self._tried(call, kind + json.dumps(each.schema))):
                continue
            message = f"the JSON schema of {each.place} cannot be followed: {found}"
            if not may_be_checked(found) or not each.lets_go:
                may_let_go = may_be_checked(found) and each.param in _HAS_STRICT
                raise InvalidInput(message + _OR_CHECKED * may_let_go, param=each.param)
            loose.append(each)
        if loose:
            raise SchemasRefused(message, loose)
        of_tools = call.tools is not None and (call.tools.forced or call.format is None)
        answer = Format("", param="tools") if of_tools else call.format or Format("")
        raise InvalidInput(
            f"the {answer.kind.value} of {answer.param} cannot be followed: {problem}",
            param=answer.param,
        )

    async def broken(self, call: Call, schema: Any, text: str) -> str | None:
        """Return the first violation of a JSON schema in a text, in words; None if the text is JSON
        that matches.

        call: the call that the text answers. The call's tenant shares the child process with other
            tenants, so the check may have to wait.

        Raises Unchecked if the check takes too much time or memory, if the schema cannot be used,
        or if the replica is too busy.
        """
        message = _CHECK + json.dumps([schema, text])
        try:
            async with asyncio.timeout(_CHECK_WALL_S):
                found = await asyncio.wrap_future(self._trials.result(message, call.tenant))
        except (TimeoutError, EngineOverloaded):
            raise Unchecked("the replica is too busy to check it") from None
        if found is None or found.startswith(("at $", NO_JSON)):
            return found
        raise Unchecked(found)

    async def _tried(self, call: Call, text: str) -> str | None:
        """Let the child process try a grammar or look for a schema's fault; return the problem, or
        None.

        text: the grammar, or the schema after the prefix _FIND_FAULT or _FIND_LOOSE_FAULT.

        Raises EngineOverloaded if the tenant has too many waiting, if this one waited longer than
        the call allows, or if the machine is too busy.
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
            return TOO_COMPLEX
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
    _load_tokenizer(grammars, "")
    more_loaded = False
    while True:
        try:
            grammar = connection.recv()
        except EOFError:
            return
        if grammar.startswith(MORE_TOKENS) and not more_loaded:
            _load_tokenizer(grammars, MORE_TOKENS)
            more_loaded = True
        signal.setitimer(signal.ITIMER_PROF, _CPU_S)  # CPU time; the signal kills this process
        if grammar.startswith(_CHECK):
            problem = broken_keyword(*json.loads(grammar.removeprefix(_CHECK)))
        elif grammar.startswith((_FIND_FAULT, _FIND_LOOSE_FAULT)):
            lets_go = grammar.startswith(_FIND_LOOSE_FAULT)
            problem = _fault(grammars, json.loads(grammar[1:]), lets_go=lets_go)
        else:
            problem = _try(grammars, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(problem)


def _load_tokenizer(grammars: ModelGrammars, kind: str) -> None:
    """Read a tokenizer for grammars, and limit the memory that this process takes beyond it.

    kind: prefix of its grammars: MORE_TOKENS or none.
    """
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    _try(grammars, f"{kind}start: /a/")
    if sys.platform == "linux":
        data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        most = data + _MEMORY_BYTES
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))  # only root may raise the hard limit


def _try(grammars: ModelGrammars, grammar: str) -> str | None:
    """Compile a grammar and follow it for some tokens; return the problem, None if it has none."""
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


def _fault(grammars: ModelGrammars, schema: Mapping[str, Any], *, lets_go: bool) -> str | None:
    """Return the place of a schema's fault and the problem at this place, as text; None if no fault
    is found within _FIND_CPU_S seconds of CPU time.

    lets_go: whether keywords that grammars cannot enforce are removed, and so no faults.
    """
    began_s = time.process_time()

    def problem(held: Mapping[str, Any]) -> str | None:
        if time.process_time() - began_s > _FIND_CPU_S:
            return None
        text = json.dumps({**held, "x-guidance": LAYOUT})
        return _try(grammars, LLMatcher.grammar_from_json_schema(text))

    fault = find_fault(schema, problem, lets_go=lets_go)
    return None if fault is None else f"at {fault.path}: {fault.reason}"


if __name__ == "__main__":
    main()
