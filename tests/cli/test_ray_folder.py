"""Folder that `lorikeet serve` gives Ray: private to the user, or refused with a remedy."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorikeet.cli.serve.environment import make_ray_folder, service_environment
from lorikeet.errors import InvalidSetting


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder path of a user id that no machine has."""
    made_up = 2**31 + os.getpid()
    monkeypatch.setattr(os, "getuid", lambda: made_up)
    path = Path(f"/tmp/lorikeet-{made_up}")
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("/nonexistent")])
def test_a_ray_folder_path_taken_by_a_file_is_refused(path: Path, make) -> None:
    make(path)
    with pytest.raises(InvalidSetting, match="not a folder of yours alone"):
        make_ray_folder(service_environment({}))


def test_a_given_ray_folder_is_left_alone(path: Path, tmp_path: Path) -> None:
    make_ray_folder(service_environment({"RAY_TMPDIR": str(tmp_path / "own")}))
    assert not path.exists()
    assert not (tmp_path / "own").exists()
