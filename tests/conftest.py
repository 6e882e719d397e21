"""Fixtures and settings of all tests: an S3 server, certificates read once, fewer heap walks."""

import functools
import gc
import os
import signal
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx._transports.default as transports
import pytest
from hypothesis import settings

from tests.ceph import radosgw
from tests.ministack import ministack

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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

# A script's background jobs ignore Ctrl-C, as do their children; tests of Ctrl-C send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Of the same random cases each time, the first 30 find what all 100 do; `make soak` tries others.
settings.register_profile("ci", settings.get_profile("ci"), max_examples=30)

gc.disable()  # Off until collection ends: a sixth of its time was walks through imported objects.


def pytest_collection_finish() -> None:
    """Exempt all imported objects from garbage collection.

    Walks through imported objects would be a tenth of the run time. Each walk takes 1 to 2 s, and
    pytest does several when a process ends: the objects stay exempt until then.
    """
    gc.freeze()
    gc.enable()


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


@pytest.fixture(autouse=True, scope="session")
def _parameters_read_once() -> Iterator[None]:
    """Make FastAPI read the type of each parameter once, not for each application: half the
    processor time of building a gateway.
    """
    from fastapi._compat import v2

    built, adapter_of = dict[object, object](), v2.TypeAdapter

    def once(annotated: Any, config: object) -> object:
        key = annotated.__origin__, repr(annotated.__metadata__), repr(config)
        if key not in built:
            built[key] = adapter_of(annotated, config=config)
        return built[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v2, "TypeAdapter", once)
        yield


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


@pytest.fixture(scope="session")
def tokenizer() -> "Tokenizer":
    """Return a tokenizer with one token per byte, so that characters beyond ASCII are split."""
    from tokenizers import Tokenizer  # few test processes need it
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer
