"""Parsing and formatting of sizes for settings, commands, files and the doctor."""

import pytest

from lorikeet.cli.arguments import parse_bytes
from lorikeet.settings import Settings
from lorikeet.sizes import parse_size, show_size, write_size

MIB, GIB, TIB = 2**20, 2**30, 2**40


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        (4096, 4096),
        ("4096B", 4096),
        ("3KB", 3000),
        ("512MiB", 512 * MIB),
        ("512 mib", 512 * MIB),
        (" 1.5GiB ", 3 * 2**29),
        ("2GB", 2 * 10**9),
        ("2.5GiB", 5 * 2**29),
        ("1TiB", TIB),
        ("1.5TB", 15 * 10**11),
        ("0.1MB", 100_000),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_a_size_is_parsed_alike_everywhere(given, size):
    assert parse_size(given) == size
    assert parse_bytes(str(given)) == size
    assert Settings.from_env({"LORIKEET_ADAPTER_DISK": str(given)}).adapter_disk == size


@pytest.mark.parametrize(
    "given", ["", "four", "1.2.3MiB", "-1GiB", "1e9", "2PiB", "GiB", "1,5GiB", "٣GiB", "9" * 40]
)
def test_an_invalid_size_is_refused_with_an_example(given):
    with pytest.raises(ValueError, match="want a size such as 512MiB or 2GiB"):
        parse_size(given)


@pytest.mark.parametrize("given", ["0", "0GiB", "0.1B"])
def test_a_size_below_one_byte_is_refused(given):
    with pytest.raises(ValueError, match="at least 1 byte"):
        parse_size(given)


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (None, None),
        (0, "0 B"),
        (512, "512 B"),
        (1024, "1.0 KiB"),
        (137 * 2**17, "17.1 MiB"),
        (3 * TIB, "3.0 TiB"),
        (3000 * TIB, "3000.0 TiB"),
    ],
)
def test_a_size_is_displayed_in_the_largest_unit_that_it_reaches(count, shown):
    assert show_size(count) == shown


@pytest.mark.parametrize(
    ("count", "written"),
    [(1000, "1000"), (1536, "1536"), (2048, "2KiB"), (1536 * MIB, "1536MiB"), (3 * TIB, "3TiB")],
)
def test_a_size_is_written_to_files_without_rounding(count, written):
    assert write_size(count) == written
    assert parse_size(written) == count
