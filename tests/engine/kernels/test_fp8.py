"""FP8 linears: the product of the rounded numbers, by torch on the CPU and by CUDA's kernels.

Without a GPU the kernels run in Triton's interpreter, which rounds to FP8 otherwise than a GPU: it
truncates some numbers. There only the scales are compared, and a product that rounds nothing.
"""

import pytest
import torch

from lorikeet_engine.errors import SettingsError
from lorikeet_engine.kernels import fp8
from lorikeet_engine.kernels.fp8 import DTYPE, Activations, Fp8Rows, few_tokens, fused
from lorikeet_engine.kernels.gemv import gemv
from lorikeet_engine.kernels.lora.linear import _reserve_sms_of_lt, linear
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.pointwise import fused as pointwise
from lorikeet_engine.kernels.split_k import ProductConfig
from tests.engine.interpreter import INTERPRETED
from tests.engine.kernels.definitions import in_torch

reference = in_torch(fp8)

KINDS = [
    pytest.param(
        "cpu", torch.float32, marks=pytest.mark.skipif(not INTERPRETED, reason="not interpreted")
    ),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
]
SEEDED = torch.Generator().manual_seed(7)
EPS = torch.finfo(torch.float32).eps
CUDA = torch.device("cuda", 0)


def numbers(*shape, seed=0):
    """Rows of very different sizes."""
    random = torch.Generator().manual_seed(seed + shape[-1])
    return torch.randn(shape, generator=random) * 10.0 ** torch.randint(
        -3, 3, (shape[0], 1), generator=random
    )


def nearest(scaled):
    """The FP8 number nearest to each, by their definition: 3 bits behind the first, to even."""
    exponent = scaled.abs().log2().floor().clamp(min=-6)
    step = 2.0 ** (exponent - 3)
    return (scaled / step).round() * step


