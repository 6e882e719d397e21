"""Scans of values while a blob comes, which save reading the file again."""

import io
import itertools

import pytest
import torch

from lorikeet_engine.adapter_format import AdapterLimits, ValueScan, check_values, read_spec
from lorikeet_engine.adapter_format.header import parse_header
from lorikeet_engine.errors import AdapterRejected
from tests.engine.blobs import SHAPE, Shelf, everywhere

LIMITS = AdapterLimits(max_rank=64, max_bytes=1 << 20)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WHOLE = 1 << 20


def scanned(data: bytes, step: int, size: int | None = None) -> ValueScan:
    """A scan of the header, then of `step` bytes at a time."""
    scan = ValueScan(len(data) if size is None else size)
    header = 8 + int.from_bytes(data[:8], "little")
    cuts = [0, *range(-(-header // 8) * 8, len(data), step), len(data)]
    for begin, end in itertools.pairwise(cuts):
        scan.take(memoryview(data)[begin:end])
    return scan


def found(data: bytes, scan: ValueScan) -> list[int | None]:
    tensors = parse_header(io.BytesIO(data), len(data), "blob").tensors
    return [scan.bound(span) for span in tensors.values()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [8, 24, 4096, WHOLE])
def test_a_scanned_blob_need_not_be_read(dtype, step, tmp_path):
    shelf = Shelf(tmp_path)
    shelf.make("x", everywhere(3), dtype=dtype)
    blob = shelf.blob("x")
    spec, data = read_spec(blob, SHAPE, LIMITS), blob.read_bytes()
    scan = scanned(data, step)
    assert None not in found(data, scan)
    blob.unlink()
    check_values(blob, spec, "float32", scan)
    with pytest.raises(FileNotFoundError):
        check_values(blob, spec, "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.nan, -torch.inf, 70_000.0])
def test_a_scan_and_the_file_give_the_same_error(dtype, value, tmp_path):
    shelf = Shelf(tmp_path)
    shelf.make("x", everywhere(3), dtype=dtype)
    blob = shelf.blob("x")
    data = bytearray(blob.read_bytes())
    spec = read_spec(blob, SHAPE, LIMITS)
    span = spec.linears[5].b
    bad = torch.tensor([value], dtype=dtype).view(torch.uint8).numpy().tobytes()
    data[span.end - len(bad) : span.end] = bad
    blob.write_bytes(data)
    said = []
    for scan in (None, scanned(bytes(data), 64)):
        with pytest.raises(AdapterRejected) as refused:
            check_values(blob, spec, "float16", scan)
        said.append((refused.value.message, refused.value.fields))
    assert said[0] == said[1]
    assert said[0][1]["field"] == f"{spec.linears[5].name}.lora_B"


def test_a_tensor_beside_one_with_larger_values_is_read_separately(tmp_path):
    shelf = Shelf(tmp_path)
    shelf.make("x", {(0, 0): 3, (0, 1): 3}, alpha=12.0)
    blob = shelf.blob("x")
    data = bytearray(blob.read_bytes())
    spec = read_spec(blob, SHAPE, LIMITS)
    at = spec.linears[0].a.begin
    data[at : at + 4] = torch.tensor([60_000.0]).view(torch.uint8).numpy().tobytes()
    blob.write_bytes(data)
    check_values(blob, spec, "float16", scanned(bytes(data), WHOLE))  # B, times four, holds less


def test_an_incomplete_blob_has_no_bounds(tmp_path):
    shelf = Shelf(tmp_path)
    shelf.make("x", everywhere(3))
    data = shelf.blob("x").read_bytes()
    scan = ValueScan(len(data))
    scan.take(memoryview(data)[:-8])
    assert set(found(data, scan)) == {None}
    scan.take(memoryview(data)[-8:])
    assert None not in found(data, scan)


def test_unaligned_values_are_read_from_the_file(tmp_path):
    shelf = Shelf(tmp_path)
    shelf.make("x", everywhere(3))
    blob, data = shelf.blob("x"), shelf.blob("x").read_bytes()
    length = int.from_bytes(data[:8], "little") + 1  # a space more: every value lies at an odd byte
    data = length.to_bytes(8, "little") + data[8 : 7 + length] + b" " + data[7 + length :]
    blob.write_bytes(data)
    scan = scanned(data, 64)
    assert set(found(data, scan)) == {None}
    check_values(blob, read_spec(blob, SHAPE, LIMITS), "float32", scan)


def test_a_scan_refuses_nothing(tmp_path):
    shelf = Shelf(tmp_path)
    shelf.make("x", everywhere(3))
    data = shelf.blob("x").read_bytes()
    assert set(found(data, scanned(data, 64, size=len(data) + 1))) == {None}  # truncated
    for bad in (b"", b"{}", data[:7], data[:100], b"\xff" * 100, data[100:]):
        scan = ValueScan(len(bad))
        scan.take(memoryview(bad))
        assert set(found(data, scan)) == {None}
