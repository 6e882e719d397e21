"""Limits of tenants and keys: as options of commands, and as printed."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import typer

from lorikeet.cli.arguments import parse_bound, parse_bytes, parse_count, parse_duration
from lorikeet.cli.output import print_table
from lorikeet.prices import show_money
from lorikeet.sizes import show_size

T = TypeVar("T")

NONE = "none"
"""Value of an option that removes a limit."""
_NO_LIMIT, _AS_SERVED = "no limit", "as the service"
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True, slots=True)
class LimitOption:
    """A limit, weight or priority as an option.

    name: name in the API.
    option, metavar, meaning: name of the option, and its placeholder and description in help.
    parse: turns the option's text into the API's value.
    show: formats the API's value.
    title: name in tables.
    absent: text in tables if there is no limit; the option's value "none" removes the limit.
        None: the value cannot be removed.
    """

    name: str
    option: str
    metavar: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str | None]
    title: str
    meaning: str
    absent: str | None = None


def parse_amount(text: str) -> int:
    """Parse 600, 1M or 2.5k. Raises typer.BadParameter."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)([kMG]?)", text)
    amount = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if amount < 1:
        raise typer.BadParameter(f"{text!r}: want a number such as 600, 1.5k or 2M")
    return amount


def parse_weight(text: str) -> float:
    """Parse a weight above 0. Raises typer.BadParameter."""
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text) or float(text) <= 0:
        raise typer.BadParameter(f"{text!r}: want a number above 0, such as 2 or 0.5")
    return float(text)


def parse_money(text: str) -> float:
    """Parse an amount of money above 0. Raises typer.BadParameter."""
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", text) or float(text) <= 0:
        raise typer.BadParameter(f"{text!r}: want an amount above 0, such as 250 or 99.50")
    return float(text)


def parse_priority(text: str) -> int:
    """Parse a priority, an integer. Raises typer.BadParameter."""
    if not re.fullmatch(r"-?[0-9]{1,4}", text):
        raise typer.BadParameter(f"{text!r}: want an integer such as 1 or -1")
    return int(text)


def amount(count: int | None) -> str:
    """Format a count as 600, 1.5k or 2M, without rounding."""
    for unit, factor in reversed(_UNITS.items()):
        if count is not None and count >= factor and count * 10 % factor == 0:
            return f"{count / factor:g}{unit}"
    return _NO_LIMIT


def _amounts(
    name: str, option: str, title: str, meaning: str, absent: str = _NO_LIMIT
) -> LimitOption:
    return LimitOption(name, option, "N|none", parse_amount, amount, title, meaning, absent)


def _bytes(
    name: str, option: str, title: str, meaning: str, absent: str = _NO_LIMIT
) -> LimitOption:
    return LimitOption(name, option, "BYTES|none", parse_bytes, show_size, title, meaning, absent)


LIMITS = (
    _amounts(
        "requests_per_min",
        "--requests-per-min",
        "Requests a minute",
        "Requests a minute, on average, such as 600 or 1.5k.",
    ),
    _amounts(
        "tokens_per_min",
        "--tokens-per-min",
        "Tokens a minute",
        "Tokens a minute, of prompts and answers, such as 1M.",
    ),
    LimitOption(
        "burst_s",
        "--burst",
        "DURATION",
        parse_duration,
        lambda value: f"{value:g} s of these rates",
        "Burst",
        "Burst that is allowed at once: as much as the limits a minute allow in this time. "
        "Default 60s.",
    ),
    _amounts(
        "max_concurrent",
        "--concurrent",
        "Requests in flight",
        "Requests in flight, over all gateways.",
    ),
    _amounts("max_context", "--context", "Context", "Tokens of a prompt with its answer."),
    _bytes(
        "bytes_per_min",
        "--bytes-per-min",
        "Pushed bytes a minute",
        "Bytes of pushed adapters a minute, on average, such as 10GiB.",
    ),
)
"""Limits that both tenants and keys have."""

KEY_LIMIT_OPTIONS = (
    *LIMITS,
    LimitOption(
        "priority",
        "--priority",
        "P",
        parse_priority,
        str,
        "Priority",
        "Among its tenant's requests, those of a higher priority begin first. Default 0.",
    ),
)

