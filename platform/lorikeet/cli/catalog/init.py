"""The command init: makes a catalog, directly in its store."""

from typing import Annotated

import typer

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import Scope
from lorikeet.catalog.store.object_store import open_store
from lorikeet.cli.output import AsJson
from lorikeet.cli.tenancy.keys import print_secret
from lorikeet.errors import Conflict
from lorikeet.settings import Settings

_ACTOR = "init"

_IfAbsent = Annotated[
    bool, typer.Option("--if-absent", help="Do nothing if there is a catalog already.")
]


def init(if_absent: _IfAbsent = False, as_json: AsJson = False) -> None:
    """Make a catalog and its first admin key.

    The catalog is at LORIKEET_CATALOG, a folder or s3://bucket/prefix. The key is shown once.

    Example: `LORIKEET_CATALOG=s3://my-bucket/lorikeet lorikeet init`
    """
    store = open_store(Settings.from_env().catalog)
    try:
        catalog = AdapterCatalog.init(store)
    except Conflict:
        if if_absent:
            return
        raise
    record, secret = catalog.create_key(None, frozenset({Scope.ADMIN}), actor=_ACTOR)
    print_secret({"id": record.id, "key": secret}, as_json)
