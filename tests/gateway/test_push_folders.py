"""Pushed blobs of a gateway that was killed do not stay on the disk."""

import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lorikeet.gateway.pushing.push_folders import PushFolders

KEEP = """
import sys, time
from pathlib import Path
from lorikeet.gateway.pushing.push_folders import BLOB, PushFolders

folder = PushFolders().make()
Path(folder.name, BLOB).write_bytes(b"pushed")
print(folder.name, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_gateway_removes_what_a_killed_one_left_and_nothing_of_one_that_lives() -> None:
    with subprocess.Popen([sys.executable, "-c", KEEP], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        folder = Path(other.stdout.readline().strip())
        PushFolders().close()
        assert list(folder.iterdir())
        other.send_signal(signal.SIGKILL)
        other.wait()
        PushFolders().close()
        assert not folder.parent.exists()


def test_a_gateway_that_ends_in_good_order_leaves_nothing(tmp_path: Path) -> None:
    folders = PushFolders()
    kept, gone = folders.make(), folders.make()
    gone.cleanup()
    assert [path.name for path in tmp_path.glob("*/*/")] == [Path(kept.name).name]
    folders.close()
    assert not list(tmp_path.iterdir())


def test_who_tidies_the_disk_does_not_end_pushes(tmp_path: Path) -> None:
    folders = PushFolders()
    for folder in tmp_path.iterdir():
        shutil.rmtree(folder)
    made = folders.make()
    PushFolders().close()
    assert Path(made.name).is_dir()
    folders.close()
    assert not list(tmp_path.iterdir())
