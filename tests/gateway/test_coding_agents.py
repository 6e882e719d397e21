"""Coding agents from npm edit a file by the tool calls of recorded turns of a model.

Both agents run as installed, configured with only the service's address, a key and a model. Their
prompts are too long for the demo's models.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorikeet.protocol.messages import Call
from tests.clients import installed
from tests.gateway.conftest import Gateway
from tests.gateway.scripted_replica import ScriptedReplica

RUN_S = 300
MAX_CONTEXT = 2**20
"""Context in tokens: the agents' prompts have some 100,000 characters, each a token here."""
SAID = "The file says goodbye now."
PATCH = """apply_patch <<'EOF'
*** Begin Patch
*** Update File: greeting.txt
@@
-hello
+goodbye
*** End Patch
EOF"""
CODEX = """
model = "tiny"
model_provider = "lorikeet"
[model_providers.lorikeet]
name = "Lorikeet"
base_url = "{url}/v1"
env_key = "LORIKEET_KEY"
wire_api = "responses"
"""


def call_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def recorded(*turns: str) -> Callable[[Call], str]:
    """Return the model's next turn, counted by the tools' answers so far."""
    return lambda call: turns[sum(message["role"] == "tool" for message in call.messages)]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "greeting.txt").write_text("hello\n")
    return folder


@pytest.fixture
def replica(gateway: Gateway, tmp_path: Path) -> ScriptedReplica:
    return ScriptedReplica(tmp_path, max_context=MAX_CONTEXT)


def run(agent: str, arguments: list[str], project: Path, **environment: str) -> str:
    home = project.parent / "home"
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        [str(installed.node_modules() / ".bin" / agent), *arguments],
        cwd=project,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def run_claude(gateway: Gateway, arguments: list[str], project: Path) -> str:
    return run(
        "claude",
        arguments,
        project,
        ANTHROPIC_BASE_URL=gateway.url,
        ANTHROPIC_AUTH_TOKEN=gateway.keys["acme"],
        ANTHROPIC_MODEL="tiny",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )


@pytest.mark.soak
def test_codex_reads_and_patches_a_file(
    gateway: Gateway, replica: ScriptedReplica, project: Path, tmp_path: Path
) -> None:
    look = "I look first." + call_of("exec_command", cmd="cat greeting.txt")
    patch = call_of("exec_command", cmd=PATCH)
    gateway.engines.replay = replica.plays(recorded(look, patch, SAID))
    codex = tmp_path / "codex"
    codex.mkdir()
    (codex / "config.toml").write_text(CODEX.format(url=gateway.url))
    how = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    output = run(
        "codex",
        ["exec", *how, "Let greeting.txt say goodbye"],
        project,
        CODEX_HOME=str(codex),
        LORIKEET_KEY=gateway.keys["acme"],
    )
    assert SAID in output
    assert (project / "greeting.txt").read_text() == "goodbye\n"
    assert "hello" in next(
        message["content"] for message in gateway.engines.last.messages if message["role"] == "tool"
    )


@pytest.mark.soak
def test_claude_code_reads_and_edits_a_file(
    gateway: Gateway, replica: ScriptedReplica, project: Path
) -> None:
    file = str(project / "greeting.txt")
    look = "I look first." + call_of("Read", file_path=file)
    edit = call_of("Edit", file_path=file, old_string="hello", new_string="goodbye")
    gateway.engines.replay = replica.plays(recorded(look, edit, SAID))
    output = run_claude(
        gateway, ["--print", "Let greeting.txt say goodbye", "--allowedTools", "Read,Edit"], project
    )
    assert SAID in output
    assert (project / "greeting.txt").read_text() == "goodbye\n"


@pytest.mark.soak
def test_claude_code_gets_a_deferred_tool_by_its_own_search(
    gateway: Gateway, replica: ScriptedReplica, project: Path
) -> None:
    search = call_of("ToolSearch", query="select:WebFetch", max_results=1)
    gateway.engines.replay = replica.plays(recorded(search, SAID))
    output = run_claude(gateway, ["--print", "Say goodbye"], project)
    assert SAID in output
    uses = [call.tools for _, call in gateway.engines.calls]
    offered = [{tool["function"]["name"] for tool in use.tools} for use in uses if use]
    assert "ToolSearch" in offered[0]
    assert offered[1] == offered[0] | {"WebFetch"} != offered[0]
    assert "You can now call WebFetch." in replica.prompts[0]
