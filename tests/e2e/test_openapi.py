"""The real service under whatever its OpenAPI document allows, and more: no answer is a 500."""

import pytest

from demo.tasks import TASKS
from tests.gateway.test_openapi import OPERATIONS, send_many


@pytest.mark.soak
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_whatever_is_sent_to_the_service_the_answer_is_as_described(service, path, method):
    key = service.tenant_keys[TASKS[0].tenant]
    send_many(service.url, key, TASKS[0].model, path, method, examples=1000)
