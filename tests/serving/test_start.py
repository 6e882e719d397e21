"""`serve run serve_app:app`: refused starts, failed ones, and their exit status."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import ray
from ray import serve

from lorikeet.serving import start
from lorikeet.serving.run import main
from lorikeet.serving.start import guard_start, run_or_exit

ROOT = Path(__file__).parents[2]
APP = object()


@pytest.fixture
def shut_down(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-in for Ray with two CPUs; the calls of serve.shutdown."""
    calls: list[str] = []
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(serve, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(start, "_serve_run", fails)
    return calls


def fails(*_: object, **__: object) -> None:
    raise RuntimeError("Deploying application default failed: why")


@pytest.mark.parametrize("joins", [True, False])
def test_a_failed_start_ends_with_status_1_and_its_reason(
    shut_down: list[str], capsys: pytest.CaptureFixture[str], joins: bool
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_or_exit(APP, joins=joins, blocking=True)  # type: ignore[arg-type]
    assert ended.value.code == 1
    assert "did not start: Deploying application default failed: why" in capsys.readouterr().err
    assert shut_down == (["shutdown"] if joins else [])


def test_ctrl_c_is_no_failed_start(shut_down: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "_serve_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_or_exit(APP, joins=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("LORIKEET_REPLICAS", "12", "2.65 CPUs, Ray has 2"),
        ("LORIKEET_GATEWAYS", "12", "2.85 CPUs, Ray has 2"),
        ("LORIKEET_DEVICE", "cuda", "2 GPUs, Ray has 0"),
    ],
)
def test_resources_that_are_not_there_end_a_start_and_are_named_in_a_cluster_that_may_grow(
    shut_down: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
    said: str,
) -> None:
    monkeypatch.setattr(start, "_serve_run", lambda *_, **__: None)
    run_or_exit(APP, joins=False)  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""
    monkeypatch.setenv(name, value)
    run_or_exit(APP, joins=True)  # type: ignore[arg-type]
    assert f"waits for resources: the deployments reserve {said}." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_or_exit(APP, joins=False)  # type: ignore[arg-type]
    assert f"reserve {said}: lower LORIKEET_REPLICAS" in capsys.readouterr().err


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Ports for which a start was checked."""
    ports: list[int] = []
    monkeypatch.setattr(start, "refuse_bad_start", ports.append)
    monkeypatch.setattr(serve, "run", serve.run)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return ports


def imported_by(command: str, **options: object) -> None:
    context = click.Context(click.Command(command), info_name=command)
    context.params |= options
    with context:
        guard_start()


def test_serve_run_checks_the_start_and_watches_it(checked: list[int]) -> None:
    imported_by("run", address=None)
    assert checked == [8000]
    assert isinstance(serve.run, partial)


def test_a_start_in_a_ray_that_runs_is_watched_only(checked: list[int], tmp_path: Path) -> None:
    imported_by("run", address="10.0.0.1:6379")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:6379")  # by `ray start`
    imported_by("run", address=None)
    assert checked == []
    assert isinstance(serve.run, partial)
    imported_by("run", address="local")
    assert checked == [8000]


def test_other_importers_are_left_alone(checked: list[int]) -> None:
    before = serve.run
    guard_start()
    imported_by("build")
    assert checked == []
    assert serve.run is before


def test_serve_run_with_a_wrong_setting_ends_at_once_with_status_1(tmp_path: Path) -> None:
    ended = subprocess.run(
        [Path(sys.executable).with_name("serve"), "run", "--address", "local", "serve_app:app"],
        cwd=ROOT,
        env={
            **os.environ,
            "LORIKEET_CATALOG": str(tmp_path / "catalog"),
            "LORIKEET_ADMIN_ADDRESS": "127.0.0.1:0x1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    assert "LORIKEET_ADMIN_ADDRESS='127.0.0.1:0x1': want host:port" in ended.stderr
    assert "The service was not started" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_ray_that_does_not_start_is_one_sentence_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "init", fails)
    monkeypatch.setitem(sys.modules, "lorikeet.serving.application", SimpleNamespace(app=None))
    with pytest.raises(SystemExit, match=r"^Ray did not start: .* why\nTry again"):
        main("127.0.0.1", 8000)
