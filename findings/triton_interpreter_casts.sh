#!/usr/bin/env bash
# Triton 3.7.1's interpreter halves some numbers that it rounds to FP8, and cuts off bfloat16's.
#
# TRITON_INTERPRET=1 runs a kernel with NumPy, without a GPU. Its documentation says that arithmetic
# of bfloat16 is not supported, and to convert to float32; conversions back are wrong, too. To FP8, a
# number that rounds up to a power of two keeps its exponent if that is odd: 0.49 becomes 0.25, while
# 0.97 becomes 1. Above E4M3's largest number, 448, the result is a smaller number where torch
# saturates, and NaN becomes a number. To bfloat16, digits are cut off and not rounded; float16 is
# right. So a kernel's test in the interpreter passes or fails by its random numbers.
# One would guess that a conversion rounds to the nearest number, or that it is refused.
#
# Seen, beside torch's conversions: 0.49 to 0.25 instead of 0.5 in E4M3 and E5M2; in E4M3 500 to 256
# instead of 448, NaN to 384; half of random numbers differ in bfloat16, none in float16.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
venv/bin/pip install --quiet triton==3.7.1
cat > run.py <<'PYTHON'
import torch
import triton
import triton.language as tl


@triton.jit
def convert(x, out, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


def converted(x, dtype):
    out = torch.zeros_like(x, dtype=dtype)
    convert[(1,)](x, out, len(x))
    return out.float(), x.to(dtype).float()


few = torch.tensor([0.49, 0.97, 500.0, float("nan")])
for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
    ours, torchs = converted(few, dtype)
    print(dtype, ours.tolist(), "torch", torchs.tolist())
many = torch.randn(4096, generator=torch.Generator().manual_seed(0))
for dtype in (torch.bfloat16, torch.float16):
    ours, torchs = converted(many, dtype)
    part = (ours != torchs).float().mean().item()
    cut = bool((ours.abs() <= torchs.abs()).all())
    print(dtype, f"other for {part:.1f} of random numbers, none larger: {cut}")
PYTHON
TRITON_INTERPRET=1 venv/bin/python run.py | tee seen
diff seen - <<'SEEN'
torch.float8_e4m3fn [0.25, 1.0, 256.0, 384.0] torch [0.5, 1.0, 448.0, nan]
torch.float8_e5m2 [0.25, 1.0, 256.0, nan] torch [0.5, 1.0, 512.0, nan]
torch.bfloat16 other for 0.5 of random numbers, none larger: True
torch.float16 other for 0.0 of random numbers, none larger: True
SEEN
