"""Memory of a device that moves between two address ranges: the adapters' arena and the KV pages.

    arena   | unit 0 | unit 1 | unit 2 |   no memory    |     one unit: `rows` granules in a row
    row 0   | unit 0 |  none  | unit 2 |  none  |  none |     one unit: a granule in each row
    row 1   | unit 0 |  none  | unit 2 |  none  |  none |

Rows are the planes of the KV tensor: the keys or the values of one piece of a page. Both ranges are
reserved once, as large as each may become, so addresses stay the same and captured graphs stay
valid. On CUDA, memory is created once and mapped where it is needed (CUDA driver API, section
Virtual Memory Management). On a CPU both ranges have memory everywhere, and a move only spoils what
a GPU would lose.
"""

import ctypes
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

GRANULES = {"cuda": 2 << 20, "cpu": 64 << 10}
"""Bytes of the smallest memory that moves, by the kind of device."""


@dataclass(frozen=True, slots=True)
class BorderUnit:
    """Memory that moves at once, on one device.

    rows: number of planes of the KV tensor.
    row_bytes: bytes of the unit in each row, whole granules.
    pages: number of KV pages of the unit.
    """

    rows: int
    row_bytes: int
    pages: int

    @classmethod
    def of(cls, rows: int, page_bytes: int, device: str) -> "BorderUnit":
        """Return the smallest unit that has whole pages and whole granules.

        rows: number of planes of the KV tensor.
        page_bytes: bytes of a page in each plane.
        device: kind of device, cuda or cpu.
        """
        row_bytes = math.lcm(page_bytes, GRANULES[device.partition(":")[0]])
        return cls(rows, row_bytes, row_bytes // page_bytes)

    @property
    def bytes(self) -> int:
        """Bytes of the unit."""
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class MoveUnit:
    """Command to move one unit of memory, in all ranks.

    number: identifies the move in reports.
    to_kv: whether the KV pages get the unit; else the arena gets it.
    arena_unit, kv_unit: number of the unit in the arena, and in the KV tensor.
    """

    number: int
    to_kv: bool
    arena_unit: int
    kv_unit: int


class BorderMemory:
    """The two ranges of one device; on a CPU, two tensors.

    unit: memory that moves at once.
    """

    def __init__(self, unit: BorderUnit, device: torch.device) -> None:
        self.unit, self._device = unit, device
        self._arena = self._kv = torch.empty(0, dtype=torch.uint8)

    def allocate_arena(self, units: int, most: int) -> torch.Tensor:
        """Return the arena's range, [bytes of `most` units] uint8, of which the first `units` have
        memory, which is zero.
        """
        self._arena = self._allocate(units, most)
        self._arena[: units * self.unit.bytes].zero_()
        return self._arena

    def allocate_kv(self, units: int, most: int) -> torch.Tensor:
        """Return the KV pages' range, [rows, row_bytes of `most` units] uint8, of which the first
        `units` of each row have memory, which is zero.
        """
        self._kv = self._allocate(units, most).view(self.unit.rows, -1)
        self._kv[:, : units * self.unit.row_bytes].zero_()
        return self._kv

    def move(self, move: MoveUnit) -> Callable[[], None]:
        """Prepare a move, to run after all steps launched so far, which may use the memory.

        Returns a function that waits for these steps and moves the memory. The KV pages get zeros.
        On CUDA it is to be called on another thread.
        """
        return partial(self._move, move)

    def close(self) -> None:
        """Give the memory back. No tensor of the ranges may be used any more."""
        self._arena = self._kv = torch.empty(0, dtype=torch.uint8)

    def _allocate(self, units: int, most: int) -> torch.Tensor:
        """Return a range of `most` units as bytes, of which the first `units` must have memory."""
        assert units <= most, "more memory than addresses"
        return torch.zeros(most * self.unit.bytes, dtype=torch.uint8, device=self._device)

    def _move(self, move: MoveUnit) -> None:
        spoilt = self._of_arena(move.arena_unit) if move.to_kv else self._of_kv(move.kv_unit)
        spoilt.fill_(255)  # as floats, these bytes are NaN
        if move.to_kv:
            self._of_kv(move.kv_unit).zero_()

    def _of_arena(self, unit: int) -> torch.Tensor:
        return self._arena[unit * self.unit.bytes :][: self.unit.bytes]

    def _of_kv(self, unit: int) -> torch.Tensor:
        return self._kv[:, unit * self.unit.row_bytes :][:, : self.unit.row_bytes]


class CudaBorderMemory(BorderMemory):
    """BorderMemory of a GPU, mapped by the driver."""

    def __init__(self, unit: BorderUnit, device: torch.device) -> None:
        super().__init__(unit, device)
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._device = torch.device("cuda", index)
        torch.cuda.synchronize(self._device)  # makes the device's context
        self._driver = _Driver(index)
        self._moving = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._ranges = list[tuple[int, int]]()  # address and bytes of each
        self._handles = list[int]()  # of all memory, `row_bytes` each
        self._mapped: dict[int, int] = {}  # address → handle of the memory mapped there
        self._lock = threading.Lock()  # a move and `close` exclude each other

    def close(self) -> None:
        """Give the memory back. No tensor of the ranges may be used any more; later moves fail."""
        with self._lock:
            super().close()
            torch.cuda.synchronize(self._device)
            for address in self._mapped:
                self._driver.unmap(address, self.unit.row_bytes)
            for handle in self._handles:
                self._driver.release(handle)
            for address, size in self._ranges:
                self._driver.free(address, size)
            self._mapped.clear()
            self._handles.clear()
            self._ranges.clear()

    def _allocate(self, units: int, most: int) -> torch.Tensor:
        size = most * self.unit.bytes
        self._ranges.append((self._driver.reserve(size), size))
        for unit in range(units):
            created = len(self._handles)
            for _ in range(self.unit.rows):
                self._handles.append(self._driver.create(self.unit.row_bytes))
            self._map(len(self._ranges) - 1, unit, self._handles[created:])
        return torch.as_tensor(_Range(self._ranges[-1][0], size), device=self._device)

    def _places(self, which: int, unit: int) -> Iterator[tuple[int, int]]:
        """Yield address and bytes of the parts of a unit that lie together.

        which: 0 for the arena, 1 for the KV pages.
        """
        (address, size), of = self._ranges[which], self.unit
        if which == 0:
            yield address + unit * of.bytes, of.bytes
            return
        for row in range(of.rows):
            yield address + row * (size // of.rows) + unit * of.row_bytes, of.row_bytes

    def _map(self, which: int, unit: int, handles: list[int]) -> None:
        size, left = self.unit.row_bytes, iter(handles)
        for begin, length in self._places(which, unit):
            for address in range(begin, begin + length, size):
                handle = next(left)
                self._driver.map(address, size, handle)
                self._mapped[address] = handle
            self._driver.allow(begin, length)

    def _unmap(self, which: int, unit: int) -> list[int]:
        """Take the memory of a unit's addresses away; return its handles."""
        handles = list[int]()
        for begin, length in self._places(which, unit):
            self._driver.unmap(begin, length)
            addresses = range(begin, begin + length, self.unit.row_bytes)
            handles += [self._mapped.pop(address) for address in addresses]
        return handles

    def move(self, move: MoveUnit) -> Callable[[], None]:
        """Prepare a move, as BorderMemory.move does."""
        launched = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        launched.record(torch.cuda.current_stream(self._device))
        return partial(self._move_behind, move, launched)

    def _move_behind(self, move: MoveUnit, launched: torch.cuda.Event) -> None:
        launched.synchronize()
        source, target = (0, 1) if move.to_kv else (1, 0)
        units = move.arena_unit, move.kv_unit
        with self._lock:
            self._map(target, units[target], self._unmap(source, units[source]))
            if move.to_kv:
                with torch.cuda.stream(self._moving):
                    self._of_kv(move.kv_unit).zero_()
                self._moving.synchronize()


def border_memory(unit: BorderUnit, device: torch.device) -> BorderMemory:
    """Return the memory of a device that moves between arena and KV pages, without any yet."""
    return (CudaBorderMemory if device.type == "cuda" else BorderMemory)(unit, device)


def can_move(device: torch.device) -> bool:
    """Return whether memory of a device can move: on CUDA, whether the driver maps memory."""
    if device.type != "cuda":
        return device.type == "cpu"
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _Driver.maps_memory(index)


@dataclass(frozen=True, slots=True)
class _Range:
    """Range of device addresses, as torch.as_tensor takes it."""

    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        shape, data = (self.size,), (self.address, False)
        return {"shape": shape, "typestr": "|u1", "data": data, "strides": None, "version": 3}


class _Location(ctypes.Structure):
    """CUmemLocation: a device."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp: memory to create."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc: a device that may use mapped memory."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Driver:
    """Calls of NVIDIA's driver that map memory of one device; each raises RuntimeError if it fails.

    ctypes lets other threads of Python run during a call.
    """

    _PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3  # of the enums CUmem…
    _MAPS_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    _OUT_OF_MEMORY = 2

    def __init__(self, index: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        location = _Location(self._ON_DEVICE, index)
        self._properties = _Properties(self._PINNED, 0, location)
        self._access = _Access(location, self._READ_WRITE)

    @classmethod
    def maps_memory(cls, index: int) -> bool:
        """Return whether the driver can map memory of a device."""
        try:
            cuda, found, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
        except OSError:
            return False
        if cuda.cuDeviceGet(ctypes.byref(device), index):
            return False
        status = cuda.cuDeviceGetAttribute(ctypes.byref(found), cls._MAPS_MEMORY, device)
        return status == 0 and found.value == 1

    def reserve(self, size: int) -> int:
        """Reserve a range of addresses and return its begin."""
        address = ctypes.c_uint64()
        self._call(
            "cuMemAddressReserve", ctypes.byref(address), _size(size), _size(0), _u64(0), _u64(0)
        )
        return address.value

    def free(self, address: int, size: int) -> None:
        """Give a range of addresses back, which must have no memory."""
        self._call("cuMemAddressFree", _u64(address), _size(size))

    def create(self, size: int) -> int:
        """Create memory of whole granules and return its handle."""
        handle = ctypes.c_uint64()
        properties = ctypes.byref(self._properties)
        self._call("cuMemCreate", ctypes.byref(handle), _size(size), properties, _u64(0))
        return handle.value

    def release(self, handle: int) -> None:
        """Give memory back once it is mapped nowhere."""
        self._call("cuMemRelease", _u64(handle))

    def map(self, address: int, size: int, handle: int) -> None:
        """Map memory to an address."""
        self._call("cuMemMap", _u64(address), _size(size), _size(0), _u64(handle), _u64(0))

    def unmap(self, address: int, size: int) -> None:
        """Take the memory of an address range away. Nothing on the device may use it any more."""
        self._call("cuMemUnmap", _u64(address), _size(size))

    def allow(self, address: int, size: int) -> None:
        """Let the device read and write mapped memory."""
        access = ctypes.byref(self._access)
        self._call("cuMemSetAccess", _u64(address), _size(size), access, _size(1))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status == self._OUT_OF_MEMORY:
            raise RuntimeError(f"{name}: out of memory")
        if status:
            raise RuntimeError(f"{name} failed with CUDA driver error {status}")


_size, _u64 = ctypes.c_size_t, ctypes.c_uint64
