"""Examples of an installed client against a gateway with scripted models.

Those of all clients run against the demo in make soak (tests/e2e/test_clients.py); OpenAI's and
Anthropic's own clients do so in make test (tests/e2e/test_openai_client.py and
test_anthropic_client.py).
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lorikeet.protocol.messages import Call
from tests.clients.installed import EXAMPLES
from tests.clients.running import PYTEST, Served
from tests.gateway.conftest import Gateway
from tests.gateway.scripted_replica import ScriptedReplica

ORDER = json.dumps({"name": "Mira", "amount": 12, "city": "Lyon"})
ARGUMENTS = {"get_weather": {"city": "Tokyo"}}


def plays(call: Call) -> str:
    """Return JSON if a schema is asked for, the forced call if there is one, else a text."""
    if call.format is not None:
        return ORDER
    if call.tools is not None and call.tools.forced:
        name = call.tools.forced[0]
        called = {"name": name, "arguments": ARGUMENTS.get(name, {})}
        return f"<tool_call>\n{json.dumps(called)}\n</tool_call>"
    return "So it is."


@pytest.mark.skipif(find_spec("agents") is None, reason="openai-agents is not installed")
def test_the_agents_sdks_examples_run(gateway: Gateway, tmp_path: Path) -> None:
    gateway.engines.replay = ScriptedReplica(tmp_path).plays(plays)
    served = Served(gateway.url, gateway.keys["acme"], "tiny", "acme/support")
    served.run([sys.executable, *PYTEST, "agents_sdk_examples.py"], EXAMPLES)