TENANT_LIMIT_OPTIONS = (
    *LIMITS,
    _amounts(
        "tokens_per_month",
        "--tokens-per-month",
        "Tokens a month",
        "Tokens a calendar month (UTC), such as 500M.",
    ),
    LimitOption(
        "cost_per_month",
        "--cost-per-month",
        "AMOUNT|none",
        parse_money,
        show_money,
        "Cost a month",
        "Money a calendar month (UTC), by the prices of LORIKEET_PRICES, such as 250 or 99.50.",
        _NO_LIMIT,
    ),
    LimitOption(
        "weight",
        "--weight",
        "W",
        parse_weight,
        lambda value: f"{value:g}",
        "Weight",
        "Its share of a busy replica, relative to other tenants' weights. Default 1.",
    ),
    _amounts("max_adapters", "--adapters", "Adapters", "Adapters in use at once."),
    _bytes(
        "max_total_bytes",
        "--bytes",
        "Bytes of adapters",
        "Bytes of all its versions in use, such as 2GiB.",
    ),
    _bytes(
        "pin_budget_bytes",
        "--pinned-bytes",
        "Pinned bytes",
        "Bytes of its pinned adapters on one GPU, such as 4GiB.",
    ),
    LimitOption(
        "max_rank",
        "--rank",
        "RANK|none",
        parse_count,
        str,
        "Rank",
        "Largest rank of a new adapter, if below LORIKEET_MAX_RANK.",
        _AS_SERVED,
    ),
    _bytes(
        "max_adapter_bytes",
        "--adapter-bytes",
        "Bytes of an adapter",
        "Largest new adapter, if below LORIKEET_MAX_ADAPTER_BYTES.",
        _AS_SERVED,
    ),
    _bytes(
        "files_bytes",
        "--files-bytes",
        "Bytes of files",
        "Bytes of its files, instead of LORIKEET_FILES_BYTES.",
        _AS_SERVED,
    ),
    _amounts("max_files", "--files", "Files", "Number of its files, at most 10k.", _AS_SERVED),
    _amounts(
        "open_batches",
        "--open-batches",
        "Open batches",
        "Batches that have not ended, instead of LORIKEET_OPEN_BATCHES.",
        _AS_SERVED,
    ),
    _amounts(
        "batch_lines",
        "--batch-lines",
        "Lines at once",
        "Lines of its batches that are answered at once, over all gateways.",
        _AS_SERVED,
    ),
)


def takes_limits(options: Sequence[LimitOption]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorate a command with an option for each limit.

    The command receives the given limits as `limits`: values by their names in the API. Its last
    parameter stays last in its help.
    """

    def add(command: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(command)
        def run(**given: Any) -> T:
            limits = {
                limit.name: _parsed(limit, text)
                for limit in options
                if (text := given.pop(limit.name)) is not None
            }
            return command(**given, limits=limits)

        own = inspect.signature(command, eval_str=True)
        *first, last = [each for name, each in own.parameters.items() if name != "limits"]
        parameters = [*first, *map(_parameter, options), last]
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return add


def print_limits(options: Sequence[LimitOption], record: Mapping[str, Any]) -> None:
    """Print the current limits of a tenant or a key.

    record: the tenant or key as the admin API's JSON. Limits that an older service lacks are not
        printed.
    """
    known = [limit for limit in options if limit.name in record]
    rows = [[limit.title, _shown(limit, record[limit.name])] for limit in known]
    print_table(["Limit", "Now"], rows, empty="")


def _parameter(limit: LimitOption) -> inspect.Parameter:
    option = typer.Option(
        limit.option, metavar=limit.metavar, help=limit.meaning, show_default=False
    )
    return inspect.Parameter(
        limit.name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None,
        annotation=Annotated[str | None, option],
    )


def _shown(limit: LimitOption, value: Any) -> str | None:
    return limit.absent if value is None else limit.show(value)


def _parsed(limit: LimitOption, text: str) -> Any:
    try:
        return limit.parse(text) if limit.absent is None else parse_bound(limit.parse, text, NONE)
    except typer.BadParameter as error:
        raise typer.BadParameter(error.message, param_hint=limit.option) from error
