"""Catalog of the demo's tenants, keys and adapters."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from demo.tasks import TASKS, Task
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.cli.serve.keys import KeyFiles, open_or_make_catalog
from lorikeet.errors import InvalidSetting
from lorikeet.gateway.admin.blob_validation import validate_blob
from lorikeet.gateway.services import read_base_models
from lorikeet.settings import Settings
from lorikeet_engine.adapter_format import AdapterLimits, write_blob

ADAPTERS = Path(__file__).parent / "adapters"
_ACTOR = "demo"


@dataclass(frozen=True)
class DemoKeys:
    """Secrets made with the catalog; kept in files only because this is a demo."""

    admin: str
    tenants: dict[str, str]


def fill_catalog(settings: Settings, keys_folder: Path) -> DemoKeys:
    """Make the demo's catalog if there is none; return its keys, kept in `keys_folder`.

    Raises InvalidSetting if there is a catalog that is not the demo's, or without its keys.
    """
    catalog = open_or_make_catalog(settings.catalog)
    keys = KeyFiles(catalog, keys_folder)
    if catalog.reader.ask(lambda state: state.tenants()) and not keys.admin_file.exists():
        raise InvalidSetting(
            f"there is a catalog at {settings.catalog}, but the demo's keys are not in "
            f"{keys_folder}: start your own service with `lorikeet serve`, or `make clean` to "
            "begin anew"
        )
    tenants = dict.fromkeys(task.tenant for task in TASKS)
    demo_keys = DemoKeys(keys.admin(), {tenant: keys.tenant(tenant) for tenant in tenants})
    there = {record.label for record in catalog.reader.ask(lambda state: state.adapters())}
    for task in TASKS:
        if f"{task.tenant}/{task.name}" not in there:  # missing after an interrupted start
            _register(catalog, settings, task)
    return demo_keys


def _register(catalog: AdapterCatalog, settings: Settings, task: Task) -> None:
    limits = AdapterLimits(settings.max_rank, settings.max_adapter_bytes)
    with tempfile.TemporaryDirectory() as folder:
        blob = Path(folder) / "blob"
        write_blob(ADAPTERS / task.tenant / task.name, blob)
        facts = validate_blob(blob, read_base_models(settings), limits)
        catalog.register(
            task.tenant, task.name, blob, facts, shared=task.shared or None, actor=_ACTOR
        )
