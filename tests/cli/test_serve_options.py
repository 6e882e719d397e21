"""Options of `lorikeet serve`: every setting is one, and --print-env shows what they set."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from lorikeet.cli import app
from lorikeet.cli.serve.command import ServeCommand
from lorikeet.cli.serve.environment import with_free_ports
from lorikeet.cli.serve.options import flags
from lorikeet.doctor.environment import check_ray_variables
from lorikeet.doctor.finding import Severity
from lorikeet.doctor.planned_start import PlannedStart
from lorikeet.settings import Settings
from tests.cli.fake_hub import running_hub

DEMO = Path(__file__).parents[2] / "demo" / "model"
OTHERWISE = {
    "catalog": "s3://bucket/prefix",
    "max_replicas": "7",
    "admin_address": "127.0.0.1:9001",
    "device": "cpu",
    "dtype": "float16",
    "weight_dtype": "fp8",
    "kv_dtype": "fp8",
    "state_dtype": "bfloat16",
    "adapter_dtype": "float16",
    "generation_config": "none",
    "cache_dir": "/nvme/cache",
    "import_from": "s3://bucket/training",
    "audit_log": "stdout",
    "speculation": "lookup",
    "tinker": "true",
    "moving_border": "true",
    "oidc": "issuer=https://id.example,audience=lorikeet,jwks=https://id.example/keys",
    "prices": "acme/support=0.3/0.06/1.2",
    "otlp_traces_endpoint": "http://collector:4318",
    "traces_sampling_ratio": "0.25",
}
"""Values other than the default of settings that are not whole numbers."""


def serve(*arguments: str, **environment: str | None) -> Result:
    """Run the command; a variable of None is unset."""
    given = {"RAY_ADDRESS": None, "LORIKEET_ADMIN_KEY": "", "LORIKEET_SERVER": ""} | environment
    return CliRunner().invoke(app, ["serve", *arguments], env=given, prog_name="lorikeet")


def variables(*arguments: str, **environment: str | None) -> dict[str, str]:
    result = serve(*arguments, "--print-env", "--json", **environment)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.mark.parametrize("name", [name for name in Settings.model_fields if name != "base_models"])
def test_every_setting_is_an_option(name: str) -> None:
    value = OTHERWISE.get(name, "3")
    beside = {"LORIKEET_KV_HOST_MEMORY": "1GiB"} if name == "kv_disk" else {}
    for flag in flags(name):
        found = variables(str(DEMO), flag, value, **beside)
        assert found[f"LORIKEET_{name.upper()}"] == value


def test_an_option_beats_a_variable_and_a_variable_the_default() -> None:
    assert variables(str(DEMO))["LORIKEET_REPLICAS"] == "1"
    assert "LORIKEET_REPLICAS" not in variables(str(DEMO), LORIKEET_REPLICAS="4")  # it stays
    assert (
        variables(str(DEMO), "--replicas", "2", LORIKEET_REPLICAS="4")["LORIKEET_REPLICAS"] == "2"
    )


@pytest.mark.parametrize(
    ("given", "set_to"), [("4bit", "packed"), ("a=4bit,b=fp8", "a=packed,b=fp8"), ("nf4", "nf4")]
)
def test_weights_of_4bit_are_those_of_the_checkpoint(given: str, set_to: str) -> None:
    found = variables(f"a={DEMO}", f"b={DEMO}", "--weights", given)
    assert found["LORIKEET_WEIGHT_DTYPE"] == set_to


def test_port_and_host_are_set_for_the_tenants_listener() -> None:
    found = variables(str(DEMO), "--port", "9000", "--host", "0.0.0.0")
    assert (found["PORT"], found["RAY_SERVE_DEFAULT_HTTP_HOST"]) == ("9000", "0.0.0.0")


def test_ray_is_given_all_that_doctor_wants_and_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    found = variables(str(DEMO), RAY_ADDRESS="10.0.0.1:6379", RAY_worker_niceness="-5")
    assert "RAY_ADDRESS" not in found
    assert "RAY_worker_niceness" not in found, "the user's own value stays"
    environ = found | {"RAY_worker_niceness": "-5"}
    (finding,) = check_ray_variables(PlannedStart(environ))
    assert finding.severity is Severity.OK
    assert found["RAY_AUTH_MODE"] == "token"


def test_a_shell_can_read_the_printed_variables(tmp_path: Path) -> None:
    folder = tmp_path / "it's a model"
    folder.mkdir()
    lines = serve(str(folder), "--print-env").stdout
    script = f'{lines}\necho "$LORIKEET_BASE_MODELS"'
    said = subprocess.check_output(["bash", "-c", script], text=True)
    assert said == f"it-s-a-model={folder}\n"


def test_nothing_is_made_by_printing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    variables(str(DEMO))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "there is no folder nowhere: give the folder of a base model"),
        ([__file__], "is no folder: give the folder of a base model"),
        (
            [str(DEMO.parent / "adapters/quillon/upper")],
            "upper is an adapter: give its base model, and --adap",
        ),
        ([str(DEMO), "other=nowhere"], "there is no folder nowhere"),
        (
            [str(DEMO), str(DEMO)],
            "two base models are named 'model': name one of them, as in other=",
        ),
        ([str(DEMO), "--replicas", "many"], "LORIKEET_REPLICAS='many'"),
        ([str(DEMO), "--replicas", ""], "LORIKEET_REPLICAS is set but empty"),
        ([str(DEMO), "--catalog", "gs://bucket"], "want a folder or s3://bucket/prefix"),
        ([str(DEMO), "--adapters", "nowhere"], "there is no folder or file 'nowhere'"),
        ([str(DEMO), "--adapters", "./nowhere/*"], "no folder matches ./nowhere/*"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = serve(*arguments)
    assert result.exit_code == 1
    assert said in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "want a base model"),
        ([str(DEMO), "--adapters"], "requires an argument"),
        ([str(DEMO), "--adapters", "--detach"], "want at least one adapter"),
        ([str(DEMO), "--replica", "2"], "--replica"),
        ([str(DEMO), "--tenant", "A B"], "want 1 to 64 of a-z"),
    ],
)
def test_wrong_usage_is_named(arguments: list[str], said: str) -> None:
    result = serve(*arguments, LORIKEET_BASE_MODELS=None)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


def test_adapters_takes_all_words_up_to_the_next_option() -> None:
    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert isinstance(command, ServeCommand)
    words = ["m", "--adapters", "a", "b", "--port", "1", "n", "--adapters", "c", "--detach", "o"]
    given = command.make_context("serve", words).params
    assert given["adapters"] == ["a", "b", "c"]
    assert given["models"] == ["m", "n", "o"]


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("Qwen3-0.6B", "Qwen3-0.6B"),
        ("hub/models--Qwen--Qwen3-0.6B/snapshots/5f5f", "Qwen3-0.6B"),
        ("my model (new)", "my-model-new-"),
    ],
)
def test_a_base_model_is_named_after_its_folder(tmp_path: Path, folder: str, name: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    found = variables(str(tmp_path / folder))["LORIKEET_BASE_MODELS"]
    assert found == f"{name}={tmp_path / folder}"


def test_the_current_folder_has_a_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path / "tiny")
    assert variables(".")["LORIKEET_BASE_MODELS"] == "tiny=."


def download(folder: Path, home: Path, repository: str) -> subprocess.CompletedProcess[str]:
    """Serve a repository of a Hub that holds acme/tiny; print the variables."""
    with running_hub({"acme/tiny": folder}) as hub:
        return subprocess.run(
            [sys.executable, "-m", "lorikeet", "serve", repository, "--print-env"],
            env={"PATH": "", "PYTHONPATH": ":".join(sys.path), "HF_ENDPOINT": hub.url}
            | {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "COLUMNS": "400"},
            capture_output=True,
            text=True,
            check=False,
        )


def test_a_repository_is_downloaded_without_files_that_no_engine_reads(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    (folder / "original").mkdir(parents=True)
    wanted = ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"]
    for name in (
        *wanted,
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/a.safetensors",
    ):
        (folder / name).write_text("{}")
    done = download(folder, tmp_path / "home", "acme/tiny")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if "BASE_MODELS" in line)
    name, _, there = shlex.split(line)[1].removeprefix("LORIKEET_BASE_MODELS=").partition("=")
    assert name == "tiny"
    assert sorted(path.name for path in Path(there).rglob("*")) == sorted(wanted)


def test_an_unknown_repository_is_named_with_what_was_looked_up(tmp_path: Path) -> None:
    done = download(tmp_path, tmp_path / "home", "acme/other")
    assert done.returncode == 1
    assert "acme/other (there is no such folder, so it is looked up on the Hugging" in done.stderr
    assert "there is no such repository, or it is private" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def taken() -> Mapping[str, socket.socket]:
    """Sockets that listen at the usual ports, as far as the machine lets them."""
    found = {}
    for port in ("8000", "8001"):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", int(port)))
            listener.listen()
        except OSError:
            pass  # another program has taken it, which does as well
        found[port] = listener
    yield found
    for listener in found.values():
        listener.close()


@pytest.mark.usefixtures("taken")
def test_taken_usual_ports_are_replaced_by_free_ones(capsys: pytest.CaptureFixture[str]) -> None:
    found = with_free_ports({})
    public, admin = int(found["PORT"]), int(found["LORIKEET_ADMIN_ADDRESS"].partition(":")[2])
    assert len({public, admin, 8000, 8001}) == 4
    for port in (public, admin):
        with socket.create_server(("127.0.0.1", port)):
            pass
    said = capsys.readouterr().err
    assert f"Port 8000 is taken: tenants use {public}." in said
    assert f"Port 8001 is taken: administrators use {admin}." in said


@pytest.mark.usefixtures("taken")
def test_named_ports_stay_for_doctor_to_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    named = {"PORT": "8000", "LORIKEET_ADMIN_ADDRESS": "127.0.0.1:8001"}
    assert with_free_ports(named) == named
    assert capsys.readouterr().err == ""


def test_a_named_port_is_not_given_to_the_other_listener(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = with_free_ports({"PORT": "8001"})
    assert found["PORT"] == "8001"
    assert found["LORIKEET_ADMIN_ADDRESS"] != "127.0.0.1:8001"
    assert "administrators use" in capsys.readouterr().err


def test_the_help_shows_common_options_before_further_settings() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "80"}).stdout
    common, further = shown.split("Further settings")
    for flag in (
        "--adapters",
        "--catalog",
        "--port",
        "--replicas",
        "--tensor-parallel",
        "--weights",
    ):
        assert flag in common
    known = set(re.findall(r"--[a-z0-9-]+", common + further))
    assert {
        flag for name in Settings.model_fields if name != "base_models" for flag in flags(name)
    } <= known
