"""Triton's kernels on a machine without a GPU: their tests run again in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = (
    "test_compositions_triton.py",
    "test_delta_net_kernels.py",
    "test_delta_net_ring_kernels.py",
    "test_expert_lora.py",
    "test_fp8.py",
    "test_gemv.py",
    "test_latents.py",
    "test_log_softmax_kernels.py",
    "test_lora_triton.py",
    "test_mamba_kernels.py",
    "test_mask_kernel.py",
    "test_moe.py",
    "test_mxfp4.py",
    "test_norms_over_ranks.py",
    "test_paged_decode.py",
    "test_penalty_kernel.py",
    "test_pointwise.py",
    "test_prefixes.py",
    "test_sampling_kernels.py",
    "test_token_rows_triton.py",
    "test_w4a16.py",
    "test_wide_heads.py",
)


@pytest.mark.timeout(900)  # minutes, and more of them beside other tests
@pytest.mark.parametrize("marks", ["not soak", pytest.param("soak", marks=pytest.mark.soak)])
def test_every_case_of_the_kernels_holds_in_tritons_interpreter(marks: str) -> None:
    files = [Path(__file__).with_name(name) for name in FILES]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "-m", marks, *files],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert run.returncode == 0, run.stdout + run.stderr
