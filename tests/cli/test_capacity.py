"""`lorikeet capacity`: its files, its answers in words and as JSON, and nonsense."""

import json
import os
import pty
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lorikeet.cli import app
from lorikeet.cli.planning import capacity
from lorikeet.cli.planning.capacity_file import parse_needs
from lorikeet.simulator import forecast
from lorikeet.simulator.capacity import Capacity
from lorikeet.simulator.forecast import CapacityNeeds

ROOT = Path(__file__).parents[2]
QUICK = ["--adapters", "50", "--requests-per-s", "5", "--gpu-memory", "4GiB"]
QUICK += ["--ttft-p99-ms", "500"]
FILE = """
[traffic]
lengths = { prompt = [60, 120], answer = [30, 60] }
[[tenants]]
name = "crowd"
adapters = 300
ranks = [8, 16]
popularity = "zipf:0.8"
requests_per_s = 8
[[tenants]]
name = "rare"
adapters = 30
ranks = [16]
popularity = "uniform"
requests_per_s = 0.5
ttft_p99_ms = 45
[memory]
gpu = "3GiB"
host = "1GiB"
disk = "16GiB"
"""


@pytest.fixture(autouse=True, scope="module")
def _needs_planned_once() -> Iterator[None]:
    """Simulate equal needs once, because each answer takes seconds."""
    plan, planned = capacity.plan_capacity, dict[str, Capacity]()

    def plan_once(needs: CapacityNeeds, on_simulation: Callable[[int], None]) -> Capacity:
        key = repr(needs)
        if key not in planned:
            planned[key] = plan(needs, on_simulation)
        return planned[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity, "plan_capacity", plan_once)
        yield


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a third of the usual time."""
    monkeypatch.setattr(forecast, "_USUAL_S", 60.0)
    monkeypatch.setattr(forecast, "_REQUESTS_OF_TENANT", 30)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(
        app, ["capacity", *arguments], env={"COLUMNS": "120"}, prog_name="lorikeet"
    )


def written(folder: Path, text: str, name: str = "question.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_the_documented_example_gives_the_documented_answer(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "capacity.md").read_text()
    question = page.partition("```toml\n")[2].partition("```")[0]
    answer = page.partition("## Read the answer")[2].split("```")[1]
    result = run(written(tmp_path, question))
    shown = "\n".join(line.rstrip() for line in result.stdout.splitlines())
    assert shown == answer.strip(), f"it should be\n{shown}"


def test_options_can_replace_the_file() -> None:
    result = run(*QUICK)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("1 replica. One is enough.")
    assert "p99 to the first token" in result.stdout
    assert "of which pins take" not in result.stdout


@pytest.mark.usefixtures("short_runs")
def test_the_answer_names_the_tenants_to_pin(tmp_path: Path) -> None:
    result = run(written(tmp_path, FILE))
    assert result.exit_code == 0, result.stderr
    assert "`lorikeet pin rare --replicas" in result.stdout
    assert "lorikeet pin crowd" not in result.stdout
    assert "all requests" in result.stdout


@pytest.mark.usefixtures("short_runs")
def test_json_has_the_same_answer(tmp_path: Path) -> None:
    question = written(tmp_path, json.dumps(tomllib.loads(FILE)), "question.json")
    answer = json.loads(run(question, "--json").stdout)
    assert answer["expected"]["met"]
    assert not answer["without_pins"]["met"]
    assert list(answer["expected"]["pins"]) == ["rare"]
    assert answer["replicas"] == answer["expected"]["replicas"]
    (check,) = answer["expected"]["checks"]
    assert (check["tenant"], check["wanted"], check["met"]) == ("rare", 0.045, True)
    assert set(answer["expected"]["found"]) == {"gpu", "host", "disk", "remote"}


@pytest.mark.usefixtures("short_runs")
def test_replicas_of_several_gpus_are_counted_in_gpus_too(tmp_path: Path) -> None:
    shared = FILE.replace('host = "1GiB"', 'host = "2GiB"').replace('"16GiB"', '"32GiB"\ngpus = 2')
    shared += "[costs.steps]\n[costs.loads]\n"
    told = run(written(tmp_path, shared)).stdout
    answer = json.loads(run(written(tmp_path, shared), "--json").stdout)
    alone = json.loads(run(written(tmp_path, FILE), "--json").stdout)
    assert (answer["gpus"], alone["gpus"]) == (2 * answer["replicas"], alone["replicas"])
    assert f" of 2 GPUs each, {answer['gpus']} GPUs in all. " in told
    assert answer["expected"] == alone["expected"], "a GPU's part of the host is the same"


@pytest.mark.usefixtures("short_runs")
def test_a_kv_cache_of_few_tokens_needs_more_replicas(tmp_path: Path) -> None:
    long = FILE.replace("[60, 120], answer = [30, 60]", "[1000, 1100], answer = [200, 220]")
    long = long.replace("_per_s = 8", "_per_s = 4").replace("= 45", "= 900")
    few = long.replace("[memory]", "[memory]\nkv_tokens = 8192")
    told, less = (json.loads(run(written(tmp_path, text), "--json").stdout) for text in (few, long))
    assert told["replicas"] > less["replicas"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[memory]", "[costs.loads]\n[memory]\ngpus = 2", "want costs.steps, too"),
        ("[memory]", "[costs.steps]\n[memory]\ngpus = 2", "want costs.loads, too"),
        ("adapters = 300", "adapters = 0", "tenants.0.adapters=0"),
        ("adapters = 300", "adaptors = 300", "tenants.0.adaptors is not a known field"),
        ("requests_per_s = 8", "requests_per_s = 1e9", "less than or equal to 10000"),
        ('gpu = "3GiB"', "", "memory.gpu is missing"),
        ("[memory]", "[memory]\nkv_tokens = 8191", "want traffic.context=8192 or more"),
        ("[memory]", "[memory]\nkv_tokens = 0", "memory.kv_tokens=0"),
        ("[memory]", '[memory]\nkv_host = "1GiB"', "want memory.kv_tokens, too"),
        ("adapters = 300", "adapters = 300\nsystem_tokens = 4096", "less than half of"),
        ('gpu = "3GiB"', 'gpu = "much"', "want a size such as 512MiB"),
        ('"zipf:0.8"', '"zipf"', "want distinct, uniform, identical or zipf:<exponent>"),
        ("[60, 120]", "[120, 60]", "want [p50, p99], the smaller first"),
        ('"crowd"', '"rare"', "want each name once"),
        ('"crowd"', '"[red]"', "tenants.0.name='[red]'"),
        ("ttft_p99_ms = 45", "", "want a goal"),
        ("ttft_p99_ms = 45", "ttft_p99_ms = nan", "tenants.1.ttft_p99_ms"),
        ("[memory]", "[memory", "cannot be read"),
        ("ttft_p99_ms = 45", "ttft_p99_ms = 1", "no number of replicas meets p99 ≤ 1 ms"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    result = run(written(tmp_path, FILE.replace(old, new)))
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stdout == ""


def test_a_file_and_options_together_are_wrong_usage(tmp_path: Path) -> None:
    assert run().exit_code == 2
    result = run(written(tmp_path, FILE), *QUICK)
    assert result.exit_code == 2
    assert "not both" in result.stderr


def test_the_documented_file_is_accepted() -> None:
    text = (ROOT / "docs" / "capacity.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    needs = parse_needs(tomllib.loads(example), "docs/capacity.md")
    assert [tenant.name for tenant in needs.demand.tenants] == ["acme", "globex"]


def test_a_terminal_shows_the_simulated_fleet() -> None:
    ours, theirs = pty.openpty()
    main = "from lorikeet.cli import main; main()"
    subprocess.run(
        [sys.executable, "-c", main, "capacity", *QUICK],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"},
        check=True,
    )
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert "Simulating" in shown
