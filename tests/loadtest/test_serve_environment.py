"""Environment of a load program's service equals the product's, however the program is started."""

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest

from loadtest import cluster

_SHOW = """
import loadtest.{program}
from ray.serve._private.handle_options import DynamicHandleOptions
print(DynamicHandleOptions()._by_reference)
"""


@pytest.mark.parametrize("program", ["bench_http", "bench_gateway"])
def test_gateways_call_replicas_by_grpc_without_the_makefile(program):
    environment = {name: value for name, value in os.environ.items() if "RAY_" not in name}
    show = [sys.executable, "-c", _SHOW.format(program=program)]
    shown = subprocess.run(show, env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"


def test_processes_of_a_cluster_find_the_packages_of_their_program(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # a folder that might hold Ray
    monkeypatch.setattr(cluster, "_ray", nullcontext)
    monkeypatch.setattr(cluster.serve, "start", lambda **_: None)
    with cluster.cluster():
        path = os.environ["PYTHONPATH"].split(os.pathsep)
    assert {str(cluster.ROOT), str(tmp_path)} <= set(path)
