"""Helper processes of gateways and replicas, forked from one that has imported what they need.

A template server otherwise starts with a second of processor time, a grammar sandbox with half of
one. Tests of these processes themselves start them as the product does.
"""

import os
import socket
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from lorikeet.text import template_server
from tests.engine.forkserver import FORKSERVER, preload

if TYPE_CHECKING:
    from lorikeet.replica.grammar_sandbox import GrammarSandbox

preload("lorikeet.replica.grammar_sandbox", "transformers.utils.chat_template_utils")


class ForkedProcess:
    """The part of Popen's interface that owners of helper processes use."""

    def __init__(
        self, main: Callable[[], None], channel: Connection | socket.socket, *arguments: object
    ) -> None:
        self._process = FORKSERVER.Process(
            target=_run, args=(main, channel, *map(str, arguments)), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.kill, self.wait = self._process.kill, self._process.join

    def poll(self) -> int | None:
        """Return the exit status; None if the process runs."""
        return self._process.exitcode


def start_template_server(processes: template_server.TemplateProcesses) -> None:
    """Start the server in place of TemplateProcesses._start_server."""
    processes._control, theirs = socket.socketpair()
    with theirs:
        server: Any = ForkedProcess(template_server.main, theirs)
    processes._server = server


def start_sandbox(sandbox: "GrammarSandbox") -> None:
    """Start the child process in place of GrammarSandbox._start."""
    from lorikeet.replica import grammar_sandbox  # gateways need none of its modules

    sandbox._connection, theirs = Pipe()
    with theirs:
        process: Any = ForkedProcess(grammar_sandbox.main, theirs, sandbox._model)
    sandbox._process = process


def _run(main: Callable[[], None], channel: Connection | socket.socket, *arguments: str) -> None:
    os.setpgid(0, 0)
    sys.argv = ["", str(channel.fileno()), *arguments]
    main()
