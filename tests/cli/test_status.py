"""status: replicas, and their adapters by tier."""

import json
from dataclasses import replace

import pytest

from lorikeet.cli.service import status as status_module
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.telemetry.status import (
    AdapterStatus,
    EngineStatus,
    HostPageUsage,
    LiveStats,
    StateUsage,
    TierStatus,
)
from tests.cli.conftest import Lorikeet
from tests.placement.builders import held

MIB = 2**20
SUPPORT = AdapterRef("acme", "support", 3, "5" * 64)
SALES = AdapterRef("acme", "sales", 1, "6" * 64)


def replica(name: str, *adapters: AdapterStatus) -> ReplicaReport:
    live = LiveStats(running=2, waiting=1, kv_pages_used=40, kv_pages_total=100)
    gpu = TierStatus(1, 48 * MIB, 64 * MIB, 64 * MIB, 0)
    return ReplicaReport(name, "tiny", EngineStatus(live, {Residency.GPU: gpu}), adapters)


def test_without_replicas_it_says_so(lorikeet: Lorikeet) -> None:
    said = lorikeet.do("status")
    assert "No replica has reported." in said
    assert "No adapter is resident." in said


def test_each_replica_has_a_row(lorikeet: Lorikeet) -> None:
    lorikeet.engines.said = [replica("r1"), replica("r2")]
    rows = [line.split() for line in lorikeet.do("status").splitlines()]
    numbers = ["tiny", "2", "1", "40", "of", "100", "48.0", "MiB", "of", "64.0", "MiB"]
    assert ["r1", *numbers] in rows
    assert ["r2", *numbers] in rows


def test_a_replica_reports_the_format_its_base_model_was_rounded_to(lorikeet: Lorikeet) -> None:
    lorikeet.engines.said = [replace(replica("r1"), quantization="rounded to nf4")]
    assert "tiny (rounded to nf4)" in lorikeet.do("status")
    (said,) = json.loads(lorikeet.do("status", "--json"))["replicas"]
    assert said["base_quantization"] == "rounded to nf4"


def test_a_replica_says_that_its_kv_cache_is_fp8(lorikeet: Lorikeet) -> None:
    lorikeet.engines.said = [replace(replica("r1"), fp8_kv=True), replica("r2")]
    said = lorikeet.do("status")
    assert said.count("40 of 100 in FP8") == 1
    assert said.count("40 of 100") == 2


def test_a_replica_of_a_hybrid_says_how_many_states_it_has(lorikeet: Lorikeet) -> None:
    hybrid = replica("r1")
    usage = StateUsage(2, 7, 12, 1 << 20, 3, 9, 1)
    hybrid = replace(hybrid, status=replace(hybrid.status, states=usage))
    lorikeet.engines.said = [hybrid, replica("r2")]
    assert lorikeet.do("status").count("2 and 7 cached of 12") == 1
    said = json.loads(lorikeet.do("status", "--json"))["replicas"]
    assert [each["states"] for each in said] == [usage._asdict(), None]
    lorikeet.engines.said = [replica("r2")]
    assert "States" not in lorikeet.do("status")


def test_a_replica_says_how_many_kv_pages_its_host_has(lorikeet: Lorikeet) -> None:
    usage = HostPageUsage(30, 400, 1 << 21, 50, 9, 3, 0, 144, on_disk=7, disk_pages=900)
    keeping = replica("r1")
    keeping = replace(keeping, status=replace(keeping.status, host_pages=usage))
    lorikeet.engines.said = [keeping, replica("r2")]
    assert lorikeet.do("status").count("30 of 400; disk: 7 of 900") == 1
    said = json.loads(lorikeet.do("status", "--json"))["replicas"]
    assert [each["host_pages"] for each in said] == [usage._asdict(), None]
    lorikeet.engines.said = [replica("r2")]
    assert "Host KV" not in lorikeet.do("status")


def test_a_replica_says_how_many_gpus_hold_its_base_model(lorikeet: Lorikeet) -> None:
    shared = replica("r1")
    shared = replace(shared, status=replace(shared.status, tensor_parallel=2))
    lorikeet.engines.said = [shared, replica("r2")]
    said = lorikeet.do("status")
    assert said.count("tiny × 2") == 1
    assert said.count("tiny") == 2


def test_each_adapter_says_where_it_is_resident(lorikeet: Lorikeet) -> None:
    lorikeet.engines.said = [
        replica(
            "r1",
            held(SUPPORT, Residency.GPU, 13 * MIB, leases=2, pinned=True),
            held(SALES, Residency.DISK),
        ),
        replica("r2", held(SUPPORT, Residency.HOST)),
    ]
    said = lorikeet.do("status")
    assert "Arena" in said  # not to be taken for the size of the file
    rows = [line.split() for line in said.splitlines()]
    assert ["acme/support@3", "r1*", "r2", "–", "13.0", "MiB", "2"] in rows
    assert ["acme/sales@1", "–", "–", "r1", "–", "0"] in rows


def test_a_view_that_the_store_does_not_confirm_is_called_stale(
    lorikeet: Lorikeet, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "stale" not in lorikeet.do("status")
    monkeypatch.setattr(status_module, "_FRESH_S", -1.0)
    assert "stale: the store last answered" in lorikeet.do("status")


def test_json_is_the_whole_answer(lorikeet: Lorikeet) -> None:
    lorikeet.engines.said = [replica("r1")]
    said = json.loads(lorikeet.do("status", "--json"))
    assert said["catalog_seq"] == lorikeet.catalog.reader.state.seq
    assert [report["replica"] for report in said["replicas"]] == ["r1"]
