"""Catalog of the demo's tenants, keys and adapters."""

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from demo.tasks import TASKS, Task
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import Scope
from lorikeet.catalog.store.object_store import open_store
from lorikeet.errors import Conflict, InvalidSetting
from lorikeet.gateway.admin.blob_validation import validate_blob
from lorikeet.gateway.services import read_base_models
from lorikeet.settings import Settings
from lorikeet_engine.adapter_format import AdapterLimits, write_blob

ADAPTERS = Path(__file__).parent / "adapters"
TENANT_KEYS = "demo-keys.json"
ADMIN_KEY = "admin-key"
_ACTOR = "demo"


@dataclass(frozen=True)
class DemoKeys:
    """Secrets made with the catalog; kept in files only because this is a demo."""

    admin: str
    tenants: dict[str, str]


def fill_catalog(settings: Settings, keys_folder: Path) -> DemoKeys:
    """Make the demo's catalog if there is none; return its keys, kept in `keys_folder`.

    Raises InvalidSetting if there is a catalog but not its keys.
    """
    store = open_store(settings.catalog)
    try:
        catalog = AdapterCatalog.init(store, actor=_ACTOR)
    except Conflict:
        catalog = AdapterCatalog(store)
        keys = _read_keys(settings, keys_folder)
    else:
        keys = _create_keys(catalog)
        _write_keys(keys, keys_folder)
    catalog.reader.refresh()
    there = {record.label for record in catalog.reader.ask(lambda state: state.adapters())}
    for task in TASKS:
        if f"{task.tenant}/{task.name}" not in there:  # missing after an interrupted start
            _register(catalog, settings, task)
    return keys


def _create_keys(catalog: AdapterCatalog) -> DemoKeys:
    _, admin = catalog.create_key(None, {Scope.ADMIN}, actor=_ACTOR)
    tenants = {}
    for tenant in dict.fromkeys(task.tenant for task in TASKS):
        catalog.create_tenant(tenant, actor=_ACTOR)
        _, tenants[tenant] = catalog.create_key(tenant, {Scope.INFER}, actor=_ACTOR)
    return DemoKeys(admin, tenants)


def _register(catalog: AdapterCatalog, settings: Settings, task: Task) -> None:
    limits = AdapterLimits(settings.max_rank, settings.max_adapter_bytes)
    with tempfile.TemporaryDirectory() as folder:
        blob = Path(folder) / "blob"
        write_blob(ADAPTERS / task.tenant / task.name, blob)
        facts = validate_blob(blob, read_base_models(settings), limits)
        catalog.register(
            task.tenant, task.name, blob, facts, shared=task.shared or None, actor=_ACTOR
        )


def _write_keys(keys: DemoKeys, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _write_secret(folder / TENANT_KEYS, json.dumps(keys.tenants, indent=2))
    _write_secret(folder / ADMIN_KEY, keys.admin)


def _write_secret(file: Path, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(text + "\n")


def _read_keys(settings: Settings, folder: Path) -> DemoKeys:
    try:
        tenants = json.loads((folder / TENANT_KEYS).read_text())
        return DemoKeys((folder / ADMIN_KEY).read_text().strip(), tenants)
    except (OSError, ValueError) as error:
        raise InvalidSetting(
            f"there is a catalog at {settings.catalog}, but its demo keys are not in {folder}: "
            "start your own service with `serve run serve_app:app`, or `make clean` to begin anew"
        ) from error
