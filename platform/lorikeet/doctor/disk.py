"""The disk cache's folder."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lorikeet.doctor.finding import Finding, ok, problem
from lorikeet.doctor.planned_start import PlannedStart
from lorikeet.sizes import show_size


def check_disk(planned: PlannedStart) -> Iterator[Finding]:
    """Whether it can be written to, and has room for what the cache may take."""
    folder, wanted = planned.settings.cache_dir, planned.settings.adapter_disk
    there = _existing(folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield problem(
            "disk cache",
            f"{folder} cannot be written: {there} is {_whose(there)}",
            f"`chown {os.getuid()} {there}`, or set LORIKEET_CACHE_DIR to another folder",
        )
        return
    free, used = shutil.disk_usage(there).free, _used(folder)
    found = f"{folder}: {show_size(wanted)} wanted, "
    found += f"{show_size(used)} used and {show_size(free)} free"
    if free + used < wanted:
        most = (free + used) * 9 // 10 >> 20
        fix = f"LORIKEET_ADAPTER_DISK={most}MiB, or " if most else ""
        fix += "LORIKEET_CACHE_DIR on a larger disk"
        yield problem("disk cache", found, fix)
    else:
        yield ok("disk cache", found)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())


def _whose(path: Path) -> str:
    return f"user {path.stat().st_uid}'s" if path.is_dir() else "no folder"


def _used(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
