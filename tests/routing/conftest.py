import pytest

from tests.routing.gateway import Gateway


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()
