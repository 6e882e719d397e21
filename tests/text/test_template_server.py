"""Limits on templates that render in a process of their tenant, and what other tenants notice."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lorikeet.text import template_server
from lorikeet.text.prompts import PromptEncoder
from lorikeet.text.template_server import (
    MAX_CHARACTERS,
    ServerBusy,
    TemplateOverrun,
    TemplateProcesses,
    TemplateRefusal,
)
from tests.waiting import eventually

MESSAGES = [{"role": "user", "content": "hi"}]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
LONG = "{% for i in range(100000) %}{% for j in range(2000) %}{% endfor %}{% endfor %}"
"""A finite loop of some ten seconds."""


@pytest.fixture(scope="module")
def processes() -> Iterator[TemplateProcesses]:
    processes = TemplateProcesses()
    yield processes
    processes.close()


def rendered(
    processes: TemplateProcesses, template: str, tenant: str = "acme", **variables: Any
) -> str:
    return processes.render(tenant, template, {"messages": MESSAGES, "tools": None, **variables})


def test_a_template_sees_messages_and_variables(processes: TemplateProcesses) -> None:
    assert rendered(processes, PLAIN) == "user: hi\n"
    assert rendered(processes, "{{ bos }}{{ messages | tojson }}", bos="<s>") == (
        '<s>[{"role": "user", "content": "hi"}]'
    )


def test_a_template_renders_as_the_base_models_does(processes: TemplateProcesses) -> None:
    template = Path("demo/model/chat_template.jinja").read_text()
    demo = PromptEncoder(Path("demo/model"))
    how = {"tools": None, "add_generation_prompt": True}
    assert demo._template is not None
    expected = demo._template.render([*MESSAGES], **how)
    assert rendered(processes, template, **demo.special_tokens, **how) == expected


def test_a_long_loop_is_cut_and_the_tenants_next_rendering_works(
    processes: TemplateProcesses,
) -> None:
    began_s = time.monotonic()
    with pytest.raises(TemplateOverrun, match="more than 1 s of CPU time"):
        rendered(processes, LONG)
    assert time.monotonic() - began_s < 9
    assert rendered(processes, PLAIN) == "user: hi\n"


def test_another_tenant_renders_while_a_template_loops(processes: TemplateProcesses) -> None:
    rendered(processes, PLAIN, "globex")
    cut = threading.Event()

    def loop() -> None:
        with pytest.raises(TemplateOverrun):
            rendered(processes, LONG)
        cut.set()

    looping = threading.Thread(target=loop)
    looping.start()
    for _ in range(20):
        assert rendered(processes, PLAIN, "globex") == "user: hi\n"
    assert not cut.is_set()
    looping.join()
    assert cut.is_set()


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ 'a' * 200000000 }}", "128 MiB of memory"),
        ("{{ ['a' * 1000000] * 1000 }}", "128 MiB of memory"),
        (f"{{{{ 'a' * {MAX_CHARACTERS + 1} }}}}", f"writes more than {MAX_CHARACTERS} characters"),
    ],
    ids=["one text", "many texts", "output"],
)
def test_memory_and_output_are_limited(
    processes: TemplateProcesses, template: str, problem: str
) -> None:
    with pytest.raises(TemplateOverrun, match=problem):
        rendered(processes, template)
    assert len(rendered(processes, f"{{{{ 'a' * {MAX_CHARACTERS} }}}}")) == MAX_CHARACTERS


def test_memory_of_earlier_templates_is_no_fault_of_a_later_one(
    processes: TemplateProcesses,
) -> None:
    """transformers keeps templates, here of 12 MB each."""
    kept = list[bool]()
    for number in range(10):
        template = f"{{# {'a' * 12_000_000} #}}{number}"
        assert rendered(processes, template, "large") == str(number)
        kept.append("large" in processes._idle)
    assert not all(kept)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("a\n{% if", "line 2: "),
        ("a\n\n{{ raise_exception('no system') }}", "line 3: no system"),
        ("a\n{{ 1 + messages[0].content }}", "line 2: unsupported operand"),
        ("\n{{ ''.__class__.__name__ }}", "line 2: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "line 1: "),
        ("{% include '/etc/hostname' %}", "line 1: "),
        ("{{ raise_exception('x' * 5000) }}", "line 1: x{300}…$"),
    ],
)
def test_a_failure_has_the_templates_line(
    processes: TemplateProcesses, template: str, problem: str
) -> None:
    with pytest.raises(TemplateRefusal, match=f"^{problem}"):
        rendered(processes, template)


def test_names_are_those_in_the_template(processes: TemplateProcesses) -> None:
    assert {"messages", "m", "role"} <= processes.names("acme", PLAIN)
    with pytest.raises(TemplateRefusal, match="line 1"):
        processes.names("acme", "{{ 'a }}")


def descendants(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [pid for child in map(int, children) for pid in (child, *descendants(child))]


def test_a_rendering_process_has_no_environment_of_the_gateway_and_opens_no_file(
    processes: TemplateProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    own = TemplateProcesses()
    assert rendered(own, PLAIN) == "user: hi\n"
    assert own._server is not None
    server = own._server.pid
    (child,) = descendants(server)
    for pid in (server, child):
        assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    limits = Path(f"/proc/{child}/limits").read_text()
    (files,) = (line.split()[3:5] for line in limits.splitlines() if "open files" in line)
    assert files == ["0", "0"]
    own.close()
    assert eventually(lambda: not Path(f"/proc/{child}").exists())


def test_a_process_or_server_that_has_died_is_replaced() -> None:
    own = TemplateProcesses()
    assert rendered(own, PLAIN) == "user: hi\n"
    assert own._server is not None
    (child,) = descendants(own._server.pid)
    os.kill(child, signal.SIGKILL)
    assert eventually(lambda: not Path(f"/proc/{child}").exists())
    assert rendered(own, PLAIN) == "user: hi\n"
    own._server.kill()
    own._server.wait()
    assert rendered(own, PLAIN) == "user: hi\n"  # its process lives on
    assert rendered(own, PLAIN, "globex") == "user: hi\n"
    own.close()
    own.close()


def test_only_some_tenants_processes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_server, "_MAX_PROCESSES", 2)
    own = TemplateProcesses()
    for tenant in "abcad":
        assert rendered(own, PLAIN, tenant) == "user: hi\n"
    assert list(own._idle) == ["a", "d"]
    assert own._server is not None
    server = own._server.pid
    assert eventually(lambda: len(descendants(server)) == 2)
    own.close()


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_server_that_cannot_start_is_no_fault_of_the_template(
    has_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = TemplateProcesses()
    monkeypatch.setattr(template_server.sys, "executable", "/bin/false")
    start = own._start_server

    def start_and_wait() -> None:
        start()
        assert own._server is not None
        own._server.wait()

    if has_ended:  # before it is asked for a process
        monkeypatch.setattr(own, "_start_server", start_and_wait)
    with pytest.raises(ServerBusy, match="could not start"):
        rendered(own, PLAIN)
    own.close()
