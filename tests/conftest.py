"""Fixtures and settings of all tests: an S3 server, certificates read once, fewer heap walks."""

import functools
import gc
import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterator

import httpx._transports.default as transports
import pytest

from tests.ceph import radosgw
from tests.ministack import ministack

# Several tests run at a time: more threads of torch would only compete for the same cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray reads these when it is imported: tests run with the values of the Makefile and of k8s.
os.environ.setdefault("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1")
os.environ.setdefault("RAY_SERVE_PROXY_USE_GRPC", "1")
os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "0")  # as make serve
os.environ.setdefault("RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", str(2**27))
os.environ.setdefault(
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "lorikeet.serving.proxy_middleware:middlewares"
)

_ADDITIONS = compile("x = 0\nfor i in range(1_000_000):\n    x += i", __file__, "exec")
_ADDITIONS_S = 0.085
_WALK_S = 0.11

# A script's background jobs ignore Ctrl-C, as do their children; tests of Ctrl-C send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # Off until collection ends: a sixth of its time was walks through imported objects.


def pytest_collection_finish() -> None:
    """Exempt all imported objects from garbage collection, which is a tenth of the run time."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked gpu without a CUDA device, before their fixtures are set up."""
    if item.get_closest_marker("gpu") is not None:
        import torch  # imported here, as the platform's tests need no torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True, scope="session")
def _certificates_read_once() -> Iterator[None]:
    """Make httpx read certificates once, not for each client: 20 ms a request, even without TLS."""
    with pytest.MonkeyPatch.context() as patch:
        once = functools.cache(transports.create_ssl_context)
        patch.setattr(transports, "create_ssl_context", once)
        yield


@pytest.fixture
def slowdown() -> Callable[[], float]:
    """Factor, at least 1, by which this machine is slower now than the machine on which time bounds
    were set.

    Tests with an absolute bound on processor time multiply the bound by slowdown(), called
    after the timed code. A host gives a virtual machine more or less speed from hour to hour,
    and its processor time counts both alike. Measured: a million additions at a module's level
    took 0.085 s when the bounds were set, and on another day 0.114 to 0.15 on the same machine
    with nothing else to do; a scrape of tests/metrics/test_size.py took 0.06 to 0.09 s and then
    0.113 to 0.123, and a choice of tests/routing/test_choice_time.py 0.3 ms and then 0.34 to
    0.57.

    On a third day additions took 0.06 s, a scrape 0.107 to 0.136 and a choice 0.33 to 0.50 ms:
    reads of memory were slow. So a walk over objects is timed as well, which took 0.17 to 0.19
    s that day; its time when the bounds were set is unknown, and _WALK_S is a guess.
    """
    before = _slowness()
    return lambda: max(1.0, (before + _slowness()) / 2)


def _slowness() -> float:
    """Return the larger ratio of time now to time then, for additions and for a walk over
    objects.
    """
    began_s = time.thread_time()
    exec(_ADDITIONS, {})
    added_s = time.thread_time()
    keys = [str(number) for number in range(200_000)]
    random.Random(1).shuffle(keys)  # neighbours lie apart in memory
    walk_s = min(_walk_s(keys) for _ in range(2))  # the first walk also allocates the memory
    return max((added_s - began_s) / _ADDITIONS_S, walk_s / _WALK_S)


def _walk_s(keys: list[str]) -> float:
    began_s = time.thread_time()
    objects = {key: (key, 1.0) for key in keys}
    assert sum(objects[key][1] for key in keys) == len(sorted(keys))
    return time.thread_time() - began_s


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """Yield the s3:// URL of an empty bucket; AWS_ variables lead boto3 to its server.

    The server is MiniStack, or with TEST_S3=radosgw Ceph's.
    """
    import boto3
    from botocore.loaders import create_loader

    bucket = f"lorikeet-{uuid.uuid4().hex[:12]}"
    ceph = os.environ.get("TEST_S3") == "radosgw"
    server = radosgw("test", "test") if ceph else ministack()
    with server as address, pytest.MonkeyPatch.context() as environment:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
            environment.delenv(name, raising=False)
        environment.setenv("AWS_ENDPOINT_URL_S3", address)
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        # Otherwise each store reads botocore's descriptions of its services again.
        environment.setattr("botocore.session.create_loader", functools.cache(create_loader))
        boto3.session.Session().client("s3").create_bucket(Bucket=bucket)
        yield f"s3://{bucket}"