def floats(rounded):
    if rounded.block is None:
        return rounded.rows.double() * rounded.scales[:, None]
    height, width = rounded.block
    rows, columns = (torch.arange(side, device=rounded.rows.device) for side in rounded.rows.shape)
    scales = rounded.scales[rows[:, None] // height, columns[None, :] // width]
    return rounded.rows.double() * scales


def in_blocks(d_out, d_in, block, device="cpu"):
    """A weight whose blocks have scales of very different sizes."""
    random = torch.Generator().manual_seed(d_in)
    rows = torch.randn(d_out, d_in, generator=random).mul_(60).clamp_(-448, 448).to(DTYPE)
    counts = [-(-side // size) for side, size in zip((d_out, d_in), block, strict=True)]
    scales = 4.0 ** torch.randn(counts, generator=random) * d_in**-0.5 / 60
    return Fp8Rows(rows.to(device), scales.to(device), block)


def unfilled(d_out, d_in, block):
    """A weight on the meta device whose blocks have scales."""
    counts = [-(-side // size) for side, size in zip((d_out, d_in), block, strict=True)]
    rows = torch.empty(d_out, d_in, dtype=DTYPE, device="meta")
    return Fp8Rows(rows, torch.empty(counts, device="meta"), block)


def assert_rounded(got, x):
    want = reference.quantize_rows(x.cpu())  # by a number, torch does not divide exactly on CUDA
    got = Fp8Rows(got.rows.cpu(), got.scales.cpu())
    assert torch.equal(got.scales, want.scales)
    assert got.rows.shape == want.rows.shape
    assert got.rows.is_contiguous()
    if not INTERPRETED:
        assert torch.equal(got.rows.view(torch.uint8), want.rows.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_rounded_to_the_nearest_numbers_of_their_scale(dtype):
    x = numbers(7, 100).to(dtype)
    got = reference.quantize_rows(x)
    rounded, scales = got.rows, got.scales
    assert rounded.dtype == DTYPE
    torch.testing.assert_close(scales, x.float().abs().amax(1) / 448, rtol=EPS, atol=0)
    assert torch.equal(rounded.float(), nearest(x.float() / scales[:, None]))
    assert torch.equal(rounded.float().abs().amax(1), torch.full((7,), 448.0))


def test_a_row_of_zeros_stays_one():
    assert torch.equal(floats(reference.quantize_rows(torch.zeros(2, 16))), torch.zeros(2, 16))


def test_a_weight_is_rounded_row_by_row_however_many_there_are():
    weight = numbers(2500, 32)
    got, want = reference.quantize_weight(weight), reference.quantize_rows(weight)
    assert torch.equal(got.rows.view(torch.uint8), want.rows.view(torch.uint8))
    assert torch.equal(got.scales, want.scales)
    assert got.nbytes == 2500 * (32 + 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_linear_multiplies_the_rounded_numbers(tokens, biased, dtype):
    x, weight = numbers(tokens, 96).to(dtype), reference.quantize_weight(numbers(40, 96, seed=1))
    bias = torch.randn(40).to(dtype) if biased else None
    want = floats(reference.quantize_rows(x)) @ floats(weight).T
    got = linear(x, weight, bias)
    assert got.dtype == dtype
    want = want if bias is None else want + bias
    # 96 sums in float32, and one rounding to the dtype
    error = (96 * EPS + torch.finfo(dtype).eps) * want.abs().amax(1, keepdim=True)
    assert ((got - want).abs() <= error).all()


@pytest.mark.parametrize("block", [(32, 48), (8, 96), (1, 16)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_linear_multiplies_numbers_whose_blocks_have_scales(tokens, block):
    x, weight = numbers(tokens, 112), in_blocks(40, 112, block)
    want = floats(reference.quantize_rows(x)) @ floats(weight).T
    got = linear(x, weight)
    # the reference adds up a hundred products in float32
    assert ((got - want).abs() <= 112 * EPS * want.abs().amax(1, keepdim=True)).all()
    assert torch.equal(weight.floats().double(), floats(weight).float().double())


@pytest.mark.parametrize(("device", "dtype"), KINDS)
@pytest.mark.parametrize("width", [16, 100, 4096, 14336])
def test_the_kernel_rounds_rows_as_the_reference_does(device, dtype, width):
    x = numbers(17, 2 * width).to(device, dtype)[:, :width]  # rows that do not follow one another
    assert_rounded(fused.quantize_rows(x), x)


@pytest.mark.parametrize(("device", "dtype"), KINDS)
@pytest.mark.parametrize("width", [16, 100, 4096])
def test_a_norm_rounds_its_own_rows(device, dtype, width):
    x, delta, weight = (numbers(n, width, seed=n).to(device, dtype) for n in (5, 5, 1))
    both = pointwise.add_rms_norm(x.clone(), delta, weight[0], 1e-5, fp8=True)
    assert torch.equal(both.rows, pointwise.add_rms_norm(x, delta, weight[0], 1e-5))
    assert_rounded(both.fp8, both.rows)


@pytest.mark.parametrize(("device", "dtype"), KINDS)
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("width", [16, 100, 14336])
def test_silu_rounds_its_own_rows(device, dtype, width, adapters):
    # an 8th, whose products float16 can hold
    x, added = ((numbers(5, 2 * width, seed=n) / 8).to(device, dtype) for n in (1, 2))
    lora = None
    if adapters:
        lora = LoraDelta(added, torch.tensor([3], dtype=torch.int32, device=device))
    both = pointwise.act_and_mul(x, lora, fp8=True)
    assert torch.equal(both.rows, pointwise.act_and_mul(x, lora))
    assert_rounded(both.fp8, both.rows)


def test_rows_that_are_rounded_already_are_multiplied_as_they_are():
    x, weight = numbers(5, 96), reference.quantize_weight(numbers(40, 96, seed=1))
    rounded = reference.quantize_rows(x)
    unread = torch.full_like(x, torch.nan)
    assert torch.equal(linear(Activations(unread, rounded), weight), linear(x, weight))


@pytest.mark.parametrize(("device", "dtype"), KINDS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("d_out", "d_in"), [(8, 64), (7, 100), (33, 2048), (5, 3000)])
def test_one_row_is_multiplied_unrounded(device, dtype, d_out, d_in, biased):
    weight = reference.quantize_weight(numbers(d_out, d_in, seed=1).to(device))
    assert_multiplied_unrounded(weight, device, dtype, biased)


@pytest.mark.parametrize(("device", "dtype"), KINDS)
@pytest.mark.parametrize(("d_out", "d_in", "block"), [
    (132, 112, (128, 128)), (33, 112, (4, 32)), (5, 3008, (4, 32)),
])  # fmt: skip
def test_one_row_is_multiplied_by_numbers_whose_blocks_have_scales(
    device, dtype, d_out, d_in, block
):
    assert_multiplied_unrounded(in_blocks(d_out, d_in, block, device), device, dtype, biased=True)


def assert_multiplied_unrounded(weight, device, dtype, biased):
    d_out, d_in = weight.rows.shape
    x, bias = numbers(1, d_in).to(device, dtype), torch.randn(d_out).to(device, dtype)
    bias = bias if biased else None
    got = gemv(x, weight, bias)
    want = x.double() @ floats(weight).T
    want = want if bias is None else want + bias
    atol = 2 * torch.finfo(dtype).eps * want.abs().max().item()
    # float32 rounds each partial sum, whatever is left when they have cancelled out
    lost = torch.finfo(torch.float32).eps * (x.double().abs() @ floats(weight).abs().T)
    assert ((got.double() - want).abs() <= atol + lost).all()


def few(device, dtype, tokens, d_out, d_in):
    """Tokens and a weight of FP8, a bias, and the product: exact but for the last rounding."""
    x, weight = (
        reference.quantize_rows(torch.randn(n, d_in, generator=SEEDED).to(device))
        for n in (tokens, d_out)
    )
    bias = torch.randn(d_out, generator=SEEDED).to(device, dtype)
    want = reference.linear(x.rows.to(torch.float32), weight, bias, x)
    return x, weight, bias, want


@pytest.mark.parametrize(("device", "dtype"), KINDS)
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("block", [(128, 128), (20, 96)])
@pytest.mark.parametrize(("tokens", "d_out", "d_in"), [(33, 200, 336)])
def test_numbers_whose_blocks_have_scales_are_multiplied(
    device, dtype, tokens, d_out, d_in, block, split
):
    x, _, bias, _ = few(device, dtype, tokens, d_out, d_in)
    weight = in_blocks(d_out, d_in, block, device)
    want = (floats(x) @ floats(weight).T).float() + bias.float()
    config = ProductConfig(64, 32, split, warps=4, stages=3)
    assert_near(few_tokens.multiply(x, weight, bias, dtype, config), want, d_in)


@pytest.mark.parametrize(("device", "dtype"), KINDS)
def test_more_tokens_than_a_program_takes_are_multiplied(device, dtype):
    x, weight, bias, want = few(device, dtype, 300, 160, 96)
    assert_near(few_tokens.multiply(x, weight, bias, dtype, few_tokens.UNTUNED), want, 96)


def assert_near(got, want, d_in):
    # a sum loses up to a 2^13th of itself with each 32 products; then it is rounded
    bound = d_in / 32 * 2.0**-13 + torch.finfo(got.dtype).eps
    assert (got.float() - want).norm() <= bound * want.norm()


@pytest.mark.parametrize(("device", "dtype"), KINDS)
@pytest.mark.parametrize("split", [1, 2, 3, 8])  # 8: some have no columns
@pytest.mark.parametrize(("tokens", "d_out", "d_in"), [(2, 64, 512), (5, 200, 320), (33, 96, 160)])
def test_few_tokens_are_multiplied_however_many_programs_share_it(
    device, dtype, tokens, d_out, d_in, split
):
    x, weight, bias, want = few(device, dtype, tokens, d_out, d_in)
    config = ProductConfig(64, 128, split, warps=4, stages=3)
    for added in (None, bias):
        got = few_tokens.multiply(x, weight, added, dtype, config)
        assert_near(got, want if added is not None else want - bias.float(), d_in)
        assert torch.equal(got, few_tokens.multiply(x, weight, added, dtype, config))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 16, 100, 128])
@pytest.mark.parametrize(("d_out", "d_in"), [(6144, 4096), (4096, 14336)])
def test_programs_that_share_outputs_add_them_up_alike_every_time(d_out, d_in, tokens):
    x, weight, bias, want = few("cuda", torch.bfloat16, tokens, d_out, d_in)
    config = ProductConfig(64, 128, 5, warps=4, stages=3)
    first = few_tokens.multiply(x, weight, bias, torch.bfloat16, config)
    assert_near(first, want, d_in)
    for _ in range(50):
        assert torch.equal(first, few_tokens.multiply(x, weight, bias, torch.bfloat16, config))


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 17, 256])
@pytest.mark.parametrize(("d_out", "d_in"), [(6144, 4096), (4096, 14336), (160, 96)])
def test_cuda_products_equal_the_references(d_out, d_in, tokens, biased):
    dtype = torch.bfloat16
    x = torch.randn(tokens, d_in).to("cuda", dtype)
    bias = torch.randn(d_out).to("cuda", dtype) if biased else None
    weight = reference.quantize_weight(torch.randn(d_out, d_in, device="cuda") * d_in**-0.5)
    assert_multiplied(x, weight, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 17, 128, 255, 1000])
@pytest.mark.parametrize(("d_out", "d_in", "block"), [
    (6144, 4096, (128, 128)), (4096, 14336, (128, 128)), (4096, 1792, (128, 128)),
    (4096, 6848, (128, 64)), (160, 96, (16, 32)),
])  # fmt: skip
def test_cuda_multiplies_numbers_whose_blocks_have_scales(d_out, d_in, block, tokens):
    x = torch.randn(tokens, d_in).to("cuda", torch.bfloat16)
    bias = torch.randn(d_out).to("cuda", torch.bfloat16)
    assert_multiplied(x, in_blocks(d_out, d_in, block, "cuda"), bias)


@pytest.mark.gpu
def test_cublas_multiplies_by_scales_of_blocks_beside_lora():
    x = torch.randn(256, 4096).to("cuda", torch.bfloat16)
    weight = in_blocks(6144, 4096, (128, 128), "cuda")
    with _reserve_sms_of_lt(56, CUDA):  # the most that tuning.json has for a step of decodes
        assert_multiplied(x, weight, None)


def assert_multiplied(x, weight, bias):
    got, want = fp8.linear(x, weight, bias), reference.linear(x.float(), weight, bias)
    if len(x) == 1:  # x itself is multiplied
        want = x.float() @ floats(weight).float().T
        want = want if bias is None else want + bias
    assert_near(got, want, x.shape[1])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 17])
def test_a_captured_product_reads_its_operands_at_replay(tokens):
    weight = reference.quantize_weight(torch.randn(160, 96, device="cuda"))
    x, graph = torch.randn(tokens, 96, device="cuda", dtype=torch.bfloat16), torch.cuda.CUDAGraph()
    fp8.linear(x, weight)
    with torch.cuda.graph(graph):
        y = fp8.linear(x, weight)
    x.normal_()
    y.fill_(torch.nan)
    graph.replay()
    assert torch.equal(y, fp8.linear(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 32, 128])
def test_captured_kernels_equal_single_launches(tokens):
    gate_up, down = (
        reference.quantize_weight(torch.randn(size, device="cuda") * size[1] ** -0.5)
        for size in ((28672, 4096), (4096, 14336))
    )
    given = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(4096, device="cuda", dtype=torch.bfloat16)

    def layers(after):
        x, delta = given.clone(), torch.zeros_like(given)
        for _ in range(8):
            inputs = pointwise.add_rms_norm(x, delta, norm, 1e-5, fp8=True)
            after()
            y = fp8.linear(inputs.rows, gate_up, None, inputs.fp8)
            after()
            gated = pointwise.act_and_mul(y, fp8=True)
            after()
            delta = fp8.linear(gated.rows, down, None, gated.fp8)
            after()
        return delta

    want, graph = layers(torch.cuda.synchronize), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layers(lambda: None)
    for _ in range(50):
        got.fill_(torch.nan)
        graph.replay()
        assert torch.equal(got, want)


@pytest.mark.parametrize(("gpu", "tokens", "known"), [
    ("NVIDIA H200", 32, True), ("NVIDIA H200", 129, False), ("another GPU", 32, False),
])  # fmt: skip
def test_a_product_that_was_not_measured_on_this_gpu_is_left_to_cublas(
    monkeypatch, gpu, tokens, known
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: gpu)
    device, scales = torch.device("cuda", 0), torch.empty(4096, device="meta")
    weight, other = (
        Fp8Rows(torch.empty(4096, d_in, dtype=DTYPE, device="meta"), scales)
        for d_in in (14336, 14320)
    )
    config = few_tokens.product_config(weight, tokens, device)
    assert (config is not None) == known
    assert few_tokens.product_config(other, tokens, device) is None
    assert few_tokens.product_config(weight, tokens, torch.device("cpu")) is None


@pytest.mark.parametrize(("capability", "cuda", "block", "d_in", "cublas"), [
    ((9, 0), "12.9", (128, 128), 14336, True),
    ((9, 0), "13.0", (128, 128), 1536, True),
    ((9, 0), "13.0", (128, 128), 1792, False),
    ((9, 0), "13.0", (64, 128), 14336, False),
    ((9, 0), "12.8", (128, 128), 14336, False),
    ((8, 9), "13.0", (128, 128), 14336, False),
])  # fmt: skip
def test_cublas_multiplies_many_tokens_by_scales_of_blocks_if_it_can(
    monkeypatch, capability, cuda, block, d_in, cublas
):
    on_gpu(monkeypatch, capability, cuda)
    weight = unfilled(4096, d_in, block)
    assert (few_tokens.product_config(weight, 129, CUDA) is None) == cublas


def test_few_tokens_and_scales_of_blocks_are_cublas_where_it_was_faster(monkeypatch):
    for capability, cublas in (((9, 0), True), ((8, 9), False)):
        on_gpu(monkeypatch, capability, "13.0")
        weight = unfilled(28672, 4096, (128, 128))
        configs = [few_tokens.product_config(weight, tokens, CUDA) for tokens in few_tokens.TOKENS]
        assert [config is None for config in configs] == [False, False, False, cublas]
        # unknown, and not measured
        assert few_tokens.product_config(unfilled(4096, 96, (128, 128)), 16, CUDA)


@pytest.mark.parametrize("tokens", [130, 144])
def test_cublas_gets_scales_of_blocks_in_its_layout(monkeypatch, tokens):
    def scaled_mm(rows, weight, scale_a, scale_b, out_dtype):
        """Check operands and multiply as torch._scaled_mm does for scales of blocks."""
        (count, d_in), d_out = rows.shape, weight.shape[1]
        assert count % 16 == 0
        assert scale_a.shape == (count, d_in // 128)
        assert scale_a.stride() == (1, count)
        assert scale_b.shape == (d_in // 128, d_out // 128)
        assert scale_b.stride() == (1, d_in // 128)
        x = Fp8Rows(rows, scale_a.contiguous(), (1, 128)).floats()
        return (x @ Fp8Rows(weight.t(), scale_b.t(), (128, 128)).floats().t()).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    x, weight = reference.quantize_rows(numbers(tokens, 512)), in_blocks(256, 512, (128, 128))
    bias = torch.randn(256)
    got = fused.multiply(x, weight, bias, torch.float32)
    want = floats(x) @ floats(weight).T + bias
    assert got.shape == want.shape
    assert ((got - want).abs() <= 512 * EPS * want.abs().amax(1, keepdim=True)).all()


@pytest.mark.parametrize("tokens", [2, 130])
@pytest.mark.parametrize("block", [(64, 64), (32, 96)])
def test_narrow_blocks_are_multiplied_by_the_config_they_get(monkeypatch, block, tokens):
    if not INTERPRETED:
        pytest.skip("not interpreted")
    on_gpu(monkeypatch, (9, 0), "13.0")
    x, weight = reference.quantize_rows(numbers(tokens, 416)), in_blocks(70, 416, block)
    config = few_tokens.product_config(weight, tokens, CUDA)
    got = few_tokens.multiply(x, weight, None, torch.float32, config)
    want = floats(x) @ floats(weight).T
    assert ((got - want).abs() <= 416 * EPS * want.abs().amax(1, keepdim=True)).all()


def on_gpu(monkeypatch, capability, cuda):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)


@pytest.mark.parametrize(
    ("capability", "dtype", "message"),
    [((8, 6), torch.bfloat16, "8.9 or above"), ((9, 0), torch.float16, "want bfloat16")],
)
def test_a_gpu_without_fp8_products_is_refused(monkeypatch, capability, dtype, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with pytest.raises(SettingsError, match=message):
        fp8.check_device(torch.device("cuda", 0), dtype)
    fp8.check_device(torch.device("cpu"), dtype)
