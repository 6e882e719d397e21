"""Steps never ask a file system: a slow one would delay every token."""

import os
import threading
from contextlib import contextmanager

import pytest

from lorikeet_engine.adapter import Residency
from tests.engine.blobs import Shelf
from tests.engine.engine_driver import Answers, greedy
from tests.engine.hash_model import SHAPE, build

_CALLS = ("access", "fstat", "listdir", "open", "stat", "utime")


@contextmanager
def refused_file_system():
    """Refuse file system calls of `os` on this thread, inside."""
    engines = threading.current_thread()
    with pytest.MonkeyPatch.context() as patch:
        for name in _CALLS:
            call = getattr(os, name)

            def checked(*args, _call=call, _name=name, **kwargs):
                assert threading.current_thread() is not engines, f"os.{_name} in a step"
                return _call(*args, **kwargs)

            patch.setattr(os, name, checked)
        yield


def test_steps_with_many_cold_adapters_and_pins_never_touch_the_disk(tmp_path):
    shelf = Shelf(tmp_path / "blobs")
    refs = [shelf.make(f"{i}", {(0, 0): 4}, shape=SHAPE) for i in range(60)]
    engine, _ = build(tmp_path, shelf, kv_pages=4000, adapter_gpu_bytes=2000, max_running=8)
    answers = Answers(engine)
    with refused_file_system():
        for i, ref in enumerate(refs):
            answers.submit(greedy(f"{i}", [3, 4, 5 + i % 50], adapter=ref, max_tokens=3))
        for ref in refs[::7]:
            engine.pin(ref, Residency.DISK)
        answers.all()
    assert not answers.errors
    assert all(engine.residency(ref) >= Residency.DISK for ref in refs)
    engine.close()
