"""Keys that `lorikeet serve` makes: once, in files of the user alone."""

from pathlib import Path

import pytest

from lorikeet.cli.serve.keys import KeyFiles, keys_folder, open_or_make_catalog


def files(tmp_path: Path) -> KeyFiles:
    """Return the keys as another start finds them."""
    return KeyFiles(open_or_make_catalog(str(tmp_path / "catalog")), tmp_path / "keys")


def test_keys_are_made_once(tmp_path: Path) -> None:
    first = files(tmp_path)
    made = first.admin(), first.tenant("local")
    assert first.new == [first.admin_file, first.tenant_file("local")]
    again = files(tmp_path)
    assert (again.admin(), again.tenant("local")) == made
    assert again.new == []


def test_no_other_user_can_read_the_keys(tmp_path: Path) -> None:
    keys = files(tmp_path)
    keys.admin()
    keys.tenant("local")
    for path in (tmp_path / "keys").rglob("*"):
        mode = path.stat().st_mode & 0o777
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert (tmp_path / "keys").stat().st_mode & 0o077 == 0


def test_a_revoked_key_is_replaced(tmp_path: Path) -> None:
    keys = files(tmp_path)
    keys.admin()
    before = keys.tenant("local")
    catalog = open_or_make_catalog(str(tmp_path / "catalog"))
    (record,) = catalog.reader.ask(lambda state: state.keys("local"))
    catalog.revoke_key(record.id, actor="test")
    assert files(tmp_path).tenant("local") != before


def test_a_key_of_another_tenant_is_not_taken(tmp_path: Path) -> None:
    keys = files(tmp_path)
    keys.tenant_file("acme").parent.mkdir(parents=True)
    keys.tenant_file("acme").write_text(keys.tenant("local"))
    assert keys.tenant("acme") != keys.tenant("local")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        (".lorikeet/catalog", "catalog"),
        ("/data/own/", "own"),
        ("s3://bucket/team/prod", "bucket-team-prod"),
    ],
)
def test_each_catalog_has_a_folder_of_keys(url: str, name: str) -> None:
    assert keys_folder(url) == Path(".lorikeet/keys") / name
