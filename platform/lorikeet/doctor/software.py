"""Checks of the installed software: Python, packages, FlashInfer, compilers for kernels."""

import importlib.util
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lorikeet.doctor.finding import Finding, ok, problem
from lorikeet.doctor.planned_start import PlannedStart

_FLASHINFER = "flashinfer-python"
_PREBUILT = "flashinfer_jit_cache"
_PACKAGE = "lorikeet-serve"
_SHOWN = ("ray", "torch", "triton", "transformers")
_FIX = "pip install --constraint constraints.txt --editable ."


def check_versions(_: PlannedStart) -> Iterator[Finding]:
    """Check Python and the installed packages against pyproject.toml."""
    about = metadata.metadata(_PACKAGE)
    python, wanted = platform.python_version(), about["Requires-Python"]
    if python not in SpecifierSet(wanted):
        yield problem(
            "versions", f"Python is {python}: want {wanted}", "make a .venv with another Python"
        )
    lacking = list(_all_unmet(metadata.requires(_PACKAGE) or []))
    if lacking:
        yield problem("versions", "; ".join(lacking), _FIX)
    else:
        found = (f"{name} {metadata.version(name)}" for name in _SHOWN if _version(name))
        yield ok("versions", f"Python {python}, {', '.join(found)}")


def _unmet(requirement: Requirement) -> str | None:
    """Explain why the installed package does not meet a requirement; None if it does."""
    there = _version(requirement.name)
    if there is None:
        return f"{requirement.name} is not installed: want {requirement}"
    if not requirement.specifier.contains(there, prereleases=True):
        return f"{requirement.name} is {there}: want {requirement.specifier}"
    return None


def _cuda_requirement(name: str) -> Requirement | None:
    """Return the requirement for a package in Lorikeet's extra `cuda`; None: there is none."""
    for text in metadata.requires(_PACKAGE) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if requirement.name == name and marker is not None and marker.evaluate({"extra": "cuda"}):
            return requirement
    return None


def _all_unmet(requirements: list[str]) -> Iterator[str]:
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            lack = _unmet(requirement)
            if lack is not None:
                yield lack


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_kernels(planned: PlannedStart) -> Iterator[Finding]:
    """Check FlashInfer, and the compilers for its and Triton's kernels, if engines use GPUs."""
    if planned.device == "cpu" or planned.gpu_memory:
        return
    wanted = _cuda_requirement(_FLASHINFER)
    lack = _unmet(wanted) if wanted else None
    if lack is not None:
        yield problem(
            "kernels", lack, "pip install --constraint constraints.txt --editable '.[cuda]'"
        )
        return
    missing = list(_missing_tools(planned))
    if missing:
        yield problem(
            "kernels",
            f"the first start compiles them, but there is no {', no '.join(missing)}",
            "apt-get install g++, and the CUDA toolkit with CUDA_HOME set to its folder",
        )
    else:
        yield ok("kernels", "FlashInfer and the compilers of kernels are installed")


def _missing_tools(planned: PlannedStart) -> Iterator[str]:
    """Yield the missing compilers.

    Triton needs a C compiler. FlashInfer also needs a C++ compiler and nvcc, unless its kernels are
    prebuilt.
    """
    if not _finds(planned, planned.environ.get("CC", ""), "cc", "gcc", "clang"):
        yield "C compiler"
    if _prebuilt(planned):
        return
    if not _finds(planned, planned.environ.get("CXX", ""), "c++", "g++", "clang++"):
        yield "C++ compiler"
    homes = [planned.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = (Path(home) for home in (*homes, "/usr/local/cuda") if home)
    if not _finds(planned, "nvcc", *(str(folder / "bin" / "nvcc") for folder in folders)):
        yield "nvcc"


def _finds(planned: PlannedStart, *programs: str) -> bool:
    path = planned.environ.get("PATH")
    return any(shutil.which(program, path=path) for program in programs if program)


def _prebuilt(planned: PlannedStart) -> bool:
    """Whether FlashInfer's kernels exist already, from a package or from an earlier start."""
    home = planned.environ.get("FLASHINFER_WORKSPACE_BASE") or planned.environ.get("HOME", "/")
    built = (Path(home) / ".cache" / "flashinfer").rglob("*.so")
    return importlib.util.find_spec(_PREBUILT) is not None or any(built)
