"""Python and packages against what the installed Lorikeet asks for."""

import platform
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lorikeet.doctor.finding import Finding, ok, problem
from lorikeet.doctor.planned_start import PlannedStart

_PACKAGE = "lorikeet-serve"
_SHOWN = ("ray", "torch", "triton", "transformers")
_FIX = "pip install --constraint constraints.txt --editable ."


def check_versions(_: PlannedStart) -> Iterator[Finding]:
    """Whether all that pyproject.toml asks for is there."""
    about = metadata.metadata(_PACKAGE)
    python, wanted = platform.python_version(), about["Requires-Python"]
    if python not in SpecifierSet(wanted):
        yield problem(
            "versions", f"Python {python}: want {wanted}", "make a .venv with another Python"
        )
    lacking = list(_lacking(metadata.requires(_PACKAGE) or []))
    if lacking:
        yield problem("versions", "; ".join(lacking), _FIX)
    else:
        found = (f"{name} {metadata.version(name)}" for name in _SHOWN if _version(name))
        yield ok("versions", f"Python {python}, {', '.join(found)}")


def lacks(requirement: Requirement) -> str | None:
    """What is wrong with what is installed for it; None: nothing."""
    there = _version(requirement.name)
    if there is None:
        return f"{requirement.name} is not installed: want {requirement}"
    if not requirement.specifier.contains(there, prereleases=True):
        return f"{requirement.name} is {there}: want {requirement.specifier}"
    return None


def cuda_requirement(name: str) -> Requirement | None:
    """What Lorikeet's extra `cuda` asks for of a package."""
    for text in metadata.requires(_PACKAGE) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if requirement.name == name and marker is not None and marker.evaluate({"extra": "cuda"}):
            return requirement
    return None


def _lacking(requirements: list[str]) -> Iterator[str]:
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            lack = lacks(requirement)
            if lack is not None:
                yield lack


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
