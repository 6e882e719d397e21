"""The figures of docs/eviction.md, from what the simulations wrote.

python -m engine.benchmarks.figures eviction.json fragmentation.json docs/images
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot as plt

_POLICIES = {"Chameleon": "#c9a227", "uses / √size": "#1f6f8b", "Belady": "#b8b8b8"}
_ARENAS = {"Ours": ("#1f6f8b", "cut between layers"), "OnePiece": ("#c0504d", "in one piece")}


def draw_eviction(rows: list[dict[str, Any]], path: Path) -> None:
    """Misses and bytes of each policy as shares of LRU's, for each traffic."""
    found = {(row["traffic"], row["policy"]): row for row in rows}
    names = list(dict.fromkeys(row["traffic"] for row in rows))
    figure, axes = plt.subplots(2, 1, figsize=(10, 6.2), sharex=True, layout="constrained")
    fields = {"misses": "requests that miss", "loaded_gb": "bytes loaded"}
    for axis, (field, label) in zip(axes, fields.items(), strict=True):
        for shift, (policy, colour) in zip((-0.27, 0.0, 0.27), _POLICIES.items(), strict=True):
            shares = [found[name, policy][field] / found[name, "LRU"][field] for name in names]
            places = [at + shift for at in range(len(names))]
            axis.bar(places, shares, 0.25, color=colour, label=policy)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_ylabel(f"{label}, LRU = 1")
    axes[0].legend(ncols=3, frameon=False)
    axes[1].set_xticks(range(len(names)), names, rotation=30, ha="right")
    figure.savefig(path, dpi=110)


def draw_arena(mixes: dict[str, Any], path: Path) -> None:
    """The share of the arena in use and the bytes moved, load after load."""
    figure, axes = plt.subplots(
        2, len(mixes), figsize=(10, 5.6), sharex=True, sharey="row", layout="constrained"
    )
    for (used, moved), (name, mix) in zip(axes.T, mixes.items(), strict=True):
        for arena, (colour, label) in _ARENAS.items():
            samples = mix[arena]
            loads = [mix["loads"] * (at + 1) / len(samples) for at in range(len(samples))]
            used.plot(loads, [one["used"] for one in samples], color=colour, label=label)
            moved.plot(loads, [one["moved"] for one in samples], color=colour)
        used.axhline(mix["fixed"]["used"], color="#b8b8b8", label="slots of the largest rank")
        used.set_title(name)
        moved.set_xlabel("loads")
    axes[0, 0].set_ylabel("share of the arena in use")
    axes[0, 0].set_ylim(0, 1.05)
    axes[1, 0].set_ylabel("bytes moved per byte loaded")
    axes[0, 1].legend(loc="center right", frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Draw both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("eviction", "fragmentation", "folder"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    draw_eviction(json.loads(options.eviction.read_text())["rows"], options.folder / "eviction.png")
    mixes = json.loads(options.fragmentation.read_text())["mixes"]
    draw_arena(mixes, options.folder / "arena.png")


if __name__ == "__main__":
    main()
