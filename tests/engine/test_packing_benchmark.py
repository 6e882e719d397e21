"""The packing benchmark: both kinds of loads of tiny adapters, and that it refuses wrong images."""

import pytest

from engine.benchmarks import packing
from tests.engine.blobs import SHAPE, elements, everywhere


def test_both_kinds_of_files_are_measured(tmp_path, capsys):
    rows = packing.measure_all(tmp_path, SHAPE, rank=4, loads=3)
    assert [row.source for row in rows] == ["blob", "image"]
    printed = capsys.readouterr().out.splitlines()[1:]
    for row, line in zip(rows, printed, strict=True):
        assert row.image_bytes == 2 * elements(everywhere(4))
        assert 0 < row.median_ms <= row.worst_ms
        assert f"{row.median_ms:.1f} ms" in line


def test_an_image_that_is_not_the_adapters_is_refused(tmp_path):
    bench = packing.Bench(tmp_path, SHAPE, rank=4)
    bench.measure("blob", loads=1)
    for image in (tmp_path / "disk").glob("*.*"):
        data = bytearray(image.read_bytes())
        data[-1] ^= 1
        image.write_bytes(data)
    with pytest.raises(AssertionError, match="another image"):
        bench.measure("image", loads=1)
    bench.close()
