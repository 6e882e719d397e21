"""The ring: every reader gets every record, in order, however small the memory is."""

import os
import pickle
import threading
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet_engine.execution.batch_builder import build_step_input
from lorikeet_engine.execution.leading_runner import RunStep
from lorikeet_engine.execution.ranks import ring_bytes
from lorikeet_engine.kernels.attention.protocol import PageTable
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.kv_groups import KvGroups
from lorikeet_engine.parallel.ring import RingReader, RingWriter, SharedMemory
from lorikeet_engine.settings import EngineSettings


def ring(capacity: int, readers: int) -> tuple[RingWriter, list[RingReader]]:
    size = capacity + 8 * readers
    memory = SharedMemory(size)
    pipes = [os.pipe() for _ in range(readers)]
    writer = RingWriter(memory, [wake for _, wake in pipes])
    ends = [
        RingReader(SharedMemory(size, os.dup(memory.fd)), readers, i, woken)
        for i, (woken, _) in enumerate(pipes)
    ]
    return writer, ends


def read_all(reader: RingReader, into: list[bytes]) -> None:
    try:
        while True:
            into.append(reader.read())
    except EOFError:
        pass


@given(st.lists(st.binary(max_size=56), max_size=60), st.integers(64, 90), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_all_readers_read_the_same_records_in_order_through_little_memory(records, capacity, n):
    writer, readers = ring(capacity, n)
    got = [list[bytes]() for _ in readers]
    threads = [
        threading.Thread(target=read_all, args=ends) for ends in zip(readers, got, strict=True)
    ]
    for thread in threads:
        thread.start()
    for record in records:
        writer.write(record)
    writer.close()
    for thread in threads:
        thread.join(10)
    assert got == [records] * n


def test_the_writer_waits_for_the_slowest_reader():
    writer, (quick, slow) = ring(64, 2)
    written = threading.Event()

    def write() -> None:
        writer.write(bytes(40))
        writer.write(bytes(40))
        written.set()

    threading.Thread(target=write, daemon=True).start()
    assert quick.read() == bytes(40)
    assert not written.wait(0.05), "the slow one has not read what lies there"
    assert slow.read() == bytes(40)
    assert written.wait(10)


def test_records_written_before_the_close_are_read():
    writer, (reader,) = ring(64, 1)
    writer.write(b"last")
    writer.close()
    assert reader.read() == b"last"
    with pytest.raises(EOFError):
        reader.read()


def test_a_record_that_never_fits_is_refused():
    writer, _ = ring(64, 1)
    with pytest.raises(ValueError, match="a ring of 64"):
        writer.write(bytes(57))


def test_a_writer_raises_when_its_reader_is_gone():
    writer, (reader,) = ring(64, 1)
    os.close(reader._wake_fd)
    with pytest.raises(BrokenPipeError):
        writer.write(b"")


def test_a_step_of_long_sequences_that_share_pages_of_many_groups_fits(tiny_checkpoints):
    sequences, pages, groups = 256, 8192, 6
    config = replace(
        ModelConfig.from_folder(tiny_checkpoints["llama"]),
        max_context=16 * pages,
        kv_groups=KvGroups(1, (None,) * groups, ()),
    )
    engine = EngineSettings(Path(), Path(), max_running=sequences, page_size=16)
    held, lengths = array("i", range(pages)), np.full(sequences, config.max_context)
    tables = [PageTable.of([held] * sequences, lengths, 16) for _ in range(groups)]
    step = replace(build_step_input([], 16), page_tables=tuple(tables))
    writer, _ = ring(ring_bytes(config, engine), 1)
    writer.write(pickle.dumps([RunStep(step, 0, (), graphs=True)], pickle.HIGHEST_PROTOCOL))
    writer.close()
