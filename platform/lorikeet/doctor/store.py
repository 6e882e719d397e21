"""Checks of the catalog's object store: reads, writes, conditional writes, clock."""

import os
import time
import uuid
from collections.abc import Iterator

from lorikeet.catalog.store.conditional_writes import REMEDY, check_conditional_writes
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.doctor.finding import Finding, ok, problem, warning
from lorikeet.errors import StoreError

_SKEW_S = 5.0
"""Seconds by which the store's clock may differ from this machine's without a warning.

Keys and pins expire by the gateways' clocks; garbage collection uses the store's clock.
"""
_MOST_SKEW_S = 300.0
_NO_CACHE = "take out the proxy or cache in front of the store that changes answers"


def check_writes(store: ObjectStore) -> Iterator[Finding]:
    """Check writing, reading and conditional writes with a test object, and remove the object."""
    key = f"doctor-{uuid.uuid4().hex}"
    try:
        yield from _write(store, key)
    finally:
        yield from _remove(store, key)


def unusable(url: str, error: StoreError) -> Finding:
    """Make a finding that the store cannot be read or written."""
    fix = (
        "check LORIKEET_CATALOG, AWS_ENDPOINT_URL_S3, AWS_REGION, the network, and that your "
        "credentials may list, get, put and delete: `aws s3 ls BUCKET`"
        if "://" in url
        else f"check the folder's owner, mode and space; you are user {os.getuid()}"
    )
    return problem("store", error.message, fix)


def _write(store: ObjectStore, key: str) -> Iterator[Finding]:
    written = key.encode()
    try:
        before = time.time()
        store.put_if_absent(key, written)
        skew_s = _skew_s(store.modified(key), before, time.time())
        read = store.get(key)
    except StoreError as error:
        yield unusable(store.url, error)
        return
    if read != written:
        yield problem("store", f"{store.url} returns bytes that were not written", _NO_CACHE)
        return
    yield ok("store", f"{store.url} can be read and written")
    yield _check_conditional(store)
    yield _check_clock(skew_s)


def _check_conditional(store: ObjectStore) -> Finding:
    try:
        check_conditional_writes(store)
    except StoreError as error:
        return problem("conditional writes", error.message.removesuffix(f": {REMEDY}"), REMEDY)
    return ok("conditional writes", "the store refused the second of two, as it must")


def _skew_s(stored: float, before: float, after: float) -> float:
    """Return a lower bound of the store's lead over this clock, in seconds; negative: it lags.

    stored: the test object's time by the store's clock; S3 rounds to whole seconds.
    before, after: times before and after the write, by this clock.
    """
    return max(0.0, stored - after) - max(0.0, before - 1 - stored)


def _check_clock(skew_s: float) -> Finding:
    found = f"this machine's clock and the store's differ by {abs(skew_s):.0f} s"
    fix = "set the clock by NTP: `timedatectl set-ntp true`, or chrony"
    if abs(skew_s) > _MOST_SKEW_S:
        return problem("clock", found, fix)
    return warning("clock", found, fix) if abs(skew_s) > _SKEW_S else ok("clock", found)


def _remove(store: ObjectStore, key: str) -> Iterator[Finding]:
    try:
        store.delete(key)
    except StoreError as error:
        found = f"the test object {key} could not be deleted from {store.url}: {error.message}"
        yield warning("store", found, "allow s3:DeleteObject; `lorikeet gc` needs it too")
