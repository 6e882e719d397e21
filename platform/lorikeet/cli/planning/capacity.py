"""The command capacity: simulates how many replicas given traffic needs, without a server."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from lorikeet.cli.output import NOTHING, AsJson, print_json, print_line, print_table, spinner
from lorikeet.cli.planning.capacity_file import parse_needs, read_needs
from lorikeet.simulator.capacity import SEEDS, Capacity, plan_capacity
from lorikeet.simulator.forecast import CapacityNeeds, Forecast, GoalCheck, TtftSummary
from lorikeet.sizes import show_size

_File = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FILE]",
        help="A TOML or JSON file with tenants, traffic, memory and goals: docs/capacity.md.",
        exists=True,
        dir_okay=False,
        show_default=False,
    ),
]


def capacity(
    file: _File = None,
    adapters: Annotated[
        int | None,
        typer.Option(min=1, help="Without a file: adapters, of ranks 8 to 64."),
    ] = None,
    requests_per_s: Annotated[
        float | None,
        typer.Option(min=1e-3, help="Without a file: requests a second, of all adapters."),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(help="Without a file: memory for adapters on each GPU, such as 16GiB."),
    ] = None,
    ttft_p99_ms: Annotated[
        float | None,
        typer.Option(min=1, help="Without a file: p99 of the time to the first token."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Work out how many replicas some traffic needs, and what to pin.

    It simulates fleets of different sizes, with the service's own routing and eviction and with
    step and load times measured on one H200. That takes seconds, and no server is asked.

    Example: `lorikeet capacity --adapters 1000 --requests-per-s 60 --gpu-memory 16GiB
    --ttft-p99-ms 500`
    """
    given = (adapters, requests_per_s, gpu_memory, ttft_p99_ms)
    if file is not None and given != (None,) * 4:
        raise typer.BadParameter("give a file or options, not both")
    if file is None and None in given:
        raise typer.BadParameter(
            "give a file, or --adapters, --requests-per-s, --gpu-memory and --ttft-p99-ms"
        )
    needs = read_needs(file) if file else _needs(*given)
    answer = _plan(needs, quiet=as_json)
    if as_json:
        print_json(_json(needs, answer))
    else:
        _print(needs, answer)


def _needs(
    adapters: int | None,
    requests_per_s: float | None,
    gpu_memory: str | None,
    ttft_p99_ms: float | None,
) -> CapacityNeeds:
    tenant = {"name": "all", "adapters": adapters, "requests_per_s": requests_per_s}
    goals = {"ttft_p99_ms": ttft_p99_ms}
    given = {"tenants": [tenant], "memory": {"gpu": gpu_memory}, "goals": goals}
    return parse_needs(given, "options")


def _plan(needs: CapacityNeeds, *, quiet: bool) -> Capacity:
    """Search for the capacity; if stderr is a terminal, show which fleet is being simulated."""
    with spinner("Simulating", quiet=quiet) as show:
        return plan_capacity(needs, lambda replicas: show(f"Simulating {_replicas(replicas)}"))


def _json(needs: CapacityNeeds, answer: Capacity) -> dict[str, Any]:
    return {
        "replicas": answer.needed.replicas,
        "gpus": answer.needed.replicas * needs.memory.gpus,
        "expected": _forecast(answer.needed),
        "without_pins": answer.unpinned and _forecast(answer.unpinned),
        "one_replica_less": answer.one_less and _forecast(answer.one_less),
        "adapter_bytes": int(needs.demand.sizes.sum()),
        "gpu_bytes": needs.memory.gpu_bytes,
        "counted_s": needs.counted_s,
        "seeds": list(SEEDS),
    }


def _forecast(found: Forecast) -> dict[str, Any]:
    shown = asdict(found) | {
        "met": found.met,
        "checks": [asdict(check) | {"met": check.met} for check in found.checks],
        "found": {str(tier): share for tier, share in found.found.items()},
    }
    return {key: _finite(value) for key, value in shown.items()}


