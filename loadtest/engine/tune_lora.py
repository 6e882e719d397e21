"""Tuning of the LoRA kernels' launch configs on this GPU, written to tuning.json.

python -m loadtest.engine.tune_lora [--regime few]

For each regime, each number of its config is tried at other values while the rest stay, and the
best value is kept. Minimised is LoRA's time as a share of its target (reach_ms), in the mean and in
the worst of the regime's rows of lora_kernels. Takes some minutes, mostly for compiling. A GPU that
is not in the file yet begins with the config of "default". Prints each improvement.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace

import torch

from loadtest.engine.lora_kernels import ROWS, Pass, Row, build_model, measure
from lorikeet_engine.kernels.lora import tiles, tuning
from lorikeet_engine.kernels.lora.tuning import LaunchConfig, Regime
from lorikeet_engine.models.llama import LlamaModel

_LORA_SMS = (0, 8, 24, 40, 56)
_VALUES = {
    "shrink.programs": (40, 512, 1024, 2048),
    "shrink.wide_columns": (16, 32, 64),
    "shrink.block_in": (128, 256),
    "shrink.warps": (1, 2, 4),
    "shrink.stages": (3, 4),
    "expand.columns": (128, 256),
    "expand.warps": (1, 2, 4, 8),
    "expand.blocks": (1, 4, 8),
}
# With few tokens an expand program takes one block; in prefill a shrink takes all ranks of a slice.
_WITHOUT = {Regime.FEW: "expand.blocks", Regime.PREFILL: "shrink.wide_columns"}
# Smaller gains may be chance.
_GAIN = 0.005
_REPLAYS = 10


def tune(model: LlamaModel, regime: Regime, rows: list[Row]) -> LaunchConfig:
    """Return the best launch config found for one regime of tokens; print each improvement.

    rows: steps by which configs are judged.
    """
    best = tuning.launch_config(regime, model.device)
    steps = [Pass(model, row) for row in rows]
    least = _cost(best, rows, steps)
    print(f"{regime}: {least:.3f} at first", flush=True)
    for knob, value in _settings(regime, best):
        config = _changed(best, knob, value)
        if config == best:
            continue
        cost = _cost(config, rows, steps)
        if cost < least * (1.0 - _GAIN):
            best, least = config, cost
            print(f"{regime}: {least:.3f} with {knob} {value}", flush=True)
    return best


def _settings(regime: Regime, config: LaunchConfig) -> Iterator[tuple[str, int]]:
    for index in range(len(config.lora_sms)):
        yield from ((f"lora_sms.{index}", value) for value in _LORA_SMS)
    for knob, values in _VALUES.items():
        if knob != _WITHOUT.get(regime):
            yield from ((knob, value) for value in values)


def _changed(config: LaunchConfig, knob: str, value: int) -> LaunchConfig:
    part, name = knob.split(".")
    if part == "lora_sms":
        lora_sms = list(config.lora_sms)
        lora_sms[int(name)] = lora_sms[int(name)][0], value
        return replace(config, lora_sms=tuple(lora_sms))
    if part == "shrink":
        return replace(config, shrink=replace(config.shrink, **{name: value}))
    return replace(config, expand=replace(config.expand, **{name: value}))


def _cost(config: LaunchConfig, rows: list[Row], steps: list[Pass]) -> float:
    """Return the cost of a config, the number to minimise; infinity for a config that the GPU has
    no room for.

    The cost is the mean plus the worst of LoRA's time as a share of its target, over the rows.
    steps: captured step of each row.
    """
    tiles.launch_config = lambda _regime, _device: config  # type: ignore[attr-defined,assignment]
    shares = []
    for row, step in zip(rows, steps, strict=True):
        try:
            step.recapture()
        except Exception as error:  # Triton's OutOfResources is not a RuntimeError
            print(f"{config}: {type(error).__name__}", flush=True)
            return float("inf")
        shares.append(measure(row, step, _REPLAYS).lora_ms / row.reach_ms)
    return statistics.mean(shares) + max(shares)


def main() -> None:
    """Tune on the first CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--regime", type=Regime, choices=list(Regime), help="only this regime")
    only = parser.parse_args().regime
    model = build_model()
    gpu = torch.cuda.get_device_name(model.device)
    entries = json.loads(tuning.PATH.read_text())
    configs = entries.setdefault(gpu, dict(entries["default"]))
    for regime in Regime:
        if only in (None, regime):
            rows = [row for row in ROWS if Regime.of(row.tokens, row.adapters) == regime]
            configs[regime] = tune(model, regime, rows).entry()
            tuning.PATH.write_text(json.dumps(entries, indent=2) + "\n")


if __name__ == "__main__":
    main()
