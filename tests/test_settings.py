import re
from pathlib import Path

import pytest

from lorikeet.errors import InvalidSetting
from lorikeet.settings import Settings


def test_without_variables_the_settings_serve_the_demo_from_local_folders():
    settings = Settings.from_env({})
    assert settings.base_models == {"lorikeet-demo": Path("demo/model")}
    assert settings.catalog == ".lorikeet/catalog"


def test_memory_is_given_as_a_size_or_as_a_share():
    given = {"LORIKEET_KV_CACHE_MEMORY": "70%", "LORIKEET_ADAPTER_GPU_MEMORY": "1.5GiB"}
    settings = Settings.from_env(given)
    assert settings.kv_cache_memory == pytest.approx(0.7)
    assert settings.adapter_gpu_memory == 3 * 2**29


def test_the_default_memory_depends_on_the_device():
    assert Settings.from_env({}).kv_cache_memory == "auto"
    assert Settings.from_env({"LORIKEET_KV_CACHE_MEMORY": "auto"}).kv_cache_memory == "auto"


@pytest.mark.parametrize(
    ("given", "host"),
    [("0.0.0.0:80", "0.0.0.0"), ("[::1]:80", "::1"), ("admin.lan:80", "admin.lan")],
)
def test_an_address_has_a_host_and_a_port(given, host):
    address = Settings.from_env({"LORIKEET_ADMIN_ADDRESS": given}).admin_address
    assert (address.host, address.port, str(address)) == (host, 80, given)


@pytest.mark.parametrize("place", ["s3://bucket", "s3://bucket/a/b/", "/srv/a:/b", "c", "~/c"])
def test_a_catalog_is_a_bucket_or_a_folder(place):
    assert Settings.from_env({"LORIKEET_CATALOG": place}).catalog == place


def test_max_replicas_defaults_to_replicas():
    assert Settings.from_env({"LORIKEET_REPLICAS": "3"}).most_replicas("lorikeet-demo") == 3
    assert Settings.from_env({"LORIKEET_MAX_REPLICAS": "5"}).most_replicas("lorikeet-demo") == 5


def test_several_base_models_are_given_by_name():
    settings = Settings.from_env({"LORIKEET_BASE_MODELS": "llama=/m/llama, qwen=/m/qwen"})
    assert settings.base_models == {"llama": Path("/m/llama"), "qwen": Path("/m/qwen")}


def test_each_base_model_may_override_settings():
    settings = Settings.from_env(
        {
            "LORIKEET_BASE_MODELS": "a=/m/a,b=/m/b,c=/m/c",
            "LORIKEET_REPLICAS": "a=4, b=1",
            "LORIKEET_MAX_REPLICAS": "a=6",
            "LORIKEET_MAX_CONTEXT": "8192",
        }
    )
    assert settings.replicas == {"a": 4, "b": 1, "c": 2}
    assert [settings.most_replicas(name) for name in "abc"] == [6, 1, 2]
    assert settings.most_engines == 9
    assert settings.max_context == {"a": 8192, "b": 8192, "c": 8192}


