"""What the doctor sees of the GPUs that are here."""

import pytest
import torch

from lorikeet.doctor.cuda import Cuda, find_cuda


@pytest.mark.skipif(torch.version.cuda is not None, reason="wants torch built for the CPU")
def test_torch_for_the_cpu_has_no_gpus() -> None:
    assert find_cuda() == Cuda(driver=find_cuda().driver)


@pytest.mark.gpu
def test_gpus_are_seen_with_what_they_have() -> None:
    found = find_cuda()
    assert len(found.gpus) == torch.cuda.device_count()
    for index, gpu in enumerate(found.gpus):
        there = torch.cuda.get_device_properties(index)
        assert (gpu.name, gpu.capability) == (there.name, (there.major, there.minor))
        assert 0 < gpu.free <= gpu.memory
    assert found.torch is not None
    assert found.driver is not None
    assert found.driver[0] >= found.torch[0]
