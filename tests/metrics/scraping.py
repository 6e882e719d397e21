"""Page of metrics, read by prometheus_client's parser."""

import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Scraped:
    """Samples of a page. Checks that every series occurs once."""

    def __init__(self, page: str) -> None:
        self._values: Values = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                series = sample.name, frozenset(sample.labels.items())
                assert series not in self._values, f"{series} is there twice"
                self._values[series] = sample.value

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of all series that have at least these labels; 0 if there are none."""
        wanted = set(labels.items())
        return sum(v for (n, has), v in self._values.items() if n == name and wanted <= has)

    def labels(self, name: str, label: str) -> set[str]:
        """Return the values of a label."""
        return {dict(has)[label] for n, has in self._values if n == name and label in dict(has)}

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self._values}


def check_with_promtool(page: bytes) -> None:
    """Check a page with promtool; skip the test without Debian's package `prometheus`."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool, of Debian's package `prometheus`, is not installed")
    run = subprocess.run(
        [promtool, "check", "metrics"], input=page, capture_output=True, timeout=60, check=False
    )
    assert run.returncode == 0, (run.stdout + run.stderr).decode()
    assert not run.stdout + run.stderr
