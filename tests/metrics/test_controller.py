"""Metrics of the controller: pins by state and reason, replicas."""

from lorikeet.metrics.controller import ReplicaCount, controller_metrics
from lorikeet.metrics.exposition import join, render
from lorikeet.placement.pin_placement import place_pins
from lorikeet.placement.pin_status import pin_statuses
from lorikeet.placement.pinned_versions import ResolvedPin, ResolvedPins
from lorikeet_engine.adapter import Residency
from tests.metrics.scraping import Scraped, check_with_promtool
from tests.placement.builders import held, promise, ref, report

HELD, COMING = ref("held"), ref("coming")
REPORTS = [
    report("r0", gpu=30, adapters=(held(HELD, Residency.GPU, 10, pinned=True),)),
    report("r1", gpu=30),
]


def test_pins_are_counted_by_state_and_unmet_pins_by_reason() -> None:
    nothing = promise(ref("nothing"))
    pins = (
        promise(HELD, replicas=1),
        promise(COMING, created=1.0),
        ResolvedPin(nothing.pin, ()),
        promise(ref("poor", "globex"), created=2.0),
        promise(ref("many"), created=3.0, replicas=3),
        # the last two have the same reason twice, and two reasons
        promise(ref("large"), ref("larger"), created=4.0, size=1000),
        promise(ref("a", "initech"), ref("b", "initech"), created=5.0, size=50),
    )
    promises = ResolvedPins(pins, {"globex": 9, "initech": 50})
    placement = place_pins(promises, REPORTS)
    found = list(pin_statuses(promises, REPORTS, placement))
    assert found == list(pin_statuses(promises, REPORTS))
    replicas = {"tiny": ReplicaCount(desired=3, reporting=2, learned=4), "wide": ReplicaCount(1, 0)}
    text = join([render(controller_metrics(found, replicas, 0.25), {})])
    check_with_promtool(text)
    page = Scraped(text.decode())
    for state, count in {"met": 1, "loading": 1, "unmet": 5}.items():
        assert page.total("lorikeet_pins", state=state) == count
    unmet = {"no_version": 1, "budget": 2, "too_few_replicas": 1, "no_room": 2, "no_replica": 0}
    assert {why: page.total("lorikeet_pins_unmet", reason=why) for why in unmet} == unmet
    assert page.labels("lorikeet_pins_unmet", "reason") == unmet.keys()
    assert page.total("lorikeet_replicas", base_model="tiny", state="desired") == 3
    assert page.total("lorikeet_replicas", base_model="wide", state="reporting") == 0
    assert page.total("lorikeet_learned_prompts", base_model="tiny") == 4
    assert page.total("lorikeet_controller_survey_seconds") == 0.25


def test_without_replicas_every_pin_is_unmet_for_that_reason() -> None:
    found = pin_statuses(ResolvedPins((promise(HELD),)), [])
    page = Scraped(join([render(controller_metrics(found, {}, 0.0), {})]).decode())
    assert page.total("lorikeet_pins_unmet", reason="no_replica") == 1
