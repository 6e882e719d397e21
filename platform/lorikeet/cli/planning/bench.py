"""Benchmarks of a running service."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from lorikeet.cli.output import (
    NOTHING,
    AsJson,
    print_error,
    print_json,
    print_line,
    print_table,
    spinner,
)
from lorikeet.cli.planning.isolation import (
    LoadRun,
    MeasuredTenant,
    RunMeasurements,
    TenantComparison,
    compare,
    find_models,
    quantile,
)

EXIT_INTERRUPTED = 130
PUBLIC_URL = "http://127.0.0.1:8000"
_ENOUGH = 100  # p99 of fewer answers is the slowest
_NOTHING_S = 1e-4  # tokens received together are less apart
_LATE_S = 0.05  # a larger delay of sending means that this machine was too slow

_SHARES = {"p50": 0.5, "p99": 0.99}
_QUANTILES = [column for at in _SHARES for column in (f"#{at} alone", "#shared", "#growth")]


class _Metric(NamedTuple):
    """Metric of the comparison: a time that is measured for each request or token.

    name: name in JSON.
    title: name in tables.
    times_s: returns the metric's values from a run's measurements.
    """

    name: str
    title: str
    times_s: Callable[[RunMeasurements], list[float]]


class _Figure(NamedTuple):
    """One quantile (p50 or p99) of a metric's times in seconds; None without answers.

    alone: of the tenant's requests sent alone.
    shared: of its requests sent together with those of all tenants.
    """

    alone: float | None
    shared: float | None

    @property
    def growth(self) -> float | None:
        """Growth of the time beside other tenants, as a fraction of the time alone.

        None if one of the times is not known, or the time alone is nearly 0.
        """
        if self.shared is None or self.alone is None or self.alone < _NOTHING_S:
            return None
        return self.shared / self.alone - 1

    def cells(self) -> tuple[str, str, str]:
        """Return the times alone and shared in ms and the growth in %, as text for a table."""
        alone, shared = (NOTHING if s is None else f"{s * 1e3:,.1f}" for s in self)
        return alone, shared, NOTHING if self.growth is None else f"{self.growth:+.0%}"

    def as_json(self) -> dict[str, float | None]:
        """Return both times in seconds, and the growth as a fraction, by name."""
        return {"alone": self.alone, "shared": self.shared, "growth": self.growth}


_METRICS = (
    _Metric("ttft_s", "Time to first token", lambda seen: seen.first_s),
    _Metric("itl_s", "Between two tokens", lambda seen: seen.between_s),
)

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Benchmarks of a running service.

    Example: `lorikeet bench isolation --keys tenants.json`
    """


def _parse_rate(text: str) -> tuple[str | None, float]:
    """Parse a rate: R for all tenants, or TENANT=R for one. Raises typer.BadParameter."""
    tenant, named, rate = text.rpartition("=")
    if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", rate) is None or float(rate) == 0:
        raise typer.BadParameter(f"{text!r}: want requests a second, such as 2 or acme=20")
    return tenant if named else None, float(rate)


def _parse_growth(text: str) -> float:
    """Parse 25% as 0.25. Raises typer.BadParameter."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)%", text)
    if match is None:
        raise typer.BadParameter(f"{text!r}: want a share such as 25%")
    return float(match[1]) / 100


Keys = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help='JSON with each tenant\'s key: {"acme": "lk_…"}.',
        exists=True,
        dir_okay=False,
        show_default=False,
    ),
]
Rates = Annotated[
    list[Any] | None,
    typer.Option(
        parser=_parse_rate,
        metavar="[TENANT=]R",
        help="Requests per second of every tenant, or of one: acme=20. Repeatable. Default 1.",
        show_default=False,
    ),
]
MaxGrowth = Annotated[
    Any,
    typer.Option(
        parser=_parse_growth,
        metavar="SHARE",
        help="Exit with 1 if a p99 grows by more than this, such as 25%.",
        show_default=False,
    ),
]


@app.command()
def isolation(
    keys: Keys,
    rate: Rates = None,
    url: Annotated[str, typer.Option(help="Where tenants reach the service.")] = PUBLIC_URL,
    seconds: Annotated[float, typer.Option(min=0.1, max=86_400, help="Length of each run.")] = 15,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 32,
    seed: Annotated[
        int, typer.Option(min=0, help="The same seed sends the same requests at the same times.")
    ] = 0,
    max_growth: MaxGrowth = None,
    as_json: AsJson = False,
) -> None:
    """Measure how much tenants slow each other down.

    Each tenant's requests are sent alone, then those of all tenants together, at random times that
    do not depend on earlier answers. They go to an adapter of the tenant or, if it has none, to any
    model that it may use, and stream their answers. Ctrl-C ends the run early and shows the results
    so far.

    Example: `lorikeet bench isolation --keys tenants.json --rate 2 --rate acme=20`
    """
    secrets = _read_keys(keys)
    rates = _rates(rate or [], secrets)
    models = asyncio.run(find_models(url, secrets))
    tenants = [
        MeasuredTenant(name, key, models[name], rates[name]) for name, key in secrets.items()
    ]
    rows = list(map(TenantComparison, tenants))
    whole = _run(url, rows, LoadRun(seconds, tokens, seed), quiet=as_json)
    grown = [] if max_growth is None or not whole else list(_grown(rows, max_growth))
    if as_json:
        print_json({"complete": whole, "tenants": list(map(_json, rows)), "grown": grown})
    else:
        _print(rows)
    if not whole:
        print_error("interrupted: these are the results so far")
        raise typer.Exit(EXIT_INTERRUPTED)
    if grown:
        print_error(f"a p99 grew by more than {max_growth:.0%}: {', '.join(grown)}")
        raise typer.Exit(1)


def _read_keys(file: Path) -> dict[str, str]:
    """Read each tenant's key from a JSON file. Raises typer.BadParameter."""
    try:
        keys = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--keys {file}: {error}") from error
    if not (isinstance(keys, dict) and keys and all(isinstance(key, str) for key in keys.values())):
        raise typer.BadParameter(f'--keys {file}: want {{"acme": "lk_…"}}, each tenant\'s key')
    for tenant, key in keys.items():
        if not (key.isascii() and key.isprintable()):
            raise typer.BadParameter(
                f"--keys {file}: the key of {tenant} has characters that no key has"
            )
    return keys


