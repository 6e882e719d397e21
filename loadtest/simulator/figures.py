"""The figures of what `goals` wrote.

python -m loadtest.simulator.figures goals.json docs/images
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

from loadtest.simulator.goals import EXPONENTS, OURS, scenario_name
from loadtest.simulator.oracle import ORACLE

mpl.use("agg")
from matplotlib import pyplot as plt

_COLOURS = {
    OURS: "#1f6f8b",
    "bounded hashing": "#c9a227",
    "multiplexing": "#7a9e58",
    "power of two": "#c0504d",
    ORACLE: "#b8b8b8",
}
_PANELS: dict[str, Callable[[dict[str, Any]], float]] = {
    "requests that miss": lambda one: 1.0 - one["hit_rate"],
    "GB loaded": lambda one: one["loaded_gb"],
    "p99 TTFT, seconds": lambda one: one["ttft_p99_s"],
    "max / mean load": lambda one: one["balance"],
}


def draw(outcomes: list[dict[str, Any]], replicas: int, path: Path) -> None:
    """Each panel over Zipf's exponent, a line for each router. outcomes: as `goals` writes them."""
    found = {(one["where"], one["router"]): one for one in outcomes}
    figure, axes = plt.subplots(1, len(_PANELS), figsize=(14, 4.0), layout="constrained")
    for axis, (label, value) in zip(axes, _PANELS.items(), strict=True):
        for router, colour in _COLOURS.items():
            heights = [value(found[scenario_name(replicas, s), router]) for s in EXPONENTS]
            axis.plot(EXPONENTS, heights, color=colour, label=router, marker="o", markersize=4)
        axis.set_title(label)
        axis.set_xlabel("Zipf's s")
        if label != "max / mean load":
            axis.set_yscale("log")
    lines, labels = axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """One figure for each size of fleet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("goals", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    outcomes = json.loads(options.goals.read_text())["outcomes"]
    for replicas in (16, 4):
        draw(outcomes, replicas, options.folder / f"routing-{replicas}.png")


if __name__ == "__main__":
    main()
