"""GPUs, the driver, and what kernels are compiled with."""

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

from lorikeet.doctor.cuda import Cuda, Version
from lorikeet.doctor.finding import Finding, ok, problem, warning
from lorikeet.doctor.site import Site
from lorikeet.doctor.versions import lacks, requirement_of_extra

_FLASHINFER = "flashinfer-python"
_PREBUILT = "flashinfer_jit_cache"
_COMPILERS = ("cc", "gcc", "clang")


def check_gpus(site: Site) -> Iterator[Finding]:
    """As many as engines, and a driver that knows torch's CUDA."""
    if site.gpu_memory:
        yield ok("gpus", "not looked at: --gpu-memory plans for others")
        return
    if site.device == "cpu":
        yield from _check_unused(site.cuda, asked=site.settings.device == "cpu")
        return
    fault = _fault_of_driver(site.cuda)
    if fault is not None:
        yield fault
        return
    yield from _check_count(site)
    old = [gpu.name for gpu in site.cuda.gpus if gpu.capability < (8, 0)]
    if old:
        yield warning(
            "gpus",
            f"{old[0]} is older than Ampere, on which bfloat16 is fast",
            "LORIKEET_DTYPE=float16",
        )


def check_kernels(site: Site) -> Iterator[Finding]:
    """FlashInfer and the compilers it and Triton need, where engines run on CUDA here."""
    if site.device == "cpu" or site.gpu_memory:
        return
    path = site.environ.get("PATH")
    wanted = requirement_of_extra(_FLASHINFER, "cuda")
    lack = lacks(wanted) if wanted else None
    if lack is not None:
        yield problem("kernels", lack, "pip install --editable '.[cuda]'")
    elif not _prebuilt(site) and not _nvcc(site):
        yield problem(
            "kernels",
            "FlashInfer compiles its kernels at its first start, and there is no nvcc",
            "install CUDA's toolkit and set CUDA_HOME, or `pip install flashinfer-jit-cache`",
        )
    else:
        yield ok("kernels", "FlashInfer is there, with its kernels or nvcc")
    if not any(shutil.which(name, path=path) for name in (*_COMPILERS, site.environ.get("CC", ""))):
        yield problem("kernels", "Triton needs a C compiler", "apt-get install gcc libc6-dev")


def _check_unused(cuda: Cuda, *, asked: bool) -> Iterator[Finding]:
    if cuda.driver is None or asked:
        yield ok("gpus", "none: engines run on the CPU")
    elif cuda.torch is None:
        yield problem(
            "gpus",
            "there is an NVIDIA driver, but torch was built for the CPU",
            "install torch's build for CUDA, or set LORIKEET_DEVICE=cpu",
        )
    else:
        yield _fault_of_driver(cuda) or warning(
            "gpus",
            "there is an NVIDIA driver, but torch sees no GPU: engines run on the CPU",
            "check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or set LORIKEET_DEVICE=cpu",
        )


def _fault_of_driver(cuda: Cuda) -> Finding | None:
    if cuda.torch is None:
        return problem("gpus", "torch was built for the CPU", "install torch's build for CUDA")
    if cuda.driver is None:
        return problem("gpus", "there is no NVIDIA driver", "install it; `nvidia-smi` shows it")
    if cuda.driver[0] < cuda.torch[0]:  # within a major version older drivers do
        return problem(
            "gpus",
            f"the driver knows CUDA {_shown(cuda.driver)}, torch was built for "
            f"{_shown(cuda.torch)}",
            f"update the NVIDIA driver, or install torch built for CUDA {cuda.driver[0]}",
        )
    return None


def _check_count(site: Site) -> Iterator[Finding]:
    settings, there = site.settings, len(site.cuda.gpus)
    most = sum(map(settings.most_replicas, settings.base_models))
    names = ", ".join(sorted({gpu.name for gpu in site.cuda.gpus})) or "none"
    found = f"{there} ({names}), and {site.engines} are wanted: one for each replica of each model"
    if there < site.engines:
        if "RAY_ADDRESS" in site.environ:
            yield warning("gpus", found, "count those of the other nodes: `ray status`")
        else:
            yield problem("gpus", found, _cure(there, len(settings.base_models)))
    elif there < most:
        found += f", of which there may be {most}"
        yield warning("gpus", found, f"LORIKEET_MAX_REPLICAS={there}, or more GPUs")
    else:
        yield ok("gpus", found)


def _cure(gpus: int, models: int) -> str:
    if not gpus:
        return "check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or set LORIKEET_DEVICE=cpu"
    if gpus < models:
        return "name fewer in LORIKEET_BASE_MODELS, or add GPUs: engines without one wait for ever"
    return f"LORIKEET_REPLICAS={gpus // models}, or more GPUs: engines without one wait for ever"


def _prebuilt(site: Site) -> bool:
    """Whether kernels are there, from a package or from an earlier start."""
    if importlib.util.find_spec(_PREBUILT):
        return True
    home = site.environ.get("FLASHINFER_WORKSPACE_BASE") or site.environ.get("HOME", "/")
    return any((Path(home) / ".cache" / "flashinfer").glob("*/*/cached_ops/**/*.so"))


def _nvcc(site: Site) -> bool:
    homes = [site.environ.get("CUDA_HOME", ""), site.environ.get("CUDA_PATH", "")]
    places = [Path(home) / "bin" / "nvcc" for home in (*homes, "/usr/local/cuda") if home]
    found = shutil.which("nvcc", path=site.environ.get("PATH"))
    return found is not None or any(place.exists() for place in places)


def _shown(version: Version) -> str:
    return ".".join(map(str, version))
