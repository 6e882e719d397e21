"""Metrics of the controller: pins by state, and the number of replicas."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric

from lorikeet.metrics.metric_builders import gauge
from lorikeet.placement.pin_placement import Cause
from lorikeet.placement.pin_status import PinState, PinStatus


@dataclass(frozen=True, slots=True)
class ReplicaCount:
    """Number of replicas of one base model.

    desired: minimum number, `LORIKEET_REPLICAS`.
    reporting: replicas that report to the controller.
    learned: prompts learned from traffic that the replicas compute, summed over replicas.
    """

    desired: int
    reporting: int
    learned: int = 0


def controller_metrics(
    pins: Iterable[PinStatus], replicas: Mapping[str, ReplicaCount], survey_s: float
) -> Iterator[Metric]:
    """Generate the controller's metrics.

    pins: all pins in force.
    replicas: number of replicas by base model.
    survey_s: seconds that the controller's last collection of all replicas' reports took.
    """
    yield from _pins(list(pins))
    family = GaugeMetricFamily(
        "lorikeet_replicas",
        "Replicas of a base model: desired at least, and reporting to the controller.",
        labels=["base_model", "state"],
    )
    for base_model, count in replicas.items():
        family.add_metric([base_model, "desired"], count.desired)
        family.add_metric([base_model, "reporting"], count.reporting)
    yield family
    yield gauge(
        "lorikeet_learned_prompts",
        "Beginnings of prompts, learned from traffic, that replicas compute before users ask.",
        "base_model",
        {base_model: count.learned for base_model, count in replicas.items()},
    )
    yield GaugeMetricFamily(
        "lorikeet_controller_survey_seconds",
        "Duration of the controller's last survey of all replicas.",
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
        "Pins that are not fully met, by reason; one pin may have several.",
        "reason",
        {cause.value: causes[cause] for cause in Cause},
    )
