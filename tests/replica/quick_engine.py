"""Engine that starts faster: tests name its builder, the engine's process runs it."""

from typing import TYPE_CHECKING

from lorikeet.replica.engine_process import build_engine
from lorikeet.settings import Settings
from lorikeet_engine.costs import RowsTime, StepCosts

if TYPE_CHECKING:
    from lorikeet_engine.engine import Engine

_KV_BYTES = 2**26  # 13,000 tokens; the default 2**28 take 0.8 s of processor time to clear


def quick_engine(settings: Settings, base_model: str) -> "Engine":
    """Build build_engine's engine with less memory, and with given instead of measured step
    costs.
    """
    from lorikeet_engine.execution import assembly  # torch, which tests' own processes do without

    costs = StepCosts(  # about the demo model's on one core, which take 1.5 s to measure
        rows=(RowsTime(1, 4e-3), RowsTime(256, 0.26), RowsTime(2048, 0.55)),
        seen_token_s=0.0,
        prompt_seen_s=0.0,
        pieces_s=0.0,
        lora_s=3e-3,
        rank_s=1e-4,
        lora_token_s=0.0,
        step_tokens=settings.max_batch_tokens,
        max_running=settings.max_running,
    )
    assembly.measure_step_costs = lambda *_: costs  # type: ignore[assignment]
    return build_engine(settings.model_copy(update={"kv_cache_memory": _KV_BYTES}), base_model)
