"""Ahead of a start: each fault that no start survives refuses it, and no other does."""

import shutil
import socket
from collections.abc import Callable

import pytest

from loadtest.ports import free_port
from lorikeet.catalog.kept_view import KeptView
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.store.object_store import open_store
from lorikeet.doctor.finding import Finding
from lorikeet.doctor.machine import Cuda, Gpu
from lorikeet.doctor.refusals import refusals
from tests.doctor.conftest import GIB, H100, Patient, variable

NOWHERE = {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}


def refused(patient: Patient, **changes: object) -> Finding:
    """Return the one refusal of a changed patient."""
    (fault,) = refusals(patient.planned(**changes))
    return fault


def test_a_start_without_faults_is_not_refused(patient: Patient) -> None:
    assert refusals(patient.planned()) == []


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("REPLICAS", "two", "LORIKEET_REPLICAS"),
        ("REPLICS", "2", "did you mean LORIKEET_REPLICAS"),
        ("BASE_MODELS", "lorikeet-demo=/nowhere", "/nowhere"),
        ("DEVICE", "cuda", "torch is built for the CPU"),
        ("TENSOR_PARALLEL", "3", "num_attention_heads=4"),
        ("MAX_CONTEXT", "1000000", "max_context"),
        ("ADMIN_ADDRESS", "192.0.2.1:{port}", "LORIKEET_ADMIN_ADDRESS"),
    ],
)
def test_a_wrong_setting_refuses_the_start(
    patient: Patient, name: str, value: str, named: str
) -> None:
    fault = refused(patient, **variable(name, value.format(port=free_port())))
    assert named in fault.message
    assert fault.fix


def test_too_few_gpus_refuse_the_start(patient: Patient) -> None:
    cuda = Cuda((H100,), (13, 0), (13, 0))
    assert "1 (NVIDIA H100), 2 needed" in refused(patient, cuda=cuda).message


def test_a_model_without_whole_weights_refuses_the_start(patient: Patient) -> None:
    weights = patient.model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:10_000])
    assert "model.safetensors" in refused(patient).message


def test_a_cache_folder_that_is_a_file_refuses_the_start(patient: Patient) -> None:
    file = patient.model / "config.json"
    assert f"{file} is no folder" in refused(patient, **variable("CACHE_DIR", str(file))).message


def test_a_taken_port_refuses_the_start(patient: Patient) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", patient.http_port))
        other.listen()
        assert str(patient.http_port) in refused(patient).message


def test_a_folder_or_prefix_without_a_catalog_refuses_the_start(patient: Patient) -> None:
    prefix = f"{patient.environ['LORIKEET_CATALOG']}-other"
    for url in (prefix, str(patient.model / "catalog")):
        fault = refused(patient, **variable("CATALOG", url))
        assert fault.message == f"there is no catalog at {url}"
        assert "correct LORIKEET_CATALOG, or `lorikeet init`" in fault.fix


def test_an_absent_bucket_refuses_the_start(patient: Patient) -> None:
    fault = refused(patient, **variable("CATALOG", "s3://no-such-bucket/lorikeet"))
    assert "bucket 'no-such-bucket' does not exist" in fault.message


@pytest.fixture
def cut_off(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Function that takes the store away."""

    def cut() -> None:
        for name, value in NOWHERE.items():
            monkeypatch.setenv(name, value)

    return cut


def test_a_store_that_is_away_refuses_a_first_start(
    patient: Patient, cut_off: Callable[[], None]
) -> None:
    cut_off()
    fault = refused(patient)
    assert "Could not connect" in fault.message
    assert "AWS_ENDPOINT_URL_S3" in fault.fix


def test_a_store_that_is_away_refuses_no_start_where_a_view_of_the_catalog_is_kept(
    patient: Patient, cut_off: Callable[[], None]
) -> None:
    store = open_store(patient.environ["LORIKEET_CATALOG"])
    KeptView(patient.planned().settings.cache_dir, store.url).write(CatalogReader(store).refresh())
    cut_off()
    assert refusals(patient.planned()) == []


def test_faults_that_a_start_survives_do_not_refuse_it(patient: Patient) -> None:
    """Such as a driver without a torch for it, a small disk, and adapters beyond a new limit."""
    unused = Cuda(driver=(13, 0))
    assert refusals(patient.planned(cuda=unused, **variable("ADAPTER_DISK", "1000TiB"))) == []
    assert refusals(patient.planned(**variable("MAX_RANK", "1"))) == []
    (patient.model / "chat_template.jinja").unlink(missing_ok=True)
    shutil.rmtree(patient.planned().settings.cache_dir, ignore_errors=True)
    assert refusals(patient.planned()) == []


def test_gpus_that_are_too_few_only_after_scaling_up_do_not_refuse_a_start(
    patient: Patient,
) -> None:
    cuda = Cuda((H100, Gpu("NVIDIA H100", 80 * GIB, 79 * GIB)), (13, 0), (13, 0))
    assert refusals(patient.planned(cuda=cuda, **variable("MAX_REPLICAS", "4"))) == []
