"""Random requests within and beyond the OpenAPI document: no answer of the service is a 500."""

import pytest

from demo.tasks import TASKS
from tests.gateway.test_openapi import OPERATIONS, send_many


@pytest.mark.soak
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_answer_of_the_service_matches_its_openapi_document(service, path, method):
    key = service.tenant_keys[TASKS[0].tenant]
    send_many(service.url, key, TASKS[0].model, path, method, examples=1000)
