"""Memory of compiled JSON schemas is bounded, and freed after use."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "demo" / "model"
PROGRAM = """
import json, sys, time
from pathlib import Path
from lorikeet.text.grammars.format_grammar import schema_grammar
from lorikeet.replica.grammar_matcher import ModelGrammars
from lorikeet_engine.sampling import grammar_worker
from lorikeet_engine.sampling.grammar_worker import GrammarWorker

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

def grammar(number, fields):
    field = {"type": "string", "maxLength": 9}
    properties = {f"field_{number}_{i}": field for i in range(fields)}
    return schema_grammar(json.dumps({"type": "object", "properties": properties}))

grammar_worker._UNUSED_S = 2.0
worker = GrammarWorker(ModelGrammars(Path(sys.argv[1])).compile)
worker.result(grammar(0, 1), "acme").result()
before = resident_mib()
for number in range(64):
    worker.result(grammar(number, 600), "acme").result()
at_most = resident_mib()
until_s = time.monotonic() + 20
while resident_mib() > before + 4 and time.monotonic() < until_s:
    time.sleep(0.1)
print(at_most - before, resident_mib() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_a_tenants_64_large_schemas_take_bounded_memory_and_free_it() -> None:
    command = [sys.executable, "-c", PROGRAM, str(DEMO)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    taken_mib, left_mib = map(float, ran.stdout.split())
    assert 10 < taken_mib < 64  # a share of 32; all of them would take 150
    assert left_mib < 8
