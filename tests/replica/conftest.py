import pytest

from lorikeet.replica import replica
from lorikeet.replica.grammar_sandbox import GrammarSandbox
from lorikeet.text.template_server import TemplateProcesses
from lorikeet_engine.process import client
from tests.engine import forked_engines
from tests.forked_processes import start_sandbox, start_template_server
from tests.replica.quick_engine import quick_engine


@pytest.fixture(autouse=True, scope="module")
def processes_that_start_sooner():
    """Start engines without measuring step costs, and fork helper processes; other tests cover
    both.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "build_engine", quick_engine)
        patch.setattr(client, "_start", forked_engines.start)
        patch.setattr(GrammarSandbox, "_start", start_sandbox)
        patch.setattr(TemplateProcesses, "_start_server", start_template_server)
        yield
