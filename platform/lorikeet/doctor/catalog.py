"""The catalog: its store, whether there is one, who may change it, and whether it can be served."""

import time
from collections.abc import Iterator
from pathlib import Path

from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.records import Scope
from lorikeet.catalog.state import CatalogState
from lorikeet.catalog.store.object_store import open_store
from lorikeet.doctor.adapters import check_adapters
from lorikeet.doctor.finding import Finding, ok, problem, warning
from lorikeet.doctor.planned_start import PlannedStart
from lorikeet.doctor.store import check_writes, unusable
from lorikeet.errors import InvalidSetting, LorikeetError, StoreError
from lorikeet.gateway.auth import authenticate


def check_catalog(planned: PlannedStart) -> Iterator[Finding]:
    """From its store to its adapters, as far as the way is open."""
    url = planned.settings.catalog
    missing = problem("catalog", f"there is no catalog at {url}", "lorikeet init")
    if "://" not in url and not Path(url).exists():
        yield missing
        return
    try:
        store = open_store(url)
        empty = store.first("log/") is None
    except InvalidSetting as error:
        yield problem("store", error.message, "correct LORIKEET_CATALOG")
        return
    except StoreError as error:
        yield unusable(url, error)
        return
    yield from check_writes(store)
    if empty:
        yield missing
        return
    catalog = CatalogReader(store)
    yield ok("catalog", f"at entry {catalog.refresh().seq}")
    yield catalog.ask(lambda state: _check_keys(state, url))
    secret = planned.environ.get("LORIKEET_ADMIN_KEY")
    if secret:
        yield catalog.ask(lambda state: _check_secret(state, secret))
    yield from check_adapters(planned, catalog)


def _check_keys(state: CatalogState, url: str) -> Finding:
    if count := len(state.admin_keys()):
        return ok("admin key", f"{count} that never {'expires' if count == 1 else 'expire'}")
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
    return ok("admin key", "LORIKEET_ADMIN_KEY is one")
