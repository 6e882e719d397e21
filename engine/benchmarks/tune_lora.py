"""Find how the LoRA kernels should cut their work on this GPU, and write it into tuning.json.

python -m engine.benchmarks.tune_lora [--regime few]

For each regime, one number of its cut after the other is tried at other values while the rest stay;
the best is kept. What is made small: the mean, over the regime's rows of lora_kernels, of LoRA's
time as a share of what it may take. Takes some minutes, most of them for compiling.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from engine.benchmarks.lora_kernels import ROWS, Pass, Row, build_model, measure
from lorikeet_engine.kernels.lora import tiles, tuning
from lorikeet_engine.kernels.lora.tuning import Cut, Regime
from lorikeet_engine.models import Model

# The few shapes of a decode fit any of these; a prefill's tiles are larger.
_TOKENS = {Regime.FEW: (), Regime.DENSE: (16, 32), Regime.PREFILL: (64, 128)}
_SHRINK = {
    "programs": (256, 512, 1024, 2048),
    "inner": (64, 128, 256),
    "warps": (1, 2, 4, 8),
    "stages": (3, 4, 5),
}
_EXPAND = {"columns": (64, 128, 256, 512), "warps": (1, 2, 4, 8), "blocks": (1, 2, 4, 8)}
_LEFT = {"sms": (0, 4, 8, 16, 24), "heavy_sms": (0, 8, 24, 40, 48)}
_REPLAYS = 15


def tune(model: Model, regime: Regime, rows: list[Row]) -> Cut:
    """The best cut found for these rows; prints what helped."""
    best = tuning.cut_of(regime, model.device)
    steps = [Pass(model, row) for row in rows]
    cost = _cost(best, rows, steps)
    print(f"{regime}: {cost:.3f} of what LoRA may take", flush=True)
    for what in (*_LEFT, *(f"shrink.{key}" for key in _SHRINK), *(f"expand.{k}" for k in _EXPAND)):
        for cut in _changes(best, regime, what):
            tried = _cost(cut, rows, steps)
            if tried < cost:
                best, cost = cut, tried
                print(f"{regime}: {cost:.3f} with {what} {_get(cut, what)}", flush=True)
    return best


def _changes(cut: Cut, regime: Regime, what: str) -> Iterator[Cut]:
    part, _, name = what.rpartition(".")
    if regime == Regime.FEW and name == "blocks":
        return
    if not part:
        for value in _LEFT[name]:
            yield replace(cut, **{name: value})
    elif part == "shrink":
        for value in _SHRINK[name]:
            yield replace(cut, shrink=replace(cut.shrink, **{name: value}))
    else:
        for value in _EXPAND[name]:
            yield replace(cut, expand=replace(cut.expand, **{name: value}))


def _get(cut: Cut, what: str) -> int:
    value: Any = cut
    for name in what.split("."):
        value = getattr(value, name)
    return int(value)


def _cost(cut: Cut, rows: list[Row], steps: list[Pass]) -> float:
    """Infinite for a cut that the GPU has no room for."""
    tiles.cut_of = lambda _regime, _device: cut
    shares = []
    for row, step in zip(rows, steps, strict=True):
        try:
            step.recapture()
        except Exception as error:  # Triton's OutOfResources is not a RuntimeError
            print(f"{cut}: {type(error).__name__}", flush=True)
            return float("inf")
        shares.append(measure(row, step, _REPLAYS).lora_ms / row.reach_ms)
    return statistics.mean(shares)


def main() -> None:
    """Tune on the first CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--regime", type=Regime, choices=list(Regime), help="only this one")
    only = parser.parse_args().regime
    model = build_model()
    gpu = torch.cuda.get_device_name(model.device)
    entries = json.loads(tuning.PATH.read_text())
    cuts = entries.setdefault(gpu, dict(entries["default"]))
    for regime in Regime:
        if only in (None, regime):
            rows = [row for row in ROWS if Regime.of(row.tokens, row.adapters) == regime]
            cuts[regime] = asdict(tune(model, regime, rows))
            tuning.PATH.write_text(json.dumps(entries, indent=2) + "\n")


if __name__ == "__main__":
    main()
