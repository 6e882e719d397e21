"""The whole engine on a CUDA device: every fine-tune of the demo in one batch."""

import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from demo.tasks import TASKS
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import write_blob
from lorikeet_engine.engine import Engine, EngineSettings
from lorikeet_engine.request import Request, SamplingParams, Tokens

DEMO = Path(__file__).parents[2] / "demo"
PROMPTS = 32


class Folder:
    """Adapters from blobs in a folder, by digest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def fetch(self, ref: AdapterRef, path: Path) -> None:
        shutil.copy(self._folder / ref.digest, path)


def add_adapter(task, folder):
    digest = write_blob(DEMO / "adapters" / task.tenant / task.name, folder / "blob")
    (folder / "blob").rename(folder / digest)
    return AdapterRef(task.tenant, task.name, 1, digest)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8")]
)
def test_every_fine_tune_does_its_task_in_one_batch_on_the_gpu(dtype, kv_dtype, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    settings = EngineSettings(
        DEMO / "model",
        tmp_path / "cache",
        device="cuda",
        dtype=dtype,
        kv_dtype=kv_dtype,
        adapter_dtype=dtype,
    )
    engine = Engine(settings, Folder(tmp_path))
    wanted, made = {}, {}
    for task in TASKS:
        ref = add_adapter(task, tmp_path)
        for index, pair in enumerate(task.held_out_pairs(PROMPTS, seed=3)):
            message = [{"role": "user", "content": pair.prompt}]
            prompt = tokenizer.apply_chat_template(
                message, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            name = f"{task.model}-{index}"
            wanted[name], made[name] = pair.answer, []
            sampling = SamplingParams(max_tokens=250, temperature=0)
            engine.submit(Request(name, (tuple(prompt),), sampling, adapter=ref))
    open_requests = set(wanted)
    while open_requests:
        engine.wait(10)
        for output in engine.step():
            assert isinstance(output, Tokens), output
            made[output.request_id] += output.token_ids
            if output.finish is not None:
                open_requests.remove(output.request_id)
    engine.close()
    for task in TASKS:
        names = [f"{task.model}-{index}" for index in range(PROMPTS)]
        right = sum(tokenizer.decode(made[name]) == wanted[name] for name in names)
        assert right >= 0.95 * PROMPTS, (task.model, right)
