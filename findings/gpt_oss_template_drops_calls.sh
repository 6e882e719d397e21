#!/usr/bin/env bash
# gpt-oss' chat template shows the first of parallel tool calls alone, and drops system messages.
#
# A chat with an assistant's message of two tool calls and both results is valid in OpenAI's API,
# and most templates render both calls. gpt-oss' template (as TRL 1.16.0 packages the original)
# takes `tool_calls[0]`, drops the second call without an error, and gives both results the name of
# the first function. A system message behind the first message is dropped, too, and a function
# without a description, which OpenAI's API allows, makes the template fail.
# One would guess that a template raises an exception for messages that it cannot render: it does so
# for text beside thinking before a call.
#
# Seen: one call of two; both results from functions.time; no trace of the second system message;
# TypeError or UndefinedError for the function. Needs python3 with venv and pip.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check jinja2==3.1.6
venv/bin/pip download --quiet --disable-pip-version-check --no-deps trl==1.16.0
venv/bin/python - <<'PYTHON'
"""Renders chats with gpt-oss' template as transformers does: the same options, filter and names."""

import glob
import json
import zipfile

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


def fail(message):
    raise TemplateError(message)


(wheel,) = glob.glob("trl-*.whl")
text = zipfile.ZipFile(wheel).read("trl/chat_templates/gptoss.jinja").decode()
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
environment.globals |= {"raise_exception": fail, "strftime_now": lambda form: "2026-01-01"}
template = environment.from_string(text)


def call(name):
    return {"id": name, "type": "function", "function": {"name": name, "arguments": {}}}


said = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "When and where?"},
    {"role": "assistant", "content": "", "tool_calls": [call("time"), call("place")]},
    {"role": "tool", "tool_call_id": "time", "content": "noon"},
    {"role": "tool", "tool_call_id": "place", "content": "Zurich"},
    {"role": "system", "content": "Be polite."},
]
shown = template.render(messages=said, add_generation_prompt=True)
calls, results = shown.count("<|call|>"), shown.count("<|start|>functions.time to=assistant")
print(f"calls shown: {calls} of 2; results under the name of the first function: {results} of 2")
print("the second system message is", "shown" if "Be polite." in shown else "dropped")
tool = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
try:
    template.render(messages=said[:2], tools=[tool], add_generation_prompt=True)
    failed = False
except (TemplateError, TypeError) as error:
    failed = True
    print("a function without a description:", type(error).__name__, error)
same = (calls, results) == (1, 2) and "functions.place" not in shown and "Be polite." not in shown
raise SystemExit(not (same and failed))
PYTHON
