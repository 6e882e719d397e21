"""The catalog itself: making one, which needs no server since there is none yet, and snapshots."""

import typer

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import Scope
from lorikeet.catalog.store.object_store import open_store
from lorikeet.cli.admin_client import admin
from lorikeet.cli.output import AsJson, print_answer
from lorikeet.cli.tenancy.keys import print_secret
from lorikeet.settings import Settings

_ACTOR = "init"


def init(as_json: AsJson = False) -> None:
    """Make a catalog and its first admin key.

    The catalog is at LORIKEET_CATALOG, a folder or s3://bucket/prefix. The key is shown this once.

    Example: `LORIKEET_CATALOG=s3://my-bucket/lorikeet lorikeet init`
    """
    store = open_store(Settings.from_env().catalog)
    catalog = AdapterCatalog.init(store)
    record, secret = catalog.create_key(None, frozenset({Scope.ADMIN}), actor=_ACTOR)
    print_secret({"id": record.id, "key": secret}, as_json)


def snapshot(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Make a snapshot of the catalog now.

    One is made by itself every few hundred changes; gateways that start read it instead of the log.

    Example: `lorikeet snapshot`
    """
    answer = admin(ctx).post("/snapshots", {})
    print_answer(answer, f"There is a snapshot of entry {answer['seq']}.", as_json)
