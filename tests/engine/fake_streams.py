"""Stand-ins for CUDA's streams and events, with vector clocks.

They find a race on a CPU whether or not it would have had an effect in this run.
"""

import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lorikeet_engine.residency.gpu import arena, image_copies

Clock = Counter[str]


class Stream:
    """Stream whose next operation comes after everything that its clock counts."""

    def __init__(self, name: str) -> None:
        self.name, self.device = name, torch.device("cpu")
        self.clock = Clock()

    def wait_event(self, event: "Event") -> None:
        self.clock |= event.clock

    def wait_stream(self, stream: "Stream") -> None:
        self.clock |= stream.clock


class Event:
    """Event with the clock of its stream at the time of recording."""

    def __init__(self, computing: Stream, lasts_s: float) -> None:
        self.clock = Clock()
        self._computing, self._lasts_s = computing, lasts_s

    def record(self, stream: Stream) -> None:
        self.clock = stream.clock.copy()

    def synchronize(self) -> None:
        """Make the host wait, so that its later launches come after this event."""
        time.sleep(self._lasts_s)
        self._computing.wait_event(self)


@dataclass
class Access:
    """Access of a stream, at its tick, to bytes `begin` to `end` of the arena."""

    stream: str
    tick: int
    writes: bool
    begin: int
    end: int


class Streams(TorchDispatchMode):
    """Two streams; fails on an access to the arena that may coincide with one of the other stream.

    copy_s: seconds that the host waits for a copy.
    """

    def __init__(self, arena: torch.Tensor, copy_s: float = 0.0) -> None:
        super().__init__()
        self.copy_s = copy_s
        self.computing, self.copying = Stream("computing"), Stream("copying")
        self.current = self.computing
        self._memory = arena.untyped_storage().data_ptr()
        self._accesses: list[Access] = []

    def stand_in(self, monkeypatch) -> None:
        """Make every DeviceArena that is created from now on use these streams."""
        cuda = SimpleNamespace(
            Stream=lambda _device: self.copying,
            Event=lambda blocking=False: Event(self.computing, self.copy_s),
            current_stream=lambda _device: self.current,
            stream=self.use,
        )
        for module in (arena, image_copies):
            monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=cuda, split=torch.split))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.access(args[1], writes=False)
            self.access(args[0], writes=True)
        elif func is torch.ops.aten.clone.default:
            self.access(args[0], writes=False)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def use(self, stream: Stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def access(self, tensor: torch.Tensor, *, writes: bool) -> None:
        if tensor.untyped_storage().data_ptr() != self._memory:
            return
        stream, begin = self.current, tensor.storage_offset() * tensor.itemsize
        stream.clock[stream.name] += 1
        new = Access(stream.name, stream.clock[stream.name], writes, begin, begin + tensor.nbytes)
        for old in self._accesses:
            apart = old.end <= new.begin or new.end <= old.begin
            ordered = old.stream == new.stream or old.tick <= stream.clock[old.stream]
            assert apart or ordered or not (old.writes or writes), f"{new} races with {old}"
        self._accesses.append(new)
