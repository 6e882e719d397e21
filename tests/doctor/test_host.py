"""What a container may have counts, and not what its machine has."""

from pathlib import Path

import pytest

from lorikeet.doctor import host

GIB = 1 << 30


def test_a_containers_memory_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    machine = host.this_host()
    assert 0 < machine.available <= machine.memory
    (tmp_path / "memory.max").write_text("max\n")
    assert host.this_host().memory == machine.memory
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB // 2}\n")
    (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {GIB // 4}\nslab 1\n")
    container = host.this_host()
    assert (container.memory, container.available) == (GIB, GIB * 3 // 4)
