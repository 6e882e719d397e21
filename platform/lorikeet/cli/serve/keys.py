"""Catalog of the service, and its first keys, kept in files that only the user can read."""

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import Scope
from lorikeet.catalog.state import CatalogState
from lorikeet.catalog.store.object_store import open_store
from lorikeet.cli.serve.running import STATE
from lorikeet.errors import Conflict, LorikeetError

ACTOR = "serve"
"""Author of the command's changes of the catalog."""


def open_or_make_catalog(url: str) -> AdapterCatalog:
    """Return the catalog at a folder or s3://bucket/prefix; make it if there is none.

    Raises InvalidSetting for another kind of URL, StoreError if the store fails.
    """
    store = open_store(url)
    try:
        return AdapterCatalog.init(store, actor=ACTOR)
    except Conflict:
        catalog = AdapterCatalog(store)
        catalog.reader.refresh()
        return catalog


def keys_folder(catalog_url: str) -> Path:
    """Return the folder for the keys of a catalog: .lorikeet/keys/catalog for .lorikeet/catalog,
    .lorikeet/keys/bucket-prefix for s3://bucket/prefix.
    """
    _, is_bucket, place = catalog_url.rpartition("://")
    name = place if is_bucket else Path(place).resolve().name
    return STATE / "keys" / re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-")


class KeyFiles:
    """Secret keys of one catalog, a file each: admin, and tenants/NAME.

    new: files that this process has written.
    """

    def __init__(self, catalog: AdapterCatalog, folder: Path) -> None:
        self._catalog, self._folder = catalog, folder
        self.new: list[Path] = []

    @property
    def admin_file(self) -> Path:
        """File of the admin's key."""
        return self._folder / "admin"

    def tenant_file(self, tenant: str) -> Path:
        """Return the file of a tenant's key."""
        return self._folder / "tenants" / tenant

    def admin(self) -> str:
        """Return the admin's key; make one if the folder has none that works."""
        return self._key(self.admin_file, None, Scope.ADMIN)

    def tenant(self, tenant: str) -> str:
        """Return a key of a tenant; make the tenant if it is missing, and a key if the folder has
        none that works.
        """
        if self._catalog.reader.ask(lambda state: state.tenant_state(tenant)) is None:
            with suppress(Conflict):  # another service has just made it
                self._catalog.create_tenant(tenant, actor=ACTOR)
        return self._key(self.tenant_file(tenant), tenant, Scope.INFER)

    def _key(self, file: Path, tenant: str | None, scope: Scope) -> str:
        secret = file.read_text().strip() if file.exists() else ""
        if not self._catalog.reader.ask(lambda state: _works(state, secret, tenant, scope)):
            name = f"lorikeet serve on {os.uname().nodename}"[:64]
            _, secret = self._catalog.create_key(tenant, {scope}, actor=ACTOR, name=name)
            _write_secret(file, secret)
            self.new.append(file)
        return secret


def _works(state: CatalogState, secret: str, tenant: str | None, scope: Scope) -> bool:
    from lorikeet.gateway.auth import authenticate  # which other commands do not need

    try:
        return authenticate(state, f"Bearer {secret}", scope, time.time()).tenant == tenant
    except LorikeetError:
        return False


def _write_secret(file: Path, text: str) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(text + "\n")
