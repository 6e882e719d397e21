"""Tables in terminals that are too narrow for them."""

import pytest

from lorikeet.cli.output import print_table

COLUMNS = ["Adapter", *(f"#Number {n}" for n in range(8))]
ROW = ["acme/a-rather-long-name-of-an-adapter@12", *(f"{n}80.0 KiB" for n in range(8))]


@pytest.mark.parametrize("columns", ["20", "60", "80", "200"])
def test_numbers_are_never_truncated(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    print_table(COLUMNS, [ROW], empty="")
    shown = capsys.readouterr().out
    for number in range(8):
        assert f"{number}80.0 KiB" in shown
        assert f"Number {number}" in shown


def test_ids_are_never_split(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_table(["Id", "Why"], [["key-43b682f1b520d414", "the launch is on Monday " * 3]], empty="")
    lines = capsys.readouterr().out.splitlines()
    assert any("key-43b682f1b520d414" in line for line in lines)
    assert max(map(len, lines)) <= 40


def test_output_to_a_program_has_one_line_per_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table(["Id", "Why"], [["a" * 90, "the launch is on Monday " * 9]], empty="")
    row = capsys.readouterr().out.splitlines()[3]
    assert row.split() == ["a" * 90, *("the launch is on Monday " * 9).split()]


def test_a_table_that_fits_is_no_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "66")  # 20, 8 × (4 + 1) and 3 spaces to the sides
    narrow = ["Name", *(f"#N{n}" for n in range(4))]
    print_table(narrow, [["a" * 40, *["12345678"] * 4]], empty="")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 66
    assert sum(line.count("a") for line in lines) == 40 + 1  # Name's own
