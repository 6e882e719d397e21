"""Checks of the catalog: its store, admin keys, and adapters against the planned memory."""

import time
from collections.abc import Iterator
from pathlib import Path

from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.records import Scope, VersionRecord
from lorikeet.catalog.state import CatalogState
from lorikeet.catalog.store.object_store import open_store
from lorikeet.doctor.finding import Finding, ok, problem, warning
from lorikeet.doctor.planned_start import PlannedStart
from lorikeet.doctor.store import check_writes, unusable
from lorikeet.errors import InvalidSetting, LorikeetError, StoreError
from lorikeet.gateway.auth import authenticate
from lorikeet.sizes import show_size
from lorikeet_engine.errors import EngineError


def check_catalog(planned: PlannedStart) -> Iterator[Finding]:
    """Check the store and, if it holds a catalog, the catalog's admin keys and adapters."""
    url = planned.settings.catalog
    faults = list(check_presence(planned))
    if planned.makes_missing and [fault.check for fault in faults] == ["catalog"]:
        yield ok("catalog", f"there is none at {url}: the start makes it")
        yield from check_writes(open_store(url)) if _is_there(url) else ()
        return
    if any(fault.check == "store" for fault in faults) or not _is_there(url):
        yield from faults
        return
    store = open_store(url)
    yield from check_writes(store)
    if faults:
        yield from faults
        return
    catalog = CatalogReader(store)
    yield ok("catalog", f"at entry {catalog.refresh().seq}")
    yield catalog.ask(lambda state: _check_keys(state, url))
    secret = planned.environ.get("LORIKEET_ADMIN_KEY")
    if secret and secret.count(".") < 2:  # no token of an identity provider
        yield catalog.ask(lambda state: _check_secret(state, secret))
    yield from _check_adapters(planned, catalog)


def check_presence(planned: PlannedStart) -> Iterator[Finding]:
    """Report a store that cannot be read, or that holds no catalog."""
    url = planned.settings.catalog
    try:
        missing = not _is_there(url) or open_store(url).first("log/") is None
    except InvalidSetting as error:
        yield problem("store", error.message, "correct LORIKEET_CATALOG")
    except StoreError as error:
        yield unusable(url, error)
    else:
        if missing:
            fix = "correct LORIKEET_CATALOG, or `lorikeet init` for a new one"
            yield problem("catalog", f"there is no catalog at {url}", fix)


def _is_there(url: str) -> bool:
    """Whether the catalog's folder exists; True for a bucket."""
    return "://" in url or Path(url).exists()


def _check_keys(state: CatalogState, url: str) -> Finding:
    if count := len(state.admin_keys()):
        return ok("admin key", f"{count} that never {'expires' if count == 1 else 'expire'}")
    return problem(
        "admin key",
        "there is no working admin key: nothing can be changed",
        f"an init was interrupted: remove {url} and run `lorikeet init`",
    )


def _check_secret(state: CatalogState, secret: str) -> Finding:
    try:
        authenticate(state, f"Bearer {secret}", Scope.ADMIN, time.time(), reading=False)
    except LorikeetError as error:
        return warning(
            "admin key",
            f"LORIKEET_ADMIN_KEY: {error.message}",
            "export LORIKEET_ADMIN_KEY=lk_…, as `lorikeet init` printed it for this catalog",
        )
    return ok("admin key", "LORIKEET_ADMIN_KEY is an admin's")


def _check_adapters(planned: PlannedStart, catalog: CatalogReader) -> Iterator[Finding]:
    """Check that the memory for adapters can hold the largest ones, and that the base models of all
    adapters in the catalog are served.
    """
    versions = catalog.ask(_usable)
    served = planned.settings.base_models
    unserved = {v.base_model for v in versions if v.base_model not in served}
    if unserved:
        yield warning(
            "adapters",
            f"some are for {', '.join(sorted(unserved))}, which is not served: requests for them "
            "are refused",
            "add it to LORIKEET_BASE_MODELS, under that name",
        )
    mine = [version for version in versions if version.base_model in served]
    faults = [*_check_sizes(planned, mine), *_check_ranks(planned, mine)]
    yield from faults or [ok("adapters", f"{len(mine):,} versions, all fit arena and slot pool")]


def _usable(state: CatalogState) -> list[VersionRecord]:
    return [
        version
        for adapter in state.adapters()
        for version in adapter.versions
        if not version.retired
    ]


def _check_sizes(planned: PlannedStart, versions: list[VersionRecord]) -> Iterator[Finding]:
    largest: dict[str, int] = {}
    for version in versions:
        name = version.base_model
        largest[name] = max(largest.get(name, 0), version.gpu_bytes)
    for name, size in largest.items():
        plan, arena = planned.plans.get(name), planned.settings.adapter_host_memory
        disk = planned.settings.adapter_disk
        found, wanted = f"the largest adapter of {name} takes {show_size(size)}", (size >> 18) + 1
        gpus = planned.settings.tensor_parallel[name]
        if gpus * size > arena:
            fix = f"LORIKEET_ADAPTER_HOST_MEMORY={gpus * wanted}MiB holds four of that size"
            each = f" for each of {gpus} GPUs" if gpus > 1 else ""
            yield problem("adapters", f"{found}{each}, the host arena has {show_size(arena)}", fix)
        if gpus * size > disk:
            fix = f"LORIKEET_ADAPTER_DISK={gpus * wanted}MiB holds four of that size"
            each = f"the disk cache has {show_size(disk)}: each load downloads it again"
            yield warning("adapters", f"{found}, {each}", fix)
        if plan and not isinstance(plan, EngineError) and size > plan.slot_pool:
            fix = f"LORIKEET_ADAPTER_GPU_MEMORY={wanted}MiB holds four of that size"
            pool = show_size(plan.slot_pool)
            yield problem("adapters", f"{found}, the slot pool has {pool}", fix)


def _check_ranks(planned: PlannedStart, versions: list[VersionRecord]) -> Iterator[Finding]:
    highest = max((version.max_rank for version in versions), default=0)
    if highest > planned.settings.max_rank:
        yield problem(
            "adapters",
            f"one has rank {highest}, but LORIKEET_MAX_RANK is {planned.settings.max_rank}",
            f"LORIKEET_MAX_RANK={highest}",
        )
