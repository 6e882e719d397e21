"""A rolling update under load: no stream that was accepted is cut, nobody is turned away."""

from itertools import pairwise

import pytest
from ray import serve

from lorikeet.serving.app import controller, engine, gateway
from lorikeet.settings import Settings
from tests.e2e.load import Load
from tests.e2e.parts import complete

LONGEST_GAP_S = 15.0  # between two first tokens; on one busy machine a gateway needs long to start


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_every_stream_that_was_accepted_ends_whole(service, crowd):
    assert complete(service)
    before = {replica["replica"] for replica in service.replicas()}
    targets = [*crowd.adapters(6), crowd.base()]
    with (
        Load(service.url, targets, streams=12) as load,
        Load(service.url, targets, streams=4, tokens=600) as long,
    ):
        load.wait_for(40)
        serve.run(changed_service())
        load.wait_for(40)
    assert load.unfinished() + long.unfinished() == []
    first_tokens_s = sorted(result.begun_s for result in load.results)
    assert max(b - a for a, b in pairwise(first_tokens_s)) < LONGEST_GAP_S
    assert complete(service)
    assert before.isdisjoint(replica["replica"] for replica in service.replicas())


def changed_service():
    """The same with another setting, for which Serve replaces every part."""
    settings = Settings.from_env().model_copy(update={"max_ongoing_requests": 500})
    engines = {name: engine(settings, name) for name in settings.base_models}
    return gateway(settings, engines, controller(settings, engines))
