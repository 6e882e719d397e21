"""An adapter too large or too precise for the engines' memory is refused at registration."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lorikeet_engine.adapter_format import AdapterMemory, write_blob
from tests.gateway.conftest import make_blob, make_peft, serving
from tests.gateway.test_bad_requests import error_of
from tests.gateway.test_upload import with_head

ELEMENTS = 2 * (8 + 8)  # rank 2 of one linear of 8 by 8


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_every_response_with_an_adapter_has_its_gpu_bytes(
    dtype: str, size: int, tmp_path: Path
) -> None:
    with serving(tmp_path, adapter_memory=AdapterMemory(dtype)) as gateway:
        registered = gateway.register("acme/new", seed=1)
        shown = gateway.admin("GET", "/adapters/acme/new").json()["versions"][0]
        listed: dict[str, Any] = gateway.admin("GET", "/adapters?tenant=acme").json()["data"][0]
    for version in (registered, shown, listed["versions"][0]):
        assert version["gpu_bytes"] == ELEMENTS * size


def test_an_adapter_too_large_for_every_engine_is_refused(tmp_path: Path) -> None:
    memory = AdapterMemory("float16", ELEMENTS * 2)  # as much as acme/support takes
    with serving(tmp_path, adapter_memory=memory) as gateway:
        answer = gateway.upload(
            "acme/large", make_blob(tmp_path / "large", rank=3)
        )  # each matrix is aligned
        error = error_of(answer, 422)
    assert (error["code"], error["param"]) == ("invalid_adapter", "gpu_bytes")
    assert (
        "takes 128 bytes as float16 on a GPU and the engines' memory for adapters there holds 64"
        in (error["message"])
    )


def test_a_whole_head_needs_room_for_the_rows_that_differ_alone(tmp_path: Path) -> None:
    made, _ = with_head(tmp_path, modules_to_save=["lm_head"])
    room = 4 * (ELEMENTS + 2 * 16)  # aligned: one row, and its id
    with serving(tmp_path, adapter_memory=AdapterMemory("float32", room, room)) as gateway:
        gateway.engines.changed = [3]
        answer = gateway.upload("acme/headed", made)
        assert answer.json()["gpu_bytes"] == room
        gateway.engines.changed = [3, 9, 17]
        error = error_of(gateway.upload("acme/headed", made), 422)
    assert (error["code"], error["param"]) == ("invalid_adapter", "gpu_bytes")


def test_a_head_of_which_more_rows_differ_than_are_listed_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = with_head(tmp_path, modules_to_save=["lm_head"])
    monkeypatch.setattr("lorikeet.gateway.admin.registration.MAX_LISTED", 2)
    with serving(tmp_path, adapter_memory=AdapterMemory("float32", 4 * 64)) as gateway:
        gateway.engines.changed = [3, 9]
        assert gateway.upload("acme/headed", made).json()["touches"]["tokens"] == 2
        gateway.engines.changed = [3, 9, 17]
        error = error_of(gateway.upload("acme/headed", made), 422)
    assert "takes" in error["message"]


def test_gpu_bytes_are_per_gpu_with_tensor_parallelism(tmp_path: Path) -> None:
    blob = make_blob(tmp_path / "new", rank=4)
    with serving(tmp_path, adapter_memory=AdapterMemory("float32", gpus={"tiny": 2})) as gateway:
        answer = gateway.upload("acme/new", blob)
    assert answer.json()["gpu_bytes"] == 4 * (4 * 8 + 4 * 4)  # A whole, half of B


def test_an_adapter_whose_parts_exceed_the_host_memory_is_refused(tmp_path: Path) -> None:
    memory = AdapterMemory("float32", host_bytes=2 * 4 * 48 - 1, gpus={"tiny": 2})
    with serving(tmp_path, adapter_memory=memory) as gateway:
        error = error_of(gateway.upload("acme/new", make_blob(tmp_path / "new", rank=4)), 422)
    assert "takes 384 bytes as float32 on the host" in error["message"]
    assert "LORIKEET_ADAPTER_HOST_MEMORY" in error["message"]


def test_a_value_beyond_the_engines_dtype_is_refused(tmp_path: Path) -> None:
    path = make_peft(tmp_path / "peft") / "adapter_model.safetensors"
    tensors = load_file(path)
    (b,) = (name for name in tensors if "lora_B" in name)
    tensors[b][0, 0] = np.float32(40_000)  # doubled by its scaling
    save_file(tensors, path)
    write_blob(path.parent, tmp_path / "blob")
    blob = (tmp_path / "blob").read_bytes()
    for dtype, status in (("bfloat16", 201), ("float16", 422)):
        with serving(tmp_path / dtype, adapter_memory=AdapterMemory(dtype)) as gateway:
            answer = gateway.upload("acme/new", blob)
            assert answer.status_code == status
    assert "lora_B holds 80000, which float16 cannot hold" in answer.json()["error"]["message"]