def _rates(given: Sequence[tuple[str | None, float]], keys: Mapping[str, str]) -> dict[str, float]:
    """Return the requests per second of each tenant. Raises typer.BadParameter.

    given: parsed --rate options; tenant None: a rate for all tenants.
    keys: API key by tenant.
    """
    rates = {None: 1.0} | dict(given)
    for tenant in rates.keys() - keys.keys() - {None}:
        raise typer.BadParameter(f"--rate {tenant}=…: --keys has no {tenant}")
    return {tenant: rates.get(tenant, rates[None]) for tenant in keys}


def _run(url: str, rows: Sequence[TenantComparison], run: LoadRun, *, quiet: bool) -> bool:
    """Measure each tenant alone, then all together, with progress on the terminal.

    Returns False if Ctrl-C ended the measurement early.

    rows: comparisons to fill.
    """
    whole_s = (len(rows) + 1) * run.seconds
    with spinner("Beginning", quiet=quiet) as show:
        try:
            asyncio.run(
                compare(url, rows, run, lambda what: show(f"{what}; about {whole_s:.0f} s in all"))
            )
        except KeyboardInterrupt:
            return False
    return True


def _print(rows: Sequence[TenantComparison]) -> None:
    print_table(
        ["Tenant", "Model", "#Requests alone", "#errors", "#shared", "#errors"],
        [_counts(row) for row in rows],
        empty="",
    )
    for metric in _METRICS:
        print_line(f"[bold]{metric.title}[/bold], ms")
        cells = [
            [cell for share in _SHARES.values() for cell in _figure(row, metric, share).cells()]
            for row in rows
        ]
        named = [[row.tenant.name, *each] for row, each in zip(rows, cells, strict=True)]
        print_table(["Tenant", *_QUANTILES], named, empty="")
    for line in _remarks(rows):
        print_line(escape(line))


def _figure(row: TenantComparison, metric: _Metric, share: float) -> _Figure:
    alone, shared = (quantile(metric.times_s(seen), share) for seen in (row.alone, row.shared))
    return _Figure(alone, shared)


def _counts(row: TenantComparison) -> list[Any]:
    seen = [count for s in (row.alone, row.shared) for count in (s.requests, s.errors.total())]
    return [row.tenant.name, row.tenant.model, *(f"{count:,}" for count in seen)]


def _grown(rows: Sequence[TenantComparison], most: float) -> Iterator[str]:
    """Yield the tenants and metrics whose p99 grew by more than `most`, or was not measured.

    most: allowed growth, as a fraction.
    """
    for row in rows:
        for metric in _METRICS:
            figure = _figure(row, metric, _SHARES["p99"])
            if None in figure:
                yield f"{row.tenant.name} ({metric.title.lower()}: not measured)"
            elif figure.growth is not None and figure.growth > most:
                yield f"{row.tenant.name} ({metric.title.lower()}: {figure.growth:+.0%})"


def _remarks(rows: Sequence[TenantComparison]) -> Iterator[str]:
    """Yield lines about errors, runs with few answers, and requests that were sent late."""
    for row in rows:
        for when, seen in (("alone", row.alone), ("beside the others", row.shared)):
            for error, count in seen.errors.most_common():
                yield f"{row.tenant.name} {when}: {count:,} × {error}"
    everything = [seen for row in rows for seen in (row.alone, row.shared)]
    if min(len(seen.first_s) for seen in everything) < _ENOUGH:
        yield f"With fewer than {_ENOUGH} answers p99 is the slowest: raise --seconds or --rate."
    late_s = max(seen.late_s for seen in everything)
    if late_s > _LATE_S:
        yield f"Requests were sent up to {late_s * 1e3:,.0f} ms late: this machine was too slow."


def _json(row: TenantComparison) -> dict[str, Any]:
    return {
        "tenant": row.tenant.name,
        "model": row.tenant.model,
        "requests_per_s": row.tenant.requests_per_s,
        "requests": {"alone": row.alone.requests, "shared": row.shared.requests},
        "errors": {"alone": dict(row.alone.errors), "shared": dict(row.shared.errors)},
        **{
            metric.name: {
                at: _figure(row, metric, share).as_json() for at, share in _SHARES.items()
            }
            for metric in _METRICS
        },
    }
