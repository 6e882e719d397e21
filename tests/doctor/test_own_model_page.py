"""The sizes in docs/own-model.md equal the memory plan's."""

from collections.abc import Iterator
from pathlib import Path

from loadtest.engine.random_model import LLAMA_3_1_8B, write_config
from lorikeet.doctor.machine import Cuda
from lorikeet.doctor.planned_start import PlannedStart
from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.execution.memory_plan import plan_memory
from lorikeet_engine.models.config import ModelConfig

PAGE = Path(__file__).parents[2] / "docs" / "own-model.md"
GIB = 1 << 30
GPUS = {"80 GB": 79.6, "141 GB": 140.4}
WEIGHTS = 16_060_522_496


def test_the_documented_table_of_sizes_equals_the_plan(tmp_path: Path) -> None:
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("| 80 GB | 10%")]
    assert shown
    rows = list(table(write_config(tmp_path / "8b", LLAMA_3_1_8B)))
    assert "\n".join(rows) in PAGE.read_text(), "it should be\n" + "\n".join(rows)


def table(model: Path) -> Iterator[str]:
    shape = BaseShape.from_config(LLAMA_3_1_8B)
    rank_16 = 2 * 16 * shape.layers * sum(sum(shape.dims(i)) for i in range(len(shape.linears)))
    config = ModelConfig.from_folder(model)
    for gpu, size in GPUS.items():
        for share in ("10%", "20%", "40%"):
            environ = {
                "LORIKEET_BASE_MODELS": f"llama={model}",
                "LORIKEET_ADAPTER_GPU_MEMORY": share,
            }
            planned = PlannedStart(environ, int(size * GIB), find_gpus=Cuda)
            assert planned.device_free is not None
            plan = plan_memory(
                config, WEIGHTS, planned.engine_settings("llama"), planned.device_free
            )
            yield (
                f"| {gpu} | {share} | {plan.weights / GIB:.1f} GiB | {plan.slot_pool // rank_16} "
                f"in {plan.slot_pool / GIB:.1f} GiB | {plan.steps / GIB:.1f} GiB "
                f"| {plan.kv / GIB:.1f} GiB | {plan.kv_tokens:,} | {plan.kv_tokens // 2048} |"
            )
