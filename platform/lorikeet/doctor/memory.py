"""Checks of memory: each engine on its device, and all engines together on the host."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lorikeet.doctor.base_models import is_of_base_model
from lorikeet.doctor.finding import Finding, ok, problem, warning
from lorikeet.doctor.planned_start import PlannedStart
from lorikeet.sizes import show_size
from lorikeet_engine.errors import EngineError

if TYPE_CHECKING:
    from lorikeet_engine.execution.memory_plan import MemoryPlan

_PROCESS_BYTES = {"cpu": 1 << 29, "cuda": 3 << 30}  # an engine and its replica, with torch
_GATEWAY_BYTES = 1 << 29
_TIGHT = 0.9
_FIX_STATES = (
    "lower LORIKEET_MAX_RUNNING, leave LORIKEET_STATE_MEMORY unset, set "
    "LORIKEET_STATE_DTYPE={}=bfloat16, or give adapters less (LORIKEET_ADAPTER_GPU_MEMORY)"
)


def check_device_memory(planned: PlannedStart) -> Iterator[Finding]:
    """Check that an engine's base model, adapters (slot pool), largest step and KV pages fit into
    the memory of its device.
    """
    if planned.device_free is None:
        yield warning(
            "memory",
            "there is no GPU here, so it is not known if the models fit",
            "give the memory of one GPU: lorikeet doctor --gpu-memory 80GiB",
        )
        return
    for name, plan in planned.plans.items():
        check = f"memory of {name}"
        if not isinstance(plan, EngineError):
            yield _judge(check, plan, planned.device, planned.settings.tensor_parallel[name])
        elif not is_of_base_model(plan):  # check_base_models reports those
            lacks_states = plan.fields.get("field") == "max_running"
            fix = _FIX_STATES.format(name) if lacks_states else _fix(planned, name)
            yield problem(check, plan.message, fix)


def _judge(check: str, plan: "MemoryPlan", device: str, tensor_parallel: int) -> Finding:
    together = f" of {tensor_parallel} that share it" if tensor_parallel > 1 else ""
    states = (
        f"states {show_size(plan.states)} for LORIKEET_MAX_RUNNING requests and "
        f"{plan.cached_states:,} cached ones, "
        if plan.states
        else ""
    )
    in_fp8 = " in FP8" if plan.kv_dtype == "fp8" else ""
    found = (
        f"on each {device}{together}: weights {show_size(plan.weights)}, slot pool "
        f"{show_size(plan.slot_pool)}, steps about {show_size(plan.steps)}, {states}"
        f"KV {show_size(plan.kv)}{in_fp8} for {plan.kv_tokens:,} tokens: "
        f"{plan.kv_tokens / plan.max_context:.1f} requests of the full {plan.max_context:,}"
    )
    if plan.lendable:
        found += f"; adapters may borrow {show_size(plan.lendable)} of it"
    if plan.kv_tokens < plan.max_context:
        more = (
            f"LORIKEET_KV_CACHE_MEMORY={-(-plan.kv_of_longest >> 20)}MiB holds one"
            if device == "cpu"
            else "give adapters less (LORIKEET_ADAPTER_GPU_MEMORY)"
        )
        fix = f"LORIKEET_MAX_CONTEXT={plan.kv_tokens} is the longest that fits; or {more}"
        return warning(check, found, fix)
    return ok(check, found)


def _fix(planned: PlannedStart, name: str) -> str:
    gpu, smaller = planned.device == "cuda", planned.smaller_weight_dtype(name)
    return (
        "give adapters and KV shares (LORIKEET_ADAPTER_GPU_MEMORY=10%, "
        "LORIKEET_KV_CACHE_MEMORY=90%), lower LORIKEET_MAX_CONTEXT or LORIKEET_MAX_BATCH_TOKENS, "
        "set LORIKEET_DTYPE=bfloat16, "
        + (f"or LORIKEET_WEIGHT_DTYPE={name}={smaller}, " if smaller else "")
        + ("split it across GPUs (LORIKEET_TENSOR_PARALLEL), " if gpu else "")
        + f"or use a smaller model or a {'GPU' if gpu else 'machine'} with more memory"
    )


def check_host_memory(planned: PlannedStart) -> Iterator[Finding]:
    """Check that host arenas (adapters), KV pages on the host, and the processes of all engines and
    gateways fit into host memory; on the CPU, the models as well.
    """
    settings, host, engines = planned.settings, planned.host, planned.engines
    arenas = engines * settings.adapter_host_memory
    processes = planned.engine_gpus * _PROCESS_BYTES[planned.device]
    processes += settings.gateways * _GATEWAY_BYTES
    pages = engines * (settings.kv_host_memory or 0)
    needed, models = arenas + pages + processes, 0
    if planned.device == "cpu":
        models = sum(
            settings.replicas[name] * settings.tensor_parallel[name] * plan.total
            for name, plan in planned.plans.items()
            if not isinstance(plan, EngineError)
        )
        needed += models
    found = (
        f"{engines} {'engine' if engines == 1 else 'engines'}: host arenas {show_size(arenas)}, "
        + (f"KV pages {show_size(pages)}, " if pages else "")
        + f"processes about {show_size(processes)}"
        + (f", models {show_size(models)}" if models else "")
        + f"; {show_size(host.available)} of {show_size(host.memory)} are available"
    )
    room = (host.available - needed + arenas) // engines
    lower = f"LORIKEET_ADAPTER_HOST_MEMORY={room >> 20}MiB" if room > 2**26 else "fewer replicas"
    if pages:
        lower += ", a smaller LORIKEET_KV_HOST_MEMORY"
    if planned.device == "cpu" and planned.settings.kv_cache_memory != "auto":
        lower += ", a smaller LORIKEET_KV_CACHE_MEMORY"
    fix = f"{lower}, or a machine with more memory"
    if needed > host.available:
        yield problem("host memory", found, fix)
    elif needed > _TIGHT * host.available:
        yield warning("host memory", found, fix)
    else:
        yield ok("host memory", found)
