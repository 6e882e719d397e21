"""The start that doctor checks in advance: its settings, machine and memory plans."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from lorikeet.addresses import SERVES_PORT
from lorikeet.doctor.machine import Cuda, Host, Version, find_cuda, this_host
from lorikeet.errors import InvalidSetting
from lorikeet.settings import Settings
from lorikeet_engine.adapter_format import Quantization, quantized_linears, read_config
from lorikeet_engine.errors import EngineError, ModelError, SettingsError

if TYPE_CHECKING:
    from lorikeet_engine.execution.memory_plan import MemoryPlan
    from lorikeet_engine.settings import EngineSettings

FIRST_WITH_BFLOAT16: Version = (8, 0)  # as fast as float16, and with products of 4 bits: Ampere
FIRST_WITH_FP8: Version = (8, 9)  # Ada
_CONTEXT_BYTES = 1 << 29  # the CUDA context of each process that uses a GPU


@dataclass(frozen=True)
class PlannedStart:
    """Environment and machine of a planned start, inspected lazily and once.

    gpu_memory: bytes of each GPU, to plan for a machine with other GPUs; None: inspect this one's.
    http_port: port of the public API, for tenants.
    makes_missing: whether the start makes a missing catalog and a Ray of its own, as
        `lorikeet serve` does.
    find_gpus: returns the GPUs and CUDA versions.
    find_host: returns the machine without its GPUs.
    """

    environ: Mapping[str, str]
    gpu_memory: int | None = None
    http_port: int = SERVES_PORT
    makes_missing: bool = False
    find_gpus: Callable[[], Cuda] = find_cuda
    find_host: Callable[[], Host] = this_host

    @cached_property
    def settings(self) -> Settings:
        """Settings, as serve_app reads them. Raises InvalidSetting for an invalid LORIKEET_
        variable.
        """
        return Settings.from_env(self.environ)

    @property
    def readable(self) -> bool:
        """Whether the settings parse."""
        try:
            return bool(self.settings)
        except InvalidSetting:
            return False

    @cached_property
    def cuda(self) -> Cuda:
        """GPUs and CUDA versions of the machine."""
        return self.find_gpus()

    @cached_property
    def host(self) -> Host:
        """The machine without its GPUs."""
        return self.find_host()

    @property
    def device(self) -> str:
        """Device of the engines: cpu or cuda."""
        if self.settings.device != "auto":
            return self.settings.device
        return "cuda" if self.gpu_memory or self.cuda.gpus else "cpu"

    @property
    def engines(self) -> int:
        """Number of engines at the start, of all base models."""
        return sum(self.settings.replicas.values())

    @property
    def engine_gpus(self) -> int:
        """Number of GPUs that all engines need at the start; on the CPU, number of engine
        processes.
        """
        settings = self.settings
        return sum(n * settings.tensor_parallel[name] for name, n in settings.replicas.items())

    @property
    def device_free(self) -> int | None:
        """Bytes that one engine finds free on its device; None if no GPU is known.

        With several GPUs, returns the free bytes of the GPU that has the fewest.
        """
        if self.device == "cpu":
            return self.host.available
        found = [self.gpu_memory] if self.gpu_memory else [gpu.free for gpu in self.cuda.gpus]
        return max(0, min(found) - _CONTEXT_BYTES) if found else None

    @property
    def capability(self) -> Version | None:
        """Least compute capability of the GPUs; None on a CPU.

        With gpu_memory, which plans for other GPUs, returns FIRST_WITH_FP8: they are assumed to
        compute in FP8.
        """
        if self.device == "cpu":
            return None
        found = [] if self.gpu_memory else [gpu.capability for gpu in self.cuda.gpus]
        return min(found, default=FIRST_WITH_FP8)

    def engine_settings(self, base_model: str) -> "EngineSettings":
        """Make the settings of a base model's engine. Raises SettingsError if they contradict each
        other.
        """
        from lorikeet.replica.engine_settings import engine_settings  # torch

        return engine_settings(self.settings.model_copy(update={"device": self.device}), base_model)

    def stored_format(self, base_model: str) -> Quantization | None:
        """Return the format of a base model's linears in its checkpoint; None: floats, or
        unreadable.
        """
        try:
            stored = quantized_linears(read_config(self.settings.base_models[base_model]))
        except ModelError:
            return None
        return None if stored is None else stored.format

    def stored_in_fp8(self, base_model: str) -> bool:
        """Whether a base model's checkpoint stores its linears in FP8; False if unreadable."""
        return self.stored_format(base_model) is Quantization.FP8

    def serves_fp8(self, base_model: str) -> bool:
        """Whether a base model's linears are served in FP8."""
        rounded = self.settings.weight_dtype[base_model] == "fp8"
        return rounded or self.stored_in_fp8(base_model)

    def smaller_weight_dtype(self, base_model: str) -> str | None:
        """Return the weight_dtype with which a base model's linears would take less memory; None:
        there is none.
        """
        if self.stays_packed(self.engine_settings(base_model)):
            return None
        stored, smaller, least = self.stored_format(base_model), "fp8", FIRST_WITH_FP8
        # where auto leaves MXFP4 as floats on GPUs, they cannot multiply by packed experts
        packs = self.capability is None or stored is not Quantization.MXFP4
        if stored is not None and stored.has_4_bits and packs:
            smaller, least = "packed", FIRST_WITH_BFLOAT16
        if smaller == "fp8" and self.serves_fp8(base_model):
            return None
        return smaller if self.capability is None or self.capability >= least else None

    def stays_packed(self, settings: "EngineSettings") -> bool:
        """Return whether a base model's weights of 4 bits stay packed in memory.

        settings: settings of the base model's engine.

        Raises ModelError if the checkpoint cannot be read or served.
        """
        from lorikeet_engine.execution.assembly import stays_packed  # torch

        return stays_packed(settings, self.capability)

    @cached_property
    def plans(self) -> Mapping[str, "MemoryPlan | EngineError"]:
        """Memory plan of each base model's engine, or the error that would stop its start.

        Base models with contradictory settings are left out.
        """
        found: dict[str, MemoryPlan | EngineError] = {}
        for name in self.settings.base_models:
            with suppress(SettingsError):
                found[name] = self._plan(self.engine_settings(name))
        return found

    def _plan(self, settings: "EngineSettings") -> "MemoryPlan | EngineError":
        from lorikeet_engine.execution.memory_plan import plan_memory
        from lorikeet_engine.models.llama import rehearse_load
        from lorikeet_engine.parallel.shard import Shard

        shard = Shard(0, settings.tensor_parallel)  # no rank holds more than rank 0
        try:
            config, weights = rehearse_load(
                settings.model,
                settings.torch_dtype,
                settings.max_context,
                settings.rounding,
                shard,
                packed=self.stays_packed(settings),
                mtp=settings.speculation == "mtp",
            )
            return plan_memory(config, weights, settings, self.device_free or 0, shard)
        except EngineError as error:
            return error
