"""What is in the catalog: whether there is one, who may change it, and whether it can be served."""

import time
from collections.abc import Iterator
from pathlib import Path

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import Scope, VersionRecord
from lorikeet.catalog.state import CatalogState
from lorikeet.catalog.store import open_store
from lorikeet.doctor.finding import Finding, ok, problem, warning
from lorikeet.doctor.site import Site
from lorikeet.doctor.sizes import shown
from lorikeet.errors import LorikeetError
from lorikeet.tenancy import authenticate
from lorikeet_engine.errors import EngineError


def check_catalog(site: Site) -> Iterator[Finding]:
    """Whether there is one, with an admin's key; and whether LORIKEET_ADMIN_KEY is one."""
    catalog = _open(site)
    if catalog is None:
        url = site.settings.catalog
        yield problem("catalog", f"there is no catalog at {url}", "lorikeet init")
        return
    yield ok("catalog", f"at entry {catalog.refresh().seq}")
    yield _check_keys(catalog.state, site.settings.catalog)
    secret = site.environ.get("LORIKEET_ADMIN_KEY")
    if secret:
        yield catalog.ask(lambda state: _check_secret(state, secret))


def check_adapters(site: Site) -> Iterator[Finding]:
    """Whether arenas hold the largest adapter, and all base models are served."""
    catalog = _open(site)
    if catalog is None:
        return
    catalog.refresh()
    versions = catalog.ask(_usable)
    served = site.settings.base_models
    strangers = {v.base_model for v in versions if v.base_model not in served}
    if strangers:
        yield warning(
            "adapters",
            f"some are of {', '.join(sorted(strangers))}, which is not served: requests for them "
            "are refused",
            "add to LORIKEET_BASE_MODELS, under that name",
        )
    mine = [version for version in versions if version.base_model in served]
    faults = [*_check_sizes(site, mine), *_check_ranks(site, mine)]
    yield from faults or [ok("adapters", f"{len(mine):,} versions fit arena and slot pool")]


def _open(site: Site) -> AdapterCatalog | None:
    """None where there is none yet. Raises StoreError."""
    url = site.settings.catalog
    if "://" not in url and not Path(url).is_dir():
        return None
    store = open_store(url)
    return None if store.first("log/") is None else AdapterCatalog(store)


def _check_keys(state: CatalogState, url: str) -> Finding:
    if state.admin_keys():
        return ok("admin key", f"{len(state.admin_keys())} work and never expire")
    return problem(
        "admin key",
        "no admin's key works: nobody could change anything",
        f"an init was broken off: remove {url} and run `lorikeet init`",
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
    return ok("admin key", "LORIKEET_ADMIN_KEY works")


def _usable(state: CatalogState) -> list[VersionRecord]:
    return [
        version
        for adapter in state.adapters()
        for version in adapter.versions
        if not version.retired
    ]


def _check_sizes(site: Site, versions: list[VersionRecord]) -> Iterator[Finding]:
    largest: dict[str, int] = {}
    for version in versions:
        name = version.base_model
        largest[name] = max(largest.get(name, 0), version.image_bytes)
    for name, size in largest.items():
        plan, arena = site.plans[name], site.settings.adapter_host_memory
        found = f"the largest adapter of {name} takes {shown(size)}"
        if size > arena:
            cure = f"LORIKEET_ADAPTER_HOST_MEMORY={4 * size >> 20}MiB"
            yield problem("adapters", f"{found}, the host arena has {shown(arena)}", cure)
        if not isinstance(plan, EngineError) and size > plan.slot_pool:
            cure = f"LORIKEET_ADAPTER_GPU_MEMORY={4 * size >> 20}MiB"
            yield problem("adapters", f"{found}, the slot pool has {shown(plan.slot_pool)}", cure)


def _check_ranks(site: Site, versions: list[VersionRecord]) -> Iterator[Finding]:
    highest = max((version.max_rank for version in versions), default=0)
    if highest > site.settings.max_rank:
        yield problem(
            "adapters",
            f"one has rank {highest}, and LORIKEET_MAX_RANK is {site.settings.max_rank}",
            f"LORIKEET_MAX_RANK={highest}",
        )
