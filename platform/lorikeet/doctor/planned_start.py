"""What is about to be started, and where."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from lorikeet.addresses import SERVES_PORT
from lorikeet.doctor.machine import Cuda, Host, find_cuda, this_host
from lorikeet.errors import InvalidSetting
from lorikeet.settings import Settings
from lorikeet_engine.adapter_format import Quantization, quantized_linears, read_config
from lorikeet_engine.errors import EngineError, ModelError, SettingsError

if TYPE_CHECKING:
    from lorikeet_engine.execution.memory_plan import MemoryPlan
    from lorikeet_engine.settings import EngineSettings

_CONTEXT_BYTES = 1 << 29  # CUDA's own, of each process that uses a GPU


@dataclass(frozen=True)
class PlannedStart:
    """The environment of a start, and the machine. Finds out what is asked for, once.

    gpu_memory: bytes of GPUs that are elsewhere; None: those that are here count. http_port: for
    tenants. look, find_host: for machines that are not this one.
    """

    environ: Mapping[str, str]
    gpu_memory: int | None = None
    http_port: int = SERVES_PORT
    look: Callable[[], Cuda] = find_cuda
    find_host: Callable[[], Host] = this_host

    @cached_property
    def settings(self) -> Settings:
        """The settings, as serve_app reads them. Raises InvalidSetting."""
        return Settings.from_env(self.environ)

    @property
    def readable(self) -> bool:
        """Whether they parse."""
        try:
            return bool(self.settings)
        except InvalidSetting:
            return False

    @cached_property
    def cuda(self) -> Cuda:
        """The CUDA installation and GPUs of this machine."""
        return self.look()

    @cached_property
    def host(self) -> Host:
        """The machine without its GPUs."""
        return self.find_host()

    @property
    def device(self) -> str:
        """Where engines will run: cpu or cuda."""
        if self.settings.device != "auto":
            return self.settings.device
        return "cuda" if self.gpu_memory or self.cuda.gpus else "cpu"

    @property
    def engines(self) -> int:
        """The engines of all base models, at the start."""
        return sum(self.settings.replicas.values())

    @property
    def engine_gpus(self) -> int:
        """The GPUs of all engines, at the start; on CPUs their processes."""
        settings = self.settings
        return sum(n * settings.tensor_parallel[name] for name, n in settings.replicas.items())

    @property
    def device_free(self) -> int | None:
        """Bytes for one engine, of the GPU that has the least; None where that is not known."""
        if self.device == "cpu":
            return self.host.available
        found = [self.gpu_memory] if self.gpu_memory else [gpu.free for gpu in self.cuda.gpus]
        return max(0, min(found) - _CONTEXT_BYTES) if found else None

    def engine_settings(self, base_model: str) -> "EngineSettings":
        """What the engine of one base model will be told. Raises SettingsError."""
        from lorikeet.replica.engine_settings import engine_settings  # torch

        return engine_settings(self.settings.model_copy(update={"device": self.device}), base_model)

    def stored_in_fp8(self, base_model: str) -> bool:
        """Whether a base model's checkpoint has its linears in FP8, as far as it can be read."""
        try:
            stored = quantized_linears(read_config(self.settings.base_models[base_model]))
        except ModelError:
            return False
        return stored is not None and stored.format is Quantization.FP8

    def serves_fp8(self, base_model: str) -> bool:
        """Whether the weights of a base model's linears will be in FP8."""
        rounded = self.settings.weight_dtype[base_model] == "fp8"
        return rounded or self.stored_in_fp8(base_model)

    @cached_property
    def plans(self) -> Mapping[str, "MemoryPlan | EngineError"]:
        """What engines would take of their device, by base model, or why they would not start.

        A base model whose settings contradict one another is left out.
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

        shard = Shard(0, settings.tensor_parallel)  # none has more
        try:
            config, weights = rehearse_load(
                settings.model, settings.torch_dtype, settings.max_context, settings.rounding, shard
            )
            return plan_memory(config, weights, settings, self.device_free or 0, shard)
        except EngineError as error:
            return error
