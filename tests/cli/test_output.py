"""How tables fit into terminals that are too narrow for them."""

import pytest

from lorikeet.cli.output import print_table

COLUMNS = ["Adapter", *(f"#Number {n}" for n in range(8))]
ROW = ["acme/a-rather-long-name-of-an-adapter@12", *(f"{n}80.0 KiB" for n in range(8))]


@pytest.mark.parametrize("columns", ["20", "60", "80", "200"])
def test_no_number_is_cut(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    print_table(COLUMNS, [ROW], empty="")
    shown = capsys.readouterr().out
    for number in range(8):
        assert f"{number}80.0 KiB" in shown
        assert f"Number {number}" in shown


def test_the_id_of_a_key_can_be_copied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    row = ["key-116cd19d3b37d460", "ci", "acme", "infer", "2026-11-27 09:09", "–", ""]
    print_table(
        ["Id", "Name", "Tenant", "Scopes", "Since (UTC)", "Expires (UTC)", "State"], [row], empty=""
    )
    assert "key-116cd19d3b37d460" in capsys.readouterr().out


def test_a_table_that_fits_is_no_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "66")  # 20, 8 × (4 + 1) and 3 spaces to the sides
    narrow = ["Name", *(f"#N{n}" for n in range(4))]
    print_table(narrow, [["a" * 40, *["12345678"] * 4]], empty="")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 66
    assert sum(line.count("a") for line in lines) == 40 + 1  # Name's own