def _finite(value: Any) -> Any:
    """Replace NaN, which JSON lacks, by null."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _print(needs: CapacityNeeds, answer: Capacity) -> None:
    needed, less = answer.needed, answer.one_less
    each, of_all = needs.memory.gpus, needed.replicas * needs.memory.gpus
    gpus = f" of {each} GPUs each, {of_all:,} GPUs in all" if each > 1 else ""
    print_line(f"[bold]{_replicas(needed.replicas)}[/bold]{gpus}. {_why_not_less(less)}")
    both = [needed] if less is None else [needed, less]
    print_table(
        ["Goal", "#Wanted", *(f"#{_replicas(each.replicas)}" for each in both)],
        [_goal_row(checks) for checks in zip(*(each.checks for each in both), strict=True)],
        empty="",
    )
    for tenant, copies in needed.pins.items():
        print_line(_pin(tenant, copies, answer))
    print_table(
        ["Tenant", "#Requests/s", "#TTFT p50", "#TTFT p99", "#Found on GPU"],
        _tenant_rows(needs, needed),
        empty="",
    )
    for line in _lines(needs, needed):
        print_line(line)


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count:,} replicas"


def _why_not_less(less: Forecast | None) -> str:
    if less is None:
        return "One is enough."
    why = "; ".join(check.text for check in less.missed)
    return f"{less.replicas:,} would not do: {why or 'the queue would grow without end'}."


def _goal_row(checks: Sequence[GoalCheck]) -> list[str]:
    goal = checks[0]
    whose = "" if goal.tenant is None else f"{goal.tenant}: "
    sign = "≥" if goal.what == "hit_rate" else "≤"
    return [
        whose + goal.name,
        f"{sign} {goal.shown(goal.wanted)}",
        *(each.shown(each.expected) for each in checks),
    ]


def _pin(tenant: str, copies: int, answer: Capacity) -> str:
    assert answer.unpinned is not None
    without, pinned = answer.unpinned.tenants[tenant], answer.needed.tenants[tenant]
    return (
        f"Pin [cyan]{tenant}[/cyan] on {_replicas(copies)}: `lorikeet pin {tenant} --replicas "
        f"{copies}`. Only {without.hit_rate:.0%} of its requests would find their adapter on the "
        f"GPU: its p99 to the first token is {_ms(pinned.ttft_p99_s)} with the pin, "
        f"{_ms(without.ttft_p99_s)} without."
    )


def _tenant_rows(needs: CapacityNeeds, found: Forecast) -> Iterator[list[str]]:
    rates = {tenant.name: tenant.rate_per_s for tenant in needs.demand.tenants}
    for name, tail in found.tenants.items():
        yield _tail_row(name, rates[name], tail)
    if len(rates) > 1 or needs.demand.base_rate_per_s:
        yield _tail_row("all requests", needs.demand.rate_per_s, found.all)


def _tail_row(name: str, rate_per_s: float, tail: TtftSummary) -> list[str]:
    p50, p99 = _ms(tail.ttft_p50_s), _ms(tail.ttft_p99_s)
    return [name, f"{rate_per_s:,.4g}", p50, p99, f"{tail.hit_rate:.1%}"]


def _lines(needs: CapacityNeeds, found: Forecast) -> Iterator[str]:
    p50, p99 = _ms(found.inter_token_p50_s), _ms(found.inter_token_p99_s)
    tiers = ", ".join(f"{tier} {share:.1%}" for tier, share in found.found.items())
    gpu, of_all = needs.memory.gpu_bytes, int(needs.demand.sizes.sum())
    gpus = needs.memory.gpus
    where, of_each = ("of a replica's GPUs", " on one") if gpus > 1 else ("replica", "")
    pinned = f", of which pins take {show_size(found.pinned_bytes)}" if found.pins else ""
    yield f"Between two tokens: p50 {p50}, p99 {p99}."
    yield f"Adapters are found: {tiers}. Loads onto GPUs: {found.cold_loads_per_min:,.0f} a minute."
    yield (
        f"GPU memory for adapters: {show_size(gpu)} on each {where}{pinned}; together "
        f"{show_size(gpu * gpus * found.replicas)}. All adapters take {show_size(of_all)}{of_each}."
    )
    yield f"Simulated: {len(SEEDS)} times {needs.counted_s:,.0f} s."


def _ms(seconds: float) -> str:
    return NOTHING if math.isnan(seconds) else f"{seconds * 1e3:,.3g} ms"
