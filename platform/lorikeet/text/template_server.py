"""Processes that render adapters' own chat templates, which are untrusted code.

One server process per gateway imports the renderer once and forks a process for each tenant: a
tenant's templates see no other tenant's messages, and delay no other tenant. TemplateProcesses runs
the server: python -m lorikeet.text.template_server.

A template runs in jinja2's sandbox, as transformers renders it, in a process with limits on CPU
time, memory and output, without the gateway's environment, and without files to open.
"""

import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CPU_S = 1.0
"""Limit on the CPU seconds of one rendering."""
MEMORY_BYTES = 128 << 20
"""Limit on the bytes of memory that renderings add to a process."""
MAX_CHARACTERS = 8 << 20
"""Limit on the characters of a rendered prompt."""
_WALL_S = 15.0  # for a machine too busy to run the process
_MAX_REPLY_BYTES = 6 * MAX_CHARACTERS  # JSON escapes take up to six bytes
_MAX_REASON = 300
_NICE = 10
_MAX_PROCESSES = 32
"""Maximum number of tenants' processes; the least recently used one ends first."""
_PASSED = ("HOME", "LANG", "LC_ALL", "PATH", "TZ")
"""Variables of the environment that the server gets."""
_FORBIDDEN = (
    *(resource.RLIMIT_CORE, resource.RLIMIT_FSIZE),
    *(resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC),
)
"""Kinds of resources of which a tenant's process gets no new ones."""
_NAME = "<template>"  # file name of templates in tracebacks

Json = dict[str, Any]


class TemplateOverrun(Exception):
    """Raised if a rendering exceeds a limit; the message says which."""


class TemplateRefusal(Exception):
    """Raised if a template fails; the message has the reason and the template's line."""


class ServerBusy(Exception):
    """Raised if the machine finds no time to render."""


