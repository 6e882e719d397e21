"""Input of a step: arrays made from chunks, and the batch made from the input."""

from array import array
from dataclasses import fields

import numpy as np
import torch

from lorikeet_engine.execution.batch_builder import build_step_input, group_by_adapter
from lorikeet_engine.execution.warm_up import DummyLease
from lorikeet_engine.request import Request
from lorikeet_engine.scheduling.kv_cache import PageKeys
from lorikeet_engine.scheduling.sequence import Chunk, Sequence

PAGE = 4
CPU = torch.device("cpu")


def sequence_of(prompt, pages, lease=None):
    sequence = Sequence(
        Request("r", (tuple(prompt),)),
        0,
        arrival=0,
        max_tokens=9,
        stop_ids=frozenset(),
        seed=0,
        prompt_keys=PageKeys(prompt, PAGE),
    )
    sequence.kv.pages, sequence.lease = [array("i", pages)], lease
    return sequence


def decoding(prompt, pages, row, lease=None, forced=()):
    """A sequence that decodes from the token sampled in this row of the step before.

    forced: tokens that must follow that token.
    """
    sequence = sequence_of(prompt, pages, lease)
    sequence.kv.computed = len(prompt)
    sequence.add_pending(row, forced)
    return sequence


def test_a_pending_token_comes_from_its_row_of_the_step_before():
    read = sequence_of([5, 6, 7], [2])
    sequences = [decoding([1, 2], [0], row=3), read, decoding([3], [1], row=0)]
    step = build_step_input([Chunk.of(s, 9) for s in sequences], PAGE)
    previous = torch.tensor([40, 41, 42, 43])
    assert step.upload(CPU, previous).token_ids.tolist() == [43, 5, 6, 7, 40]
    assert step.upload(CPU, previous + 1).token_ids.tolist() == [44, 5, 6, 7, 41]
    assert build_step_input([Chunk.of(read, 9)], PAGE).upload(CPU).token_ids.tolist() == [5, 6, 7]


def test_forced_tokens_stand_behind_their_pending_token():
    sequences = [decoding([1, 2], [0, 3], 1, forced=(8, 9)), decoding([3], [1], row=0)]
    step = build_step_input([Chunk.of(s, s.decode_tokens) for s in sequences], PAGE)
    assert step.upload(CPU, torch.tensor([40, 41])).token_ids.tolist() == [41, 8, 9, 40]
    assert step.positions.tolist() == [2, 3, 4, 1]
    assert step.logit_rows.tolist() == [2, 3]


def test_a_chunk_reads_and_writes_the_pages_that_its_tokens_are_in():
    long, short = sequence_of(range(10), [7, 3, 9]), decoding([1] * 4, [5, 2], row=0)
    long.kv.computed = 2
    batch = build_step_input([Chunk.of(long, 4), Chunk.of(short, 1)], PAGE).upload(
        CPU, torch.tensor([1])
    )
    assert batch.positions.tolist() == [2, 3, 4, 5, 4]
    assert batch.kv_slots.tolist() == [[30, 31, 12, 13, 8]]
    assert batch.query_starts.tolist() == [0, 4, 5]
    assert batch.kv_lengths.tolist() == [6, 5]
    (table,) = batch.page_tables
    assert table.starts.tolist() == [0, 2, 4], "the prompt's last page is not in use yet"
    assert table.pages.tolist() == [7, 3, 5, 2]
    assert table.kv_lengths.tolist() == [6, 5]
    assert batch.logit_rows.tolist() == [4], "a chunk in the middle of a prompt samples nothing"


