"""Adapters given to `lorikeet serve`: their names, base models and registration."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.names import DEFAULT_ALIAS, check_name
from lorikeet.catalog.records import AdapterRecord
from lorikeet.catalog.state import CatalogState
from lorikeet.cli.adapters.register import pack, register_source
from lorikeet.cli.adapters.request_defaults import DefaultsOptions
from lorikeet.cli.adapters.sources import check_source, open_source
from lorikeet.cli.admin_client import AdminClient
from lorikeet.cli.arguments import AdapterName
from lorikeet.cli.output import print_warning, say, spinner
from lorikeet.errors import InvalidAdapter, InvalidInput, LorikeetError
from lorikeet_engine.adapter_format import AdapterLimits
from lorikeet_engine.errors import AdapterError

if TYPE_CHECKING:
    from lorikeet.gateway.services import ServedModel

_ARCHIVE = re.compile(r"\.(tar|tar\.gz|tgz|zip)$")


@dataclass(frozen=True, slots=True)
class GivenAdapter:
    """An adapter on the command line.

    name: the adapter's name in the catalog, without its tenant.
    source: a folder, an archive, s3://bucket/prefix or hf:organisation/name.
    """

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class BaseOfAdapter:
    """Served base model of an adapter.

    name: name under which the base model is served.
    declared: name that the adapter's files give its base model; empty: none.
    by_name: whether the base model was found by the declared name; False: by its shapes alone.
    """

    name: str
    declared: str
    by_name: bool


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """A given adapter that fits a served base model.

    version: number of the version with these weights; None: not registered yet.
    """

    given: GivenAdapter
    base: BaseOfAdapter
    version: int | None


def name_adapters(given: Iterable[str]) -> list[GivenAdapter]:
    """Give each adapter a name: its folder's, or NAME for a source of the form NAME=FOLDER.

    given: sources as on the command line; patterns such as ./tuned/* stand for several.

    Raises InvalidInput if a source does not exist, or two have one name.
    """
    found: dict[str, GivenAdapter] = {}
    for text in given:
        for adapter in _adapters(text):
            other = found.setdefault(adapter.name, adapter)
            if other != adapter:
                raise InvalidInput(
                    f"{other.source} and {adapter.source} are both named {adapter.name!r}: name "
                    f"one of them, as in other-name={adapter.source}"
                )
    return list(found.values())


def _adapters(text: str) -> Iterator[GivenAdapter]:
    name, marker, source = text.partition("=")
    if marker and "/" not in name and not Path(text).exists():
        check_source(source)
        yield GivenAdapter(check_name(name, "adapter's name"), source)
        return
    is_pattern = any(sign in text for sign in "*?[") and not Path(text).exists()
    sources = sorted(map(str, _matches(text))) if is_pattern else [text]
    if not sources:
        raise InvalidInput(f"no folder matches {text}")
    for each in sources:
        check_source(each)
        yield GivenAdapter(_name(each), each)


def _matches(pattern: str) -> Iterator[Path]:
    path = Path(pattern)
    root = Path(path.anchor or ".")
    return root.glob(str(path.relative_to(root)))


def _name(source: str) -> str:
    """Make a valid name of a source's last part, and print it if it differs."""
    last = source.rstrip("/").rpartition("/")[2].rpartition(":")[2]
    if Path(source).exists():
        last = Path(source).resolve().name
    last = _ARCHIVE.sub("", last)
    name = re.sub(r"\.{2,}", ".", re.sub(r"[^a-z0-9._-]+", "-", last.lower()))
    name = name.strip("._-")[:64]
    if not name:
        raise InvalidInput(
            f"{source}: no name of a-z, 0-9, '.', '_' and '-' can be made of {last!r}: name it, as "
            f"in my-adapter={source}"
        )
    if name != last:
        say(f"{source} is named {name}.")
    return name


def check_adapters(
    given: Sequence[GivenAdapter],
    tenant: str,
    base_models: Mapping[str, "ServedModel"],
    limits: AdapterLimits,
    catalog: AdapterCatalog,
    *,
    quiet: bool,
) -> list[CheckedAdapter]:
    """Find the base model of each adapter, and the version that already has its weights.

    Warns of adapters whose base model is known by its shapes alone.

    tenant: owner of the adapters.
    base_models: served base models, by name.
    limits: the service's limits on an adapter's rank and size.
    catalog: catalog in which versions with the same weights are looked up.
    quiet: show no progress.

    Raises InvalidAdapter, which names the source, for the first adapter that fits no served base
    model, or several.
    """
    checked = []
    with spinner("Checking adapters", quiet=quiet) as show, TemporaryDirectory() as scratch:
        blob = Path(scratch) / "adapter.safetensors"
        for number, adapter in enumerate(given, 1):
            show(f"Checking adapter {number} of {len(given)}: {adapter.name}")
            try:
                with open_source(adapter.source, quiet=quiet) as folder:
                    # registration prints warnings
                    digest = pack(folder, blob, limits.max_bytes, warn=lambda _: None)
                base = find_base_model(blob, base_models, limits)
            except (InvalidAdapter, AdapterError) as error:
                raise InvalidAdapter(f"{adapter.source}: {error.message}") from error
            record = catalog.reader.ask(partial(_find, tenant, adapter.name))
            checked.append(CheckedAdapter(adapter, base, _version(record, digest)))
    _warn_of_names(checked)
    return checked


def find_base_model(
    blob: Path, base_models: Mapping[str, "ServedModel"], limits: AdapterLimits
) -> BaseOfAdapter:
    """Return the served base model of an adapter: by its name, or else the only one that fits.

    blob: the adapter, packed into one file.
    limits: the service's limits on an adapter's rank and size.

    Raises InvalidAdapter if no base model fits, or several do.
    """
    from lorikeet.gateway.admin.blob_validation import (  # most commands need no gateway: 0.7 s
        declared_base_model,
        matching_names,
        validate_blob,
    )

    declared = declared_base_model(blob)
    says = f"it names the base model {declared!r}" if declared else "it names no base model"
    named = matching_names(declared, base_models)
    problems: dict[str, str] = {}
    for name in named or base_models:
        try:
            validate_blob(blob, base_models, limits, base_model=name, digest="-")
        except InvalidAdapter as error:
            problems[name] = error.message
    fitting = [name for name in named or base_models if name not in problems]
    if len(fitting) > 1:
        raise InvalidAdapter(
            f"{says}, and fits {' and '.join(fitting)}: leave it out here, and say which with "
            "`lorikeet register FOLDER TENANT/NAME --base-model NAME` once the service runs"
        )
    if not fitting:
        name, problem = next(iter(problems.items()))
        raise InvalidAdapter(f"{says}, and does not fit {name}: {problem}")
    return BaseOfAdapter(fitting[0], declared, by_name=bool(named))


def _find(tenant: str, name: str, state: CatalogState) -> AdapterRecord | None:
    return state.find(tenant, name)


def _version(record: AdapterRecord | None, digest: str) -> int | None:
    """Return the number of an adapter's version with these weights; None: there is none.

    Prints a line if the alias prod points to another version.
    """
    version = record.with_digest(digest) if record is not None else None
    if record is None or version is None:
        return None
    if (prod := record.aliases.get(DEFAULT_ALIAS)) != version.version:
        say(
            f"{record.label}: these weights are version {version.version}, and prod is {prod}: "
            f"`lorikeet promote {record.label}@{version.version}` makes them prod."
        )
    return version.version


def _warn_of_names(checked: Iterable[CheckedAdapter]) -> None:
    others: dict[BaseOfAdapter, list[str]] = {}
    for adapter in checked:
        if not adapter.base.by_name:
            others.setdefault(adapter.base, []).append(adapter.given.name)
    for base, names in others.items():
        says = f"trained on {base.declared!r}" if base.declared else "of an unnamed base model"
        print_warning(
            f"{', '.join(names)}: {says}, and served on {base.name}, whose shapes fit; the answers "
            "are those of the training only if the two are the same model"
        )


def register_adapters(
    adapters: Iterable[CheckedAdapter],
    tenant: str,
    server: AdminClient,
    show: Callable[[str], None],
) -> dict[str, str]:
    """Register the adapters that are not registered; each becomes prod.

    Prints a line for each. Returns the reason for each that the server refuses, by name.

    show: shows progress.
    """
    refused = {}
    new = [adapter for adapter in adapters if adapter.version is None]
    for number, adapter in enumerate(new, 1):
        given = adapter.given
        show(f"Registering adapter {number} of {len(new)}: {given.name}")
        try:
            version, _ = register_source(
                server,
                given.source,
                AdapterName(tenant, given.name),
                DefaultsOptions(),
                quiet=True,
                base_model=adapter.base.name,
                promote=True,
            )
        except LorikeetError as error:
            refused[given.name] = error.message
            print_warning(f"{given.source} was not registered: {error.message}")
        else:
            say(f"Registered {version['adapter']} version {version['version']}, now prod.")
    return refused
