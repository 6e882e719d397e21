"""Pushed blobs of a killed gateway are removed from the disk."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lorikeet.errors import StoreError
from lorikeet.gateway.pushing.push_folders import PushFolders

KEEP = """
import sys, time
from pathlib import Path
from lorikeet.gateway.pushing.push_folders import BLOB, PushFolders

folder = PushFolders(Path(sys.argv[1])).make()
Path(folder.name, BLOB).write_bytes(b"pushed")
print(folder.name, flush=True)
time.sleep(60)
"""


def test_a_gateway_removes_folders_of_killed_gateways_only(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", KEEP, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        folder = Path(other.stdout.readline().strip())
        PushFolders(tmp_path)
        assert list(folder.iterdir())
        other.send_signal(signal.SIGKILL)
        other.wait()
        PushFolders(tmp_path)
        assert not list(tmp_path.iterdir())


def test_a_closed_gateway_leaves_no_folder(tmp_path: Path) -> None:
    folders = PushFolders(tmp_path / "cache" / "pushes")
    kept, gone = folders.make(), folders.make()
    gone.cleanup()
    assert [path.name for path in tmp_path.glob("cache/pushes/*/*/")] == [Path(kept.name).name]
    folders.close()
    assert not list(tmp_path.glob("cache/pushes/*"))


def test_a_removed_folder_is_made_anew(tmp_path: Path) -> None:
    folders = PushFolders(tmp_path)
    folders.make()
    for folder in tmp_path.iterdir():
        shutil.rmtree(folder)
    made = folders.make()
    PushFolders(tmp_path)
    assert Path(made.name).is_dir()
    folders.close()
    assert not list(tmp_path.iterdir())


def test_a_push_is_refused_if_its_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    folders = PushFolders(tmp_path / "cache")
    with pytest.raises(StoreError, match=f"no uploads in {tmp_path}/cache "):
        folders.make()
    folders.close()
