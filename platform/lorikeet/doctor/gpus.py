"""Checks of GPUs and their driver."""

from collections.abc import Iterator

from lorikeet.doctor.finding import Finding, ok, problem, warning
from lorikeet.doctor.machine import Cuda, Version
from lorikeet.doctor.planned_start import FIRST_WITH_BFLOAT16, FIRST_WITH_FP8, PlannedStart


def check_gpus(planned: PlannedStart) -> Iterator[Finding]:
    """Check the number of GPUs, their abilities, and the driver's CUDA version against torch's."""
    if planned.gpu_memory:
        yield ok("gpus", "not checked: --gpu-memory plans for other GPUs")
        return
    if planned.device == "cpu":
        yield from _check_unused(planned.cuda, asked=planned.settings.device == "cpu")
        return
    fault = _fault_of_driver(planned.cuda)
    if fault is not None:
        yield fault
        return
    yield from _check_count(planned)
    old = [gpu.name for gpu in planned.cuda.gpus if gpu.capability < FIRST_WITH_BFLOAT16]
    if old:
        yield warning(
            "gpus",
            f"{old[0]} is older than Ampere, on which bfloat16 is fast",
            "LORIKEET_DTYPE=float16",
        )
    if old and "packed" in planned.settings.weight_dtype.values():
        found = f"{old[0]} is older than Ampere and has no products of 4 bits"
        yield problem("gpus", found, "LORIKEET_WEIGHT_DTYPE=auto")
    without_fp8 = [gpu.name for gpu in planned.cuda.gpus if gpu.capability < FIRST_WITH_FP8]
    if without_fp8:
        found = f"{without_fp8[0]} is older than Ada and Hopper and has no FP8"
        yield from (problem("gpus", found, fix) for fix in _instead_of_fp8(planned))


def _check_unused(cuda: Cuda, *, asked: bool) -> Iterator[Finding]:
    if cuda.driver is None or asked:
        yield ok("gpus", "none: engines run on the CPU")
    elif cuda.torch is None:
        yield problem(
            "gpus",
            "there is an NVIDIA driver, but torch is built for the CPU",
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
        fix = "install torch's build for CUDA, or set LORIKEET_DEVICE=cpu"
        return problem("gpus", "torch is built for the CPU", fix)
    if cuda.driver is None:
        fix = "install it (`nvidia-smi` shows it), or set LORIKEET_DEVICE=cpu"
        return problem("gpus", "there is no NVIDIA driver", fix)
    if cuda.driver[0] < cuda.torch[0]:  # older drivers of the same major version work
        return problem(
            "gpus",
            f"the driver supports CUDA {_shown(cuda.driver)}, torch is built for "
            f"{_shown(cuda.torch)}",
            f"update the NVIDIA driver, or install torch built for CUDA {cuda.driver[0]}",
        )
    return None


def _check_count(planned: PlannedStart) -> Iterator[Finding]:
    settings, there = planned.settings, len(planned.cuda.gpus)
    of_replica = settings.tensor_parallel
    most = sum(settings.most_replicas(name) * of_replica[name] for name in settings.base_models)
    names = ", ".join(sorted({gpu.name for gpu in planned.cuda.gpus})) or "none"
    each = "one" if set(of_replica.values()) == {1} else "LORIKEET_TENSOR_PARALLEL"
    found = (
        f"{there} ({names}), {planned.engine_gpus} needed: {each} for each replica of each model"
    )
    widest = max(of_replica.values())
    if there < planned.engine_gpus:
        if "RAY_ADDRESS" in planned.environ:
            yield warning("gpus", found, "count the GPUs of the other nodes: `ray status`")
        elif there < widest:
            fix = "a replica's GPUs must be in one machine: lower LORIKEET_TENSOR_PARALLEL"
            yield problem("gpus", found, fix)
        else:
            yield problem("gpus", found, _fix(there, sum(of_replica.values())))
    elif there < most:
        found += f", {most} when replicas scale up"
        fitting = there // sum(of_replica.values())
        yield warning("gpus", found, f"LORIKEET_MAX_REPLICAS={fitting}, or more GPUs")
    else:
        yield ok("gpus", found)
    if widest > 1 and not planned.cuda.peers:
        yield warning(
            "gpus",
            "they have no peer access to each other's memory, so all-reduces over "
            "LORIKEET_TENSOR_PARALLEL GPUs go through the host and take several times as long",
            "use GPUs joined by NVLink, or LORIKEET_TENSOR_PARALLEL=1 if the model fits one",
        )


def _instead_of_fp8(planned: PlannedStart) -> Iterator[str]:
    """Yield a remedy for each setting and model that needs FP8."""
    settings = planned.settings
    if "fp8" in settings.kv_dtype.values():
        yield "LORIKEET_KV_DTYPE=auto"
    if "fp8" in settings.weight_dtype.values():
        yield "LORIKEET_WEIGHT_DTYPE=auto"
    for name in filter(planned.stored_in_fp8, settings.base_models):
        yield f"for {name} choose a copy that is not in FP8"


def _fix(gpus: int, for_one_of_each: int) -> str:
    """Return the remedy for too few GPUs.

    gpus: number of GPUs found.
    for_one_of_each: number of GPUs for one replica of every base model.
    """
    if not gpus:
        return "check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or set LORIKEET_DEVICE=cpu"
    if gpus < for_one_of_each:
        return "name fewer in LORIKEET_BASE_MODELS, or add GPUs: engines without one never start"
    replicas = gpus // for_one_of_each
    return f"LORIKEET_REPLICAS={replicas}, or more GPUs: engines without one never start"


def _shown(version: Version) -> str:
    return ".".join(map(str, version))