class TemplateProcesses:
    """Processes that render templates, one for each tenant. Thread-safe.

    At most one thread at a time may render for a tenant. A server process, which forks them, starts
    with the first rendering.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._idle: dict[str, Connection] = {}  # by tenant, least recently used first

    def render(self, tenant: str, template: str, variables: Json) -> str:
        """Return the text that a template writes.

        variables: values by name; JSON.

        Raises TemplateRefusal if the template fails, TemplateOverrun if it exceeds a limit on time,
        memory or output, and ServerBusy if the machine finds no time to render.
        """
        return str(self._ask(tenant, {"template": template, "variables": variables})["text"])

    def names(self, tenant: str, template: str) -> frozenset[str]:
        """Return all names, such as variables, that occur in a template.

        Raises TemplateRefusal if the template cannot be read, TemplateOverrun if that exceeds a
        limit on time or memory, and ServerBusy if the machine finds no time for it.
        """
        return frozenset(self._ask(tenant, {"template": template})["names"])

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        with self._changing:
            for connection in self._idle.values():
                connection.close()
            self._idle.clear()
            self._end_server()

    def _ask(self, tenant: str, question: Json) -> Json:
        message = json.dumps(question).encode()
        connection, is_new = self._take(tenant)
        try:
            if is_new:
                _await_start(connection)
            connection.send_bytes(message)
            if not connection.poll(_WALL_S):
                raise ServerBusy(
                    f"the machine was too busy to render for {CPU_S:g} s within {_WALL_S:g} s"
                )
            reply: Json = json.loads(connection.recv_bytes(_MAX_REPLY_BYTES))
        except BaseException as error:
            connection.close()  # ends the process
            if isinstance(error, EOFError | OSError | ValueError):
                limits = f"{CPU_S:g} s of CPU time or {MEMORY_BYTES >> 20} MiB of memory"
                raise TemplateOverrun(f"takes more than {limits}") from None
            raise
        if reply["ends"]:
            connection.close()
        else:
            self._put_back(tenant, connection)
        if "overrun" in reply:
            raise TemplateOverrun(reply["overrun"])
        if "refusal" in reply:
            raise TemplateRefusal(reply["refusal"])
        return reply

    def _take(self, tenant: str) -> tuple[Connection, bool]:
        """Return the connection to a tenant's process, which no other thread uses until it is put
        back; and whether the process is new.
        """
        with self._changing:
            held = self._idle.pop(tenant, None)
            if held is not None and not held.poll():  # else the process has ended
                return held, False
            if self._server is None or self._server.poll() is not None:
                self._end_server()
                self._start_server()
            assert self._control is not None
            ours, theirs = socket.socketpair()
            with theirs, suppress(OSError):  # if the server has just ended, _await_start tells
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            return Connection(ours.detach()), True

    def _put_back(self, tenant: str, connection: Connection) -> None:
        with self._changing:
            self._idle[tenant] = connection
            if len(self._idle) > _MAX_PROCESSES:
                self._idle.pop(next(iter(self._idle))).close()

    def _start_server(self) -> None:
        self._control, theirs = socket.socketpair()
        passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                env={**passed, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
                pass_fds=(theirs.fileno(),),
                process_group=0,  # no Ctrl-C from a terminal
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a traceback may quote a prompt
            )

    def _end_server(self) -> None:
        if self._server is not None and self._control is not None:
            self._control.close()
            self._server.kill()
            self._server.wait()
            self._server = None


def _await_start(connection: Connection) -> None:
    """Wait until a new process has started. Raises ServerBusy if it does not."""
    with suppress(EOFError, OSError):
        if connection.poll(_WALL_S):
            connection.recv_bytes(_MAX_REPLY_BYTES)
            return
    raise ServerBusy("the machine could not start a process that renders")


def main() -> None:
    """Serve one TemplateProcesses until it closes the connection.

    Command-line argument: file descriptor of the connection.
    """
    _import_renderer()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes ended processes
    os.nice(_NICE)
    gc.freeze()  # forked processes then share this one's memory
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            _serve(Connection(fds[0]))
            os._exit(0)
        os.close(fds[0])


def _import_renderer() -> None:
    """Import and read what renderings need, by one rendering that fails. Takes a second."""
    _answer(
        {
            "template": "{{ strftime_now('%c') }}{{ raise_exception('') }}",
            "variables": {"messages": []},
        }
    )


def _serve(connection: Connection) -> None:
    """Render templates and list their names, as the connection asks, until it closes or too much
    memory is taken. Limits on memory and CPU time hold.
    """
    if sys.platform == "linux":
        data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (data + MEMORY_BYTES, data + MEMORY_BYTES))
    for kind in _FORBIDDEN:
        resource.setrlimit(kind, (0, 0))
    most_kept = _peak_bytes() + MEMORY_BYTES // 2
    connection.send_bytes(b"")
    ends = False
    while not ends:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # CPU time; the signal kills this process
        try:
            answer = _answer(json.loads(message))
        except MemoryError:
            answer = {"overrun": f"takes more than {MEMORY_BYTES >> 20} MiB of memory"}
        ends = _peak_bytes() > most_kept  # compiled templates take memory from later renderings
        reply = json.dumps(answer | {"ends": ends}).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        with suppress(OSError):  # the gateway has given up
            connection.send_bytes(reply)


def _peak_bytes() -> int:
    """Return the largest resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _answer(question: Json) -> Json:
    template: str = question["template"]
    try:
        if "variables" not in question:
            from jinja2 import Environment

            lexed = Environment().lex(template)
            return {"names": sorted({value for _, kind, value in lexed if kind == "name"})}
        from transformers.utils.chat_template_utils import render_jinja_template

        variables: Json = question["variables"]
        others = {name: value for name, value in variables.items() if name != "messages"}
        conversations = [variables["messages"]]
        ((text,), _) = render_jinja_template(conversations, chat_template=template, **others)
    except MemoryError:
        raise
    except Exception as error:  # a template may fail in any way
        return {"refusal": _reason(error)}
    if len(text) > MAX_CHARACTERS:
        return {"overrun": f"writes more than {MAX_CHARACTERS} characters"}
    return {"text": text}


def _reason(error: Exception) -> str:
    """Return an error's message, cut to a readable length, after the template's line."""
    said = " ".join(str(error).split()) or type(error).__name__
    said = said if len(said) <= _MAX_REASON else f"{said[:_MAX_REASON]}…"
    line = getattr(error, "lineno", None)
    for frame, at in traceback.walk_tb(error.__traceback__):
        line = at if frame.f_code.co_filename == _NAME else line
    return said if line is None else f"line {line}: {said}"


if __name__ == "__main__":
    main()
