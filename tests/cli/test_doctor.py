"""doctor prints its findings as text or JSON, and its exit status tells if there is a problem."""

import json
import socket
from pathlib import Path

from typer.testing import CliRunner, Result

from lorikeet.cli import app


def doctor(environment: dict[str, str], *options: str) -> Result:
    given = {"LORIKEET_ADMIN_KEY": "", "LORIKEET_SERVER": "", "COLUMNS": "100"} | environment
    return CliRunner().invoke(app, ["doctor", *options], env=given, prog_name="lorikeet")


def test_with_a_problem_it_cannot_start(tmp_path: Path) -> None:
    missing = {"LORIKEET_CATALOG": str(tmp_path / "catalog")}
    said = doctor(missing)
    assert said.exit_code == 1
    assert f"problem  catalog: there is no catalog at {tmp_path}/catalog" in said.stdout
    assert "→ correct LORIKEET_CATALOG, or `lorikeet init`" in said.stdout
    assert "It cannot start with these settings. Problems: " in said.stdout
    answer = json.loads(doctor(missing, "--json").stdout)
    assert answer["can_start"] is False
    assert {
        "check": "catalog",
        "severity": "problem",
        "message": f"there is no catalog at {tmp_path}/catalog",
        "fix": "correct LORIKEET_CATALOG, or `lorikeet init` for a new one",
    } in answer["findings"]


def test_a_misspelt_setting_is_a_finding_and_no_error() -> None:
    said = doctor({"LORIKEET_KV_CACHE_MEMROY": "1GiB"})
    assert (said.exit_code, said.stderr) == (1, "")
    assert "did you mean LORIKEET_KV_CACHE_MEMORY?" in said.stdout


def test_gpu_memory_plans_for_another_machines_gpus() -> None:
    said = doctor({"LORIKEET_DTYPE": "bfloat16"}, "--gpu-memory", "80GiB")
    assert "memory of lorikeet-demo: on each cuda: weights 4." in said.stdout
    wrong = doctor({}, "--gpu-memory", "much")
    assert wrong.exit_code == 2
    assert "want a size such as" in wrong.stderr


def test_the_port_of_make_serve_is_checked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = doctor({"PORT": str(port)})
    assert f"{port}, for the public listener, is taken" in said.stdout
