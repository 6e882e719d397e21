"""The controller's metrics: the state of pins, and the number of replicas."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric

from lorikeet.metrics.metric_builders import gauge
from lorikeet.placement.pin_placement import Cause
from lorikeet.placement.pin_status import PinState, PinStatus


@dataclass(frozen=True, slots=True)
class ReplicaCount:
    """The replicas of one base model: those desired at least, and those that report."""

    desired: int
    reporting: int


def controller_metrics(
    pins: Iterable[PinStatus], replicas: Mapping[str, ReplicaCount], survey_s: float
) -> Iterator[Metric]:
    """The controller's metrics. replicas: by base model; survey_s: what the last survey took."""
    yield from _pins(list(pins))
    family = GaugeMetricFamily(
        "lorikeet_replicas",
        "Replicas of a base model: those desired at least, and those that report.",
        labels=["base_model", "state"],
    )
    for base_model, count in replicas.items():
        family.add_metric([base_model, "desired"], count.desired)
        family.add_metric([base_model, "reporting"], count.reporting)
    yield family
    yield GaugeMetricFamily(
        "lorikeet_controller_survey_seconds",
        "How long the controller's last survey of all replicas took.",
        survey_s,
    )


def _pins(pins: list[PinStatus]) -> Iterator[Metric]:
    states = Counter(pin.state for pin in pins)
    yield gauge(
        "lorikeet_pins",
        "Pins in force, by state.",
        "state",
        {state.value: states[state] for state in PinState},
    )
    causes = Counter(cause for pin in pins for cause in {s.cause for s in pin.shortfalls})
    yield gauge(
        "lorikeet_pins_unmet",
        "Pins that do not fully hold, by why.",
        "reason",
        {cause.value: causes[cause] for cause in Cause},
    )
