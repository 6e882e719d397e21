"""What holds for the project as a whole."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lorikeet.settings import Settings

ROOT = Path(__file__).parents[1]


def test_platform_is_no_package_or_it_would_shadow_the_standard_librarys():
    assert not (ROOT / "platform" / "__init__.py").exists()


@pytest.mark.parametrize(
    "module",
    [
        "lorikeet_engine",
        "lorikeet_engine.adapter",
        "lorikeet_engine.adapter_format",
        "lorikeet_engine.traffic",
        "lorikeet_engine.request",
        "lorikeet_engine.residency.eviction",
        "lorikeet.gateway.app",
        "lorikeet.cli",
        "lorikeet.placement.plan",
        "lorikeet.placement.prefetching",
        "lorikeet.placement.scaling",
        "lorikeet.routing.fleet",
        "lorikeet.simulator.outcome",
    ],
)
def test_what_needs_no_tensors_loads_no_torch_no_ray_and_no_telemetry(module):
    heavy = {"torch", "ray", "opentelemetry.sdk"}
    code = f"import sys, {module}; print({heavy} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


def test_documents_name_no_setting_that_there_is_not():
    known = {f"LORIKEET_{field.upper()}" for field in Settings.model_fields}
    known |= {"LORIKEET_", "LORIKEET_ADMIN_KEY", "LORIKEET_SERVER"}
    log = ROOT / "docs" / "log.md"  # tells of what was
    for document in {ROOT / "README.md", *(ROOT / "docs").glob("*.md")} - {log}:
        named = set(re.findall(r"LORIKEET_[A-Z_]*", document.read_text()))
        assert named <= known, document.name


def test_every_file_that_the_architecture_names_exists():
    text = (ROOT / "docs" / "architecture.md").read_text()
    homes = [
        ROOT,
        ROOT / "engine",
        ROOT / "platform" / "lorikeet",
        ROOT / "engine" / "lorikeet_engine",
        ROOT / "engine" / "lorikeet_engine" / "residency",
    ]
    named = set(re.findall(r"`([a-z_/]+\.py)`", text))
    missing = [name for name in named if not any((home / name).exists() for home in homes)]
    assert missing == []
