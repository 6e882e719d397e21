"""The command gc: collects garbage directly in the store, so that only its user needs credentials
to delete blobs.
"""

import time
from typing import Annotated

import typer

from lorikeet import batch_store, file_store, response_store
from lorikeet.catalog.garbage_collection import GarbageCollector
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.store.object_store import open_store
from lorikeet.cli.output import AsJson, moment, print_json, print_line, print_table
from lorikeet.settings import Settings
from lorikeet.sizes import show_size
from lorikeet.usage.compaction import clean_up

_HOUR_S, _DAY_S = 3600.0, 86400.0


def gc(
    grace_days: Annotated[
        float,
        typer.Option(min=1, help="Keep objects written or retired within this many days."),
    ] = 7,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing, only list.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete unneeded objects from the catalog's store.

    It deletes blobs of no version, abandoned uploads, old snapshots, expired files, batches older
    than 60 days and, if LORIKEET_RESPONSES_LIFETIME_H is set, older stored responses. A version
    retired longer ago than --grace-days loses its blob and cannot be restored. It also joins the
    usage of each finished day into one object. Run it once a day, with the service's
    LORIKEET_CATALOG and credentials that may delete there.

    Example: `LORIKEET_CATALOG=s3://my-bucket/lorikeet lorikeet gc --dry-run`
    """
    settings = Settings.from_env()
    catalog = CatalogReader(open_store(settings.catalog))
    collector = GarbageCollector(catalog, grace_days * _DAY_S, dry_run=dry_run)
    superseded = clean_up(catalog.store, time.time, dry_run=dry_run)
    found = [*collector.collect(), *superseded]
    if settings.responses_lifetime_h is not None:
        lifetime_s = settings.responses_lifetime_h * _HOUR_S
        found += response_store.clean_up(catalog.store, lifetime_s, time.time(), dry_run=dry_run)
    found += batch_store.clean_up(catalog.store, time.time(), dry_run=dry_run)
    found += file_store.clean_up(catalog.store, time.time(), dry_run=dry_run)
    total = sum(one.size_bytes for one in found)
    if as_json:
        objects = [
            {"key": one.key, "size_bytes": one.size_bytes, "modified": one.modified}
            for one in found
        ]
        print_json({"deleted": not dry_run, "size_bytes": total, "objects": objects})
        return
    rows = [(one.key, show_size(one.size_bytes), moment(one.modified)) for one in found]
    print_table(("object", "#size", "written"), rows, empty="There is no garbage.")
    if found:
        verb = "would be deleted" if dry_run else "deleted"
        print_line(f"{len(found)} {verb}, {show_size(total)} in all.")
