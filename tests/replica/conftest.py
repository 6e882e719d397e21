import pytest

from lorikeet.replica import replica
from tests.replica.quick_engine import quick_engine


@pytest.fixture(autouse=True, scope="session")
def engines_that_start_sooner():
    """Tests of the engine and of the whole service have the measuring at start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "build_engine", quick_engine)
        yield