def test_each_adapter_is_one_segment():
    leases = [DummyLease(3, 8), None, DummyLease(1, 16), DummyLease(3, 8)]
    sequences = [sequence_of([1] * (i + 1), [i], lease) for i, lease in enumerate(leases)]
    chunks = group_by_adapter([Chunk.of(s, 9) for s in sequences])
    assert [chunk.length for chunk in chunks] == [3, 1, 4, 2]
    segments = build_step_input(chunks, PAGE).upload(CPU).segments
    columns = (segments.slots, segments.starts, segments.lengths)
    assert [column.tolist() for column in columns] == [[1, 3], [0, 3], [3, 5]]
    assert all(column.is_contiguous() for column in columns), "kernels know of no stride"
    assert segments.max_rank == 16


def test_lm_head_has_segments_over_its_own_rows_where_adapters_change_it():
    leases = [DummyLease(1, 8), DummyLease(5, 8, 4), DummyLease(3, 8, 2), None, DummyLease(5, 8, 4)]
    sequences = [sequence_of([1] * 6, [i, i + 9], lease) for i, lease in enumerate(leases)]
    lengths = (6, 6, 4, 6, 6)  # one sequence has no row of logits yet
    chunks = [Chunk.of(s, length) for s, length in zip(sequences, lengths, strict=True)]
    chunks = group_by_adapter(chunks)
    assert [chunk.sequence.lease and chunk.sequence.lease.slot for chunk in chunks] == [
        3, 5, 5, 1, None,
    ]  # fmt: skip
    batch = build_step_input(chunks, PAGE).upload(CPU)
    heads, layers = batch.head_segments, batch.segments
    assert [c.tolist() for c in (heads.slots, heads.starts, heads.lengths)] == [[5], [0], [2]]
    assert [c.tolist() for c in (layers.slots, layers.starts, layers.lengths)] == [
        [3, 5, 1], [0, 4, 16], [4, 12, 6],
    ]  # fmt: skip
    assert (heads.max_rank, layers.max_rank) == (4, 8)


def test_a_step_whose_adapters_leave_lm_head_alone_has_no_lm_head_segments():
    leases = [DummyLease(1, 8), None]
    chunks = [Chunk.of(sequence_of([1], [i], lease), 1) for i, lease in enumerate(leases)]
    assert build_step_input(chunks, PAGE).upload(CPU).head_segments is None


def test_a_step_input_holds_only_arrays_and_numbers():
    """Such an input can be sent to another process, which learns nothing about tenants."""
    step = build_step_input([Chunk.of(sequence_of([1, 2], [0]), 9)], PAGE)
    values = {field.name: getattr(step, field.name) for field in fields(step)}
    (table,) = values.pop("page_tables")
    assert values.pop("states") is None, "a model without delta nets"
    for value in (*values.values(), table.starts, table.pages, table.kv_lengths):
        assert isinstance(value, np.ndarray | int)


def test_a_windows_page_table_begins_with_the_first_page_that_a_token_sees():
    long, short = sequence_of(range(21), []), sequence_of(range(3), [])
    long.kv.pages = [array("i", [7, 3, 9, 8, 1, 6]), array("i", [20, 21, 22, 23])]
    long.kv.first, long.kv.computed = 2, 17  # token 17 sees tokens from 13 on: not page 2
    short.kv.pages = [array("i", [5]), array("i", [24])]
    chunks = [Chunk.of(long, 3), Chunk.of(short, 3)]
    batch = build_step_input(chunks, PAGE, (None, 5)).upload(CPU)
    assert batch.kv_slots.tolist() == [
        [5, 6, 7, 20, 21, 22],  # tokens 17 to 19 are in page 4
        [89, 90, 91, 96, 97, 98],
    ]
    whole, windowed = batch.page_tables
    assert (whole.starts.tolist(), whole.pages.tolist()) == ([0, 5, 6], [7, 3, 9, 8, 1, 5])
    assert (windowed.starts.tolist(), windowed.pages.tolist()) == ([0, 2, 3], [21, 22, 24])
    assert (whole.kv_lengths.tolist(), windowed.kv_lengths.tolist()) == ([20, 3], [8, 3])
    assert batch.kv_lengths.tolist() == [20, 3]
