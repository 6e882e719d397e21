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
        "lorikeet_engine.popularity",
        "lorikeet_engine.request",
        "lorikeet_engine.residency.eviction",
        "lorikeet.api.app",
        "lorikeet.cli",
        "lorikeet.placement.plan",
        "lorikeet.placement.prefetching",
        "lorikeet.placement.scaling",
        "lorikeet.routing.fleet",
        "lorikeet.simulator.outcome",
    ],
)
def test_what_needs_no_tensors_loads_no_torch_and_no_ray(module):
    code = f"import sys, {module}; print({{'torch', 'ray'}} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


def test_the_readme_names_every_setting_and_no_other():
    table = (ROOT / "README.md").read_text().split("## Serve your own model")[1]
    named = set(re.findall(r"LORIKEET_[A-Z_]+", table)) - {"LORIKEET_", "LORIKEET_ADMIN_KEY"}
    assert named == {f"LORIKEET_{field.upper()}" for field in Settings.model_fields}


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