@pytest.mark.parametrize(
    ("name", "value", "want"),
    [
        ("LORIKEET_REPLICAS", "many", "integer"),
        ("LORIKEET_REPLICAS", "0", "greater than or equal to 1"),
        ("LORIKEET_MAX_REPLICAS", "1", "at least LORIKEET_REPLICAS, which is 2"),
        ("LORIKEET_KV_CACHE_MEMORY", "120%", "up to 100%"),
        ("LORIKEET_KV_CACHE_MEMORY", "a%", "share"),
        ("LORIKEET_KV_CACHE_MEMORY", "0", "1 byte"),
        ("LORIKEET_KV_CACHE_MEMORY", "1.2.3MiB", "512MiB"),
        ("LORIKEET_ADAPTER_DISK", "four", "512MiB"),
        (
            "LORIKEET_KV_CACHE_MEMORY",
            "four",
            "a size such as 512MiB or 2GiB, or a share such as 20%",
        ),
        ("LORIKEET_BASE_MODELS", "llama", "name=folder"),
        ("LORIKEET_BASE_MODELS", "a=/x,a=/y", "twice"),
        ("LORIKEET_BASE_MODELS", "org/a=/x", "letters"),
        ("LORIKEET_REPLICAS", "lorikeet-demo=1,llama=2", "llama is no base model: there are"),
        ("LORIKEET_REPLICAS", "lorikeet-demo=", "name=value"),
        ("LORIKEET_MAX_CONTEXT", "lorikeet-demo=1,lorikeet-demo=2", "each once"),
        ("LORIKEET_IMPORT_FROM", "s3://ok/x,https://example.com", "s3://bucket/prefix"),
        ("LORIKEET_IMPORT_FROM", "s3://", "s3://bucket/prefix"),
        ("LORIKEET_CATALOG", "gs://bucket/lorikeet", "a folder or s3://bucket/prefix"),
        ("LORIKEET_CATALOG", "s3:/bucket/lorikeet", "a folder or s3://bucket/prefix"),
        ("LORIKEET_CATALOG", "s3://", "a folder or s3://bucket/prefix"),
        ("LORIKEET_CACHE_DIR", "s3://bucket/cache", "a folder of this machine"),
        ("LORIKEET_DEVICE", "tpu", "cuda"),
        ("LORIKEET_ADMIN_ADDRESS", "8001", "host:port"),
        ("LORIKEET_ADMIN_ADDRESS", "127.0.0.1", "host:port"),
        ("LORIKEET_ADMIN_ADDRESS", "127.0.0.1:0", "host:port"),
        ("LORIKEET_ADMIN_ADDRESS", "127.0.0.1:65536", "host:port"),
        ("LORIKEET_ADMIN_ADDRESS", "::1:8001", r"\[::1\]:8001"),
        ("LORIKEET_ADMIN_ADDRESS", "[::1::2]:8001", "permitted"),
        ("LORIKEET_ADMIN_ADDRESS", "a..b:8001", "host:port"),
        ("LORIKEET_ADMIN_ADDRESS", "http://localhost:8001", "host:port"),
        ("LORIKEET_OTLP_TRACES_ENDPOINT", "collector:4318", "http://collector:4318"),
        ("LORIKEET_TRACES_SAMPLING_RATIO", "1.5", "less than or equal to 1"),
        ("LORIKEET_INTER_TOKEN_GOAL_MS", "0", "greater than 0"),
        ("LORIKEET_SPECULATION", "eagle", "'off', 'lookup', 'mtp' or 'draft'"),
        ("LORIKEET_INTER_TOKEN_GOAL_MS", "soon", "number"),
    ],
)
def test_an_invalid_value_is_named_with_the_expected_form(name, value, want):
    with pytest.raises(InvalidSetting, match=f"{name}={re.escape(repr(value))}.*{want}") as refused:
        Settings.from_env({name: value})
    assert "Value error" not in refused.value.message


def test_an_unknown_variable_stops_the_start_and_lists_the_known():
    with pytest.raises(InvalidSetting, match=r"LORIKEET_SLOTS is not a setting.*LORIKEET_REPLICAS"):
        Settings.from_env({"LORIKEET_SLOTS": "4"})


def test_a_misspelt_variable_gets_a_suggestion():
    with pytest.raises(InvalidSetting, match=r"did you mean LORIKEET_KV_CACHE_MEMORY\?"):
        Settings.from_env({"LORIKEET_KV_CACHE_MEMROY": "1GiB"})
    with pytest.raises(InvalidSetting) as strange:
        Settings.from_env({"LORIKEET_QQQQ": "1"})
    assert "did you mean" not in strange.value.message


@pytest.mark.parametrize("name", ["LORIKEET_CATALOG", "LORIKEET_CACHE_DIR", "LORIKEET_REPLICAS"])
@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_variable_is_refused(name, value):
    with pytest.raises(InvalidSetting, match=f"{name} is set but empty: unset it"):
        Settings.from_env({name: value})


def test_variables_of_the_command_line_are_ignored():
    Settings.from_env({"LORIKEET_ADMIN_KEY": "lk_x", "LORIKEET_SERVER": "http://127.0.0.1:8001"})
