"""Return of freed memory to the system."""

import ctypes
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc, or an old one"
)

PREPARED = """
import asyncio, ctypes, pathlib
from lorikeet.serving.freed_memory import trim_freed_memory

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks mapped bytes".split()]
    _fields_ += [(name, ctypes.c_size_t) for name in "usmblks fsmblks used free top".split()]

c = ctypes.CDLL(None)
c.mallinfo2.restype = Info
c.malloc.restype = ctypes.c_void_p
c.free.argtypes = [ctypes.c_void_p]
c.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
"""
STACKS = """
async def main():
    c.free(c.malloc(2**20))  # from now on glibc takes blocks of up to this size from the heap
    giving = {giving}
    await asyncio.sleep(0.1)
    before = c.mallinfo2().mapped
    stacks = [c.malloc(2**18) for _ in range(10)]
    print(c.mallinfo2().mapped - before)

asyncio.run(main())
"""
HOLES = """
def resident_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096

async def main():
    giving = {giving}
    blocks = [c.malloc(2**16) for _ in range(640)]  # 40 MiB
    for block in blocks:
        c.memset(block, 1, 2**16)
    before = resident_bytes()
    for at, block in enumerate(blocks):
        if at % 10:
            c.free(block)
    await asyncio.sleep(0.5)
    print((before - resident_bytes()) // 2**20)

asyncio.run(main())
"""
GIVING = "asyncio.create_task(trim_freed_memory(trim_s=0.1))"


def run(program: str, giving: str) -> int:
    command = [sys.executable, "-c", PREPARED + program.format(giving=giving)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize(("giving", "mapped"), [("None", 0), (GIVING, 10)], ids=["no", "yes"])
def test_stacks_are_mapped_separately(giving: str, mapped: int) -> None:
    assert run(STACKS, giving) == mapped


def test_free_pages_between_used_blocks_are_returned() -> None:
    assert run(HOLES, "None") < 5
    assert run(HOLES, GIVING) > 30
