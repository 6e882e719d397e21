import pytest

from lorikeet.replica import replica
from lorikeet_engine.process import client
from tests.engine import forked_engines
from tests.replica.quick_engine import quick_engine


@pytest.fixture(autouse=True, scope="module")
def engines_that_start_sooner():
    """Start engines without measuring step costs; other tests cover the measurement."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "build_engine", quick_engine)
        patch.setattr(client, "_start", forked_engines.start)
        yield
