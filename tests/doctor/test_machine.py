"""The machine as doctor finds it: its GPUs, and a container's memory."""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lorikeet.doctor import machine
from lorikeet.doctor.machine import Cuda, find_cuda, this_host

GIB = 1 << 30


@pytest.mark.skipif(torch.version.cuda is not None, reason="wants torch built for the CPU")
def test_torch_for_the_cpu_has_no_gpus() -> None:
    assert find_cuda() == Cuda(driver=find_cuda().driver)


@pytest.mark.gpu
def test_gpus_are_found_with_memory_and_capability() -> None:
    found = find_cuda()
    assert len(found.gpus) == torch.cuda.device_count()
    for index, gpu in enumerate(found.gpus):
        there = torch.cuda.get_device_properties(index)
        assert (gpu.name, gpu.capability) == (there.name, (there.major, there.minor))
        assert 0 < gpu.free <= gpu.memory
    assert found.torch is not None
    assert found.driver is not None
    assert found.driver[0] >= found.torch[0]


@pytest.mark.parametrize(("status", "driver"), [(0, (13, 2)), (100, None)])
def test_the_drivers_version_is_that_of_cuda(
    status: int, driver: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_version(number: Any) -> int:
        number._obj.value = 13020  # CUDA 13.2
        return status

    library = SimpleNamespace(cuDriverGetVersion=get_version)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    assert find_cuda().driver == driver


def test_a_containers_memory_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    host = this_host()
    assert 0 < host.available <= host.memory
    (tmp_path / "memory.max").write_text("max\n")
    assert this_host().memory == host.memory
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB // 2}\n")
    (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {GIB // 4}\nslab 1\n")
    container = this_host()
    assert (container.memory, container.available) == (GIB, GIB * 3 // 4)
