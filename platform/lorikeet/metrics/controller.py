"""What the controller measures: how pins stand, how many replicas there are."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric

from lorikeet.metrics.families import gauge
from lorikeet.placement.pin_status import PinState, PinStatus
from lorikeet.placement.plan import Cause


@dataclass(frozen=True, slots=True)
class Replicas:
    """Of one base model: as many as there are to be at least, and that report."""

    wanted: int
    reporting: int


def controller_metrics(
    pins: Iterable[PinStatus], replicas: Mapping[str, Replicas], survey_s: float
) -> Iterator[Metric]:
    """All of them. replicas: by base model; survey_s: what the last survey took."""
    yield from _pins(list(pins))
    family = GaugeMetricFamily(
        "lorikeet_replicas",
        "Replicas of a base model: those that are to be there at least, and those that report.",
        labels=["base_model", "state"],
    )
    for base_model, count in replicas.items():
        family.add_metric([base_model, "wanted"], count.wanted)
        family.add_metric([base_model, "reporting"], count.reporting)
    yield family
    yield GaugeMetricFamily(
        "lorikeet_controller_survey_seconds",
        "How long the controller's last round of questions to all replicas took.",
        survey_s,
    )


def _pins(pins: list[PinStatus]) -> Iterator[Metric]:
    standings = Counter(pin.standing for pin in pins)
    yield gauge(
        "lorikeet_pins",
        "Pins in force, by how they stand.",
        "standing",
        {standing.value: standings[standing] for standing in PinState},
    )
    causes = Counter(cause for pin in pins for cause in {s.cause for s in pin.shortfalls})
    yield gauge(
        "lorikeet_pins_unmet",
        "Pins that do not fully hold, by why.",
        "reason",
        {cause.value: causes[cause] for cause in Cause},
    )
