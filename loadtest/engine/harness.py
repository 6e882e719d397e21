"""Parts shared by all benchmarks: arguments, an engine, checked tokens, a table, one JSON file."""

import argparse
import gc
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from loadtest.engine import plain
from loadtest.engine.offline import Work, generate
from loadtest.engine.random_adapters import Targets
from loadtest.engine.random_engine import SETTINGS, random_engine
from loadtest.engine.random_model import CONFIGS
from lorikeet_engine.engine import Engine

Row = TypeVar("Row")
MODEL = ("config", "weight_dtype", "kv_dtype", "tensor_parallel", "kv_bytes")
"""Names of the arguments of `add_model_arguments`."""


def run(
    doc: str,
    part: str,
    works: Sequence[Work],
    measure_all: Callable[[Engine, Sequence[Work]], list[Any]],
    **settings: Any,
) -> None:
    """Run a whole benchmark: measure all works on one engine, and write their rows as JSON.

    doc: docstring of the program's module.
    part: name of the rows in the JSON file.
    works: sets of requests to choose from by the options of the command line.
    measure_all: returns a row for each work.
    settings: further settings of the engine; of a tuple, an option chooses one, the first without
        the option.
    """
    parser = arguments(doc)
    add_model_arguments(parser)
    add_rows(parser)
    for name, values in settings.items():
        if isinstance(values, tuple):
            parser.add_argument(f"--{name}", choices=values, default=values[0])
    options = parser.parse_args()
    works = chosen(parser, works, options.rows)
    known = facts(options.commit)
    model = model_of(options)
    settings = {name: getattr(options, name, value) for name, value in settings.items()}
    model["settings"] = replace(model["settings"], **settings)
    with full_engine(**adapters_of(works, options.host_adapters), **model) as engine:
        rows = measure_all(engine, works)
    write(options.json, known, **about(options), **{part: rows})


def arguments(doc: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments of every benchmark.

    doc: docstring of the program's module; its first line is the description.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--commit", default=_commit(), help="commit that is measured")
    return parser


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose the model and its engine."""
    parser.add_argument(
        "--config", choices=CONFIGS, default="llama-3.1-8b", help="shapes of the model"
    )
    parser.add_argument(
        "--weight-dtype",
        choices=("auto", "packed", "fp8"),
        default="auto",
        help="dtype of the linears' weights",
    )
    add_kv_dtype(parser)
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, help="number of GPUs of the engine"
    )
    parser.add_argument(
        "--kv-bytes", type=int, default=SETTINGS.kv_bytes, help="bytes of the KV cache on each GPU"
    )


def add_rows(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose rows (see `chosen`), and for how many adapters the host has
    room.
    """
    parser.add_argument(
        "--rows", nargs="+", help="patterns of rows' labels; default: the usual rows"
    )
    parser.add_argument(
        "--host-adapters",
        type=int,
        help="adapters that the host has room for, if not all: the GPU holds all then",
    )


def model_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `random_engine`, from the parsed arguments of
    `add_model_arguments`.
    """
    given = {name: getattr(options, name) for name in MODEL if name != "config"}
    return {"config": CONFIGS[options.config], "settings": replace(SETTINGS, **given)}


def adapters_of(works: Iterable[Work], on_host: int | None = None) -> dict[str, Any]:
    """Return the arguments of `random_engine` for the adapters of all works, all on the GPU.

    on_host: as in `random_engine`.
    """
    counts = dict.fromkeys(Targets, 0)
    for work in works:
        counts[work.on] = max(counts[work.on], work.adapters)
    on_linears = counts.pop(Targets.LINEARS)
    return {"adapters": on_linears, "room": on_linears, "others": counts, "on_host": on_host}


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Return the facts about the model and its engine that the JSON file holds."""
    return {name: getattr(options, name) for name in MODEL}


def chosen(
    parser: argparse.ArgumentParser, works: Sequence[Work], patterns: Sequence[str] | None
) -> Sequence[Work]:
    """Return the works whose labels match one of the patterns; all works without patterns.

    Exits with an error message if no work matches.
    """
    found = fitting(works, patterns)
    if not found:
        parser.error(f"no such row: want some of {', '.join(work.label for work in works)}")
    return found


def fitting(works: Sequence[Work], patterns: Sequence[str] | None) -> Sequence[Work]:
    """Return the works whose labels match one of the patterns; all works without patterns."""
    if patterns is None:
        return works
    return [work for work in works if any(fnmatch(work.label, p) for p in patterns)]


def add_kv_dtype(parser: argparse.ArgumentParser) -> None:
    """Add the argument for EngineSettings.kv_dtype."""
    parser.add_argument(
        "--kv-dtype", choices=("auto", "fp8"), default="auto", help="dtype of the KV cache"
    )


def facts(commit: str) -> dict[str, str]:
    """Print and return GPU, torch version, commit and date.

    commit: commit of the measured code.
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    print(f"{gpu}, torch {torch.__version__}, commit {commit}, {now}", flush=True)
    return {"gpu": gpu, "torch": torch.__version__, "commit": commit, "date": now}


@contextmanager
def full_engine(**arguments: Any) -> Iterator[Engine]:
    """Yield an engine of `random_engine`; close it and delete its files at the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        engine = random_engine(Path(folder), **arguments)
        try:
            yield engine
        finally:
            engine.close()


def check(engine: Engine, work: Work) -> float:
    """Run a set of requests greedily once; return the `shortfall` of the worst checked token.

    `plain.check` defines the shortfall. Raises AssertionError if the engine's tokens are wrong.
    """
    answers = generate(engine, work.draw(engine.info.vocab_size, 0)).answers
    return plain.check(engine, plain.some(answers))


def empty_device() -> None:
    """Free the device's memory that is no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def percentiles(values: Sequence[float] | NDArray[np.float64], *percents: int) -> list[float]:
    """Return the percentiles of values, rounded to three decimals."""
    return [round(float(value), 3) for value in np.percentile(values, percents)]


def show(rows: Iterable[Row]) -> list[Row]:
    """Print rows of one dataclass as they come, under the names of its fields; return them."""
    shown: list[Row] = []
    for row in rows:
        cells = dict(_cells(row))
        if not shown:
            widths = [max(8, len(name), len(cell)) for name, cell in cells.items()]
            print(*map(str.ljust, cells, widths))
        print(*map(str.ljust, cells.values(), widths), flush=True)
        shown.append(row)
    return shown


def write(path: Path, facts: Mapping[str, Any], **parts: Any) -> None:
    """Write one JSON object: the facts, and the rows of each part under its name.

    parts: dataclasses, or values that JSON knows.
    """
    path.write_text(json.dumps({**facts, **parts}, indent=1, default=asdict) + "\n")


def _cells(row: Any) -> Iterator[tuple[str, str]]:
    """Yield name and text of each field of a row.

    A field that is a dataclass is replaced by its fields, unless it has a `label`.
    """
    for field in fields(row):
        value = getattr(row, field.name)
        if is_dataclass(value) and not hasattr(value, "label"):
            yield from _cells(value)
        else:
            yield field.name, _text(value)


def _text(value: Any) -> str:
    match value:
        case None:
            return "–"
        case float():
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        case list() | tuple():
            return " ".join(map(_text, value))
        case dict():
            largest_first = sorted(value.items(), key=lambda item: -item[1])
            return ", ".join(f"{name} {_text(number)}" for name, number in largest_first)
        case _:
            return str(getattr(value, "label", value))


def _commit() -> str:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return git.stdout.strip() or "unknown"
