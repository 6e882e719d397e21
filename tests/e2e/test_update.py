"""Rolling updates under load: no accepted stream is cut, and no request is refused."""

import time
from itertools import pairwise

import pytest
from ray import serve

from lorikeet.addresses import Address
from lorikeet.serving.deployments import controller, engine, gateway
from lorikeet.settings import Settings
from tests.e2e.conftest import free_port
from tests.e2e.load import Load, Outcome
from tests.e2e.service_processes import complete

LONGEST_GAP_S = 15.0  # between two first tokens; a gateway starts slowly on one busy machine
LONG_S = 30.0  # a stream that begins before an update must outlast it by far


def test_streams_of_a_replaced_gateway_end_complete(service, crowd):
    engines = {"lorikeet-demo": serve.get_deployment_handle("engine-lorikeet-demo", "default")}
    address = Address("127.0.0.1", free_port())

    def deploy(**update):
        settings = Settings.from_env().model_copy(update={"admin_address": address, **update})
        serve.run(gateway(settings, engines, None), name="front", route_prefix="/front")

    deploy()
    with Load(f"{service.url}/front", [crowd.base()], streams=3, tokens=200) as load:
        load.wait_for(1)
        deploy(max_queue_s=50)
        load.wait_for(6)
    serve.delete("front")
    assert load.counts().keys() == {Outcome.WHOLE}, load.unfinished()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_accepted_stream_ends_complete_across_updates(service, crowd):
    assert complete(service)
    targets = [*crowd.adapters(6), crowd.base()]
    with (
        Load(service.url, targets, streams=12) as load,
        Load(service.url, targets, streams=6, tokens=900) as long,
    ):
        for update in ({"gateways": 3}, {"gateways": 3, "max_ongoing_requests": 500}, {}):
            load.wait_for(40)
            before = {replica["replica"] for replica in service.replicas()}
            began_s = time.monotonic()
            serve.run(changed(**update))
            print(f"{update} took {time.monotonic() - began_s:.0f} s: {load.counts()}")
            assert complete(service)
            load.wait_for(40)
            assert before.isdisjoint(replica["replica"] for replica in service.replicas())
    outcomes = load.counts() + long.counts()
    print(*load.unfinished(), *long.unfinished(), sep="\n")
    assert outcomes.keys() == {Outcome.WHOLE}
    assert max(result.ended_s - result.begun_s for result in long.results) > LONG_S
    first_tokens_s = sorted(result.begun_s for result in load.results)
    assert max(b - a for a, b in pairwise(first_tokens_s)) < LONGEST_GAP_S


def changed(**update):
    """The service with settings for which Serve replaces every part."""
    settings = Settings.from_env().model_copy(update=update)
    engines = {name: engine(settings, name) for name in settings.base_models}
    return gateway(settings, engines, controller(settings, engines))
