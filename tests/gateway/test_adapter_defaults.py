"""Request defaults that a version is registered with: template, system prompt, stops, sampling."""

import asyncio
import hashlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lorikeet.gateway.services import ServedModel
from lorikeet.request_defaults import MAX_SYSTEM_PROMPT_BYTES, MAX_TEMPLATE_BYTES
from lorikeet.text.tools.syntax import GRANITE, HERMES
from lorikeet_engine.request import SamplingParams
from tests.gateway.conftest import SHAPE, Gateway, chat, demo_encoder, make_blob, serving
from tests.gateway.test_bad_requests import CHAT, error_of
from tests.waiting import eventually

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
SLOW_FOR_LONG = (
    "{% if messages[0].content | length > 9000 %}{% for i in range(100000) %}"
    "{% for j in range(2000) %}{% endfor %}{% endfor %}{% endif %}" + TEMPLATE
)
"""A template with a finite loop of some ten seconds, which registration does not see."""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    served = {"tiny": ServedModel(SHAPE, ("org/Tiny-1B",), sampling_defaults={"top_p": 0.9})}
    with serving(tmp_path_factory.mktemp("defaults"), served=served) as running:
        yield running


def register(gateway: Gateway, adapter: str, **defaults: Any) -> Any:
    """Register the weights of acme/support with request defaults."""
    digest = hashlib.sha256(make_blob(gateway.folder / "made")).hexdigest()
    body = {"digest": digest, "defaults": defaults or None}
    return gateway.admin("POST", f"/adapters/{adapter}/versions", body)


def registered(gateway: Gateway, adapter: str, **defaults: Any) -> dict[str, Any]:
    answer = register(gateway, adapter, **defaults)
    assert answer.is_success, answer.text
    version: dict[str, Any] = answer.json()
    return version


def prompt(gateway: Gateway) -> str:
    """Return the prompt of the last call that reached a replica."""
    (ids,) = gateway.engines.encoded[-1].prompts
    return demo_encoder().backend.decode(list(ids), skip_special_tokens=False)


def asked(gateway: Gateway, path: str, body: dict[str, Any]) -> str:
    answer = gateway.post(path, body)
    assert answer.status_code == 200, answer.text
    return prompt(gateway)


HELLO = "hello there"
ASKING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat("acme/own"),
    "/v1/responses": {"model": "acme/own", "input": HELLO},
    "/v1/messages": chat("acme/own", max_tokens=8),
}


@pytest.mark.parametrize("path", ASKING)
def test_chats_of_every_api_are_written_by_the_adapters_own_template(
    gateway: Gateway, path: str
) -> None:
    registered(gateway, "acme/own", chat_template=TEMPLATE)
    assert asked(gateway, path, ASKING[path]) == f"[user] {HELLO}\n"
    assert "[user]" not in asked(gateway, path, ASKING[path] | {"model": "acme/support"})


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("/v1/responses", "/v1/responses/input_tokens"),
        ("/v1/messages", "/v1/messages/count_tokens"),
    ],
)
def test_counted_tokens_are_those_of_the_adapters_own_template_and_system_prompt(
    gateway: Gateway, path: str, counts: str
) -> None:
    registered(gateway, "acme/counted", chat_template=TEMPLATE, system_prompt="Be brief. " * 9)
    body = ASKING[path] | {"model": "acme/counted"}
    asked(gateway, path, body)
    body.pop("max_tokens", None)
    counted = gateway.post(counts, body).json()["input_tokens"]
    assert counted == gateway.engines.last_work.prompt_tokens
    assert counted > gateway.post(counts, body | {"model": "tiny"}).json()["input_tokens"] + 9


@pytest.mark.parametrize("path", ASKING)
@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_a_system_prompt_precedes_chats_without_a_system_message(
    gateway: Gateway, path: str, template: str | None
) -> None:
    defaults = {"system_prompt": "Be brief.", "chat_template": template}
    registered(gateway, "acme/brief", **defaults)
    body = ASKING[path] | {"model": "acme/brief"}
    assert "Be brief." in asked(gateway, path, body)
    own = {"/v1/responses": {"instructions": "Be kind."}, "/v1/messages": {"system": "Be kind."}}
    system = {"role": "system", "content": "Be kind."}
    chats = {"messages": [system, {"role": "user", "content": HELLO}]}
    written = asked(gateway, path, body | own.get(path, chats))
    assert "Be kind." in written
    assert "Be brief." not in written


def test_a_completion_has_no_template_and_no_system_prompt(gateway: Gateway) -> None:
    registered(gateway, "acme/own", chat_template=TEMPLATE, system_prompt="Be brief.")
    body = {"model": "acme/own", "prompt": HELLO}
    assert asked(gateway, "/v1/completions", body).replace("<|bos|>", "") == HELLO


def sampling(gateway: Gateway) -> SamplingParams:
    return gateway.engines.last.sampling


@pytest.mark.parametrize("path", [*ASKING, "/v1/completions"])
def test_the_request_precedes_the_adapter_and_the_adapter_its_base_model(
    gateway: Gateway, path: str
) -> None:
    defaults = {"temperature": 0.3, "top_k": 7}
    registered(gateway, "acme/cool", sampling=defaults)
    body = {**ASKING.get(path, {"prompt": HELLO}), "model": "acme/cool"}
    asked(gateway, path, body)
    used = sampling(gateway)
    assert (used.temperature, used.top_k, used.top_p) == (0.3, 7, 0.9)
    shown = gateway.request("GET", "/v1/models/acme/cool", gateway.keys["acme"]).json()
    assert shown["sampling_defaults"] == {"temperature": 0.3, "top_k": 7, "top_p": 0.9}
    assert type(used.top_k) is int
    asked(gateway, path, {**body, "temperature": 0.8})
    assert (sampling(gateway).temperature, sampling(gateway).top_k) == (0.8, 7)
    asked(gateway, path, {**body, "model": "acme/support"})
    assert (sampling(gateway).temperature, sampling(gateway).top_k) == (1.0, 0)


def test_stops_are_added_to_the_requests(gateway: Gateway) -> None:
    registered(gateway, "acme/ends", stop=["<end>", "<|eos|>"], stop_token_ids=[5])
    eos = demo_encoder().vocabulary.added["<|eos|>"]
    asked(gateway, CHAT, chat("acme/ends", stop="mine", stop_token_ids=[9]))
    call = gateway.engines.last
    assert (call.stop, call.own_stop) == (("mine",), ("<end>",))
    assert call.sampling.stop_token_ids == (9, *sorted({5, eos}))
    asked(gateway, CHAT, chat("acme/ends", ignore_eos=True))
    call = gateway.engines.last
    assert (call.own_stop, call.sampling.stop_token_ids) == ((), ())


def test_the_replica_gets_the_syntax_of_the_adapters_own_template(gateway: Gateway) -> None:
    shows = "{% for t in tools or [] %}<|tool_call|>{{ t | tojson }}{% endfor %}" + TEMPLATE
    registered(gateway, "acme/granite", chat_template=shows)
    asked(gateway, CHAT, chat("acme/granite", tools=[TOOL]))
    marks = gateway.engines.encoded[-1].marks
    assert demo_encoder().syntax is HERMES
    assert demo_encoder().with_marks(marks).syntax is GRANITE
    asked(gateway, CHAT, chat("acme/support", tools=[TOOL]))
    assert gateway.engines.encoded[-1].marks is None


def test_tools_that_the_adapters_own_template_does_not_show_are_refused(gateway: Gateway) -> None:
    registered(gateway, "acme/own", chat_template=TEMPLATE)
    error = error_of(gateway.post(CHAT, chat("acme/own", tools=[TOOL])), 400)
    assert error["param"] == "tools"


def test_a_canary_may_differ_from_prod_in_its_template_alone(gateway: Gateway) -> None:
    first = registered(gateway, "acme/canary")
    canary = registered(gateway, "acme/canary", chat_template=TEMPLATE)
    assert (first["digest"], first["version"]) == (canary["digest"], 1)
    assert (canary["version"], canary["aliases"]) == (2, [])
    path = "/adapters/acme/canary"
    gateway.admin("POST", f"{path}/promote", {"version": 2, "share": 0.5})
    written = {asked(gateway, CHAT, chat("acme/canary", user=f"u{i}")) for i in range(40)}
    assert len(written) == 2
    gateway.admin("POST", f"{path}/promote", {"version": 2})
    assert asked(gateway, CHAT, chat("acme/canary")) == f"[user] {HELLO}\n"
    gateway.admin("POST", f"{path}/rollback", {})
    assert "[user]" not in asked(gateway, CHAT, chat("acme/canary"))
    again = registered(gateway, "acme/canary", chat_template=TEMPLATE)
    assert again["version"] == 2
    assert registered(gateway, "acme/canary")["version"] == 1


def test_a_version_and_the_log_show_the_defaults(gateway: Gateway) -> None:
    given = {"chat_template": TEMPLATE, "stop": ["<end>"], "sampling": {"top_k": 7}}
    made = registered(gateway, "acme/shown", **given)
    (version,) = gateway.admin("GET", "/adapters/acme/shown").json()["versions"]
    whole = {"system_prompt": None, "stop_token_ids": [], "tokenizer": None, **given}
    assert version["defaults"] == made["defaults"] == whole
    entries = gateway.admin("GET", "/log?tenant=acme&name=shown").json()["data"]
    changes = [change for entry in entries for change in entry["changes"]]
    (change,) = (change for change in changes if change["type"] == "defaults_set")
    assert change["defaults"] == ["chat_template", "stop", "sampling"]


@pytest.mark.parametrize(
    ("defaults", "param", "problem"),
    [
        ({"chat_template": "a\n{% if"}, "defaults.chat_template", "line 2: "),
        (
            {"chat_template": "\n{{ raise_exception('no') }}"},
            "defaults.chat_template",
            "line 2: no",
        ),
        ({"chat_template": "a prompt"}, "defaults.chat_template", "not show the user's message"),
        (
            {"chat_template": TEMPLATE.replace("{% for", "{% set x = 'a' * 200000000 %}{% for")},
            "defaults.chat_template",
            "128 MiB of memory",
        ),
        (
            {"chat_template": "{% for i in range(99999) %}" + TEMPLATE + "{% endfor %}"},
            "defaults.chat_template",
            "the adapter's own chat template (takes|writes) more than",
        ),
        (
            {
                "chat_template": TEMPLATE.replace(
                    "[{{", "{{ raise_exception('none') if m.role == 'system' }}[{{"
                ),
                "system_prompt": "Be brief.",
            },
            "defaults.chat_template",
            "line 1: none",
        ),
        (
            {
                "chat_template": TEMPLATE.replace("m in messages", "m in messages[-1:]"),
                "system_prompt": "Be brief.",
            },
            "defaults.chat_template",
            "does not show the system prompt",
        ),
        (
            {"chat_template": "a" * (MAX_TEMPLATE_BYTES + 1)},
            "defaults.chat_template",
            "at most 65536",
        ),
        (
            {"system_prompt": "ä" * MAX_SYSTEM_PROMPT_BYTES},
            "defaults.system_prompt",
            "at most 32768",
        ),
        ({"stop_token_ids": [10**6]}, "defaults.stop_token_ids", "has no token 1000000"),
        ({"stop": ["a"] * 17}, "defaults.stop", "at most 16"),
        ({"sampling": {"temperature": 3}}, "defaults.sampling.temperature", ""),
        ({"sampling": {"heat": 3}}, "defaults.sampling.heat", ""),
        ({"template": "a"}, "defaults.template", ""),
    ],
)
def test_faulty_defaults_are_refused_with_their_field(
    gateway: Gateway, defaults: dict[str, Any], param: str, problem: str
) -> None:
    error = error_of(register(gateway, "acme/faulty", **defaults), 400)
    assert str(error["param"]).startswith(param)
    assert re.search(problem, error["message"]), error["message"]
    assert gateway.admin("GET", "/adapters/acme/faulty").status_code == 404


def test_a_template_that_fails_at_some_messages_is_a_400_with_its_line(gateway: Gateway) -> None:
    picky = "\n{{ raise_exception('say less') if messages[0].content | length > 99 }}" + TEMPLATE
    registered(gateway, "acme/picky", chat_template=picky)
    for path, param in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        body = ASKING[path] | {"model": "acme/picky"}
        assert gateway.post(path, body).status_code == 200
        long = "a" * 100
        body |= {"input": long} if param == "input" else chat("acme/picky", long)
        error = error_of(gateway.post(path, body), 400)
        assert error["param"] == param
        assert (
            "the adapter's own chat template refuses these messages: line 2: say less"
            in (error["message"])
        )


def test_a_template_that_loops_is_cut_and_no_other_tenant_waits(gateway: Gateway) -> None:
    registered(gateway, "acme/slow", chat_template=SLOW_FOR_LONG)
    registered(gateway, "globex/own", chat_template=TEMPLATE)
    gateway.post(CHAT, chat("globex/own"), tenant="globex")

    async def scenario() -> tuple[list[Any], float]:
        loop = asyncio.get_running_loop()
        long = chat("acme/slow", "a" * 9001)
        slow = [loop.run_in_executor(None, gateway.post, CHAT, long) for _ in range(2)]
        await asyncio.sleep(0.2)
        waits_s = list[float]()
        while not slow[0].done():
            for model in ("globex/own", "tiny"):
                began_s = time.monotonic()
                body = chat(model)
                answer = await asyncio.to_thread(gateway.post, CHAT, body, "globex")
                assert answer.status_code == 200
                waits_s.append(time.monotonic() - began_s)
        return await asyncio.gather(*slow), sorted(waits_s)[len(waits_s) // 2]

    answers, median_s = asyncio.run(scenario())
    for answer in answers:
        error = error_of(answer, 400)
        assert error["param"] == "messages"
        assert "own chat template takes more than 1 s of CPU time" in error["message"]
    assert median_s < 0.5
    assert asked(gateway, CHAT, chat("acme/slow")) == f"[user] {HELLO}\n"


def test_a_smoke_test_writes_prompts_by_the_adapters_own_template(gateway: Gateway) -> None:
    registered(gateway, "acme/own", chat_template=TEMPLATE)
    assert gateway.admin("POST", "/adapters/acme/own/smoke", {"prompts": ["hi"]}).is_success
    ((ids,),) = [test.prompts for _, test in gateway.engines.smoke_tests[-1:]]
    assert demo_encoder().backend.decode(list(ids)).startswith("[user] hi")


def test_a_warning_of_the_folders_template_names_the_flag_unless_one_is_given(
    tmp_path: Path,
) -> None:
    served = {"tiny": ServedModel(SHAPE, ("org/Tiny-1B",), chat_template="a" * 64)}
    with serving(tmp_path, served=served) as gateway:
        digest = hashlib.sha256(make_blob(gateway.folder / "made")).hexdigest()
        body = {"digest": digest, "chat_template": "b" * 64}
        path = "/adapters/acme/support/versions"
        warned = gateway.admin("POST", path, body).json()["template_warning"]
        assert "register it with --use-chat-template" in warned
        own = body | {"defaults": {"chat_template": TEMPLATE}}
        # 503 while the process that renders templates starts
        assert eventually(lambda: gateway.admin("POST", path, own).is_success, within_s=60)
        assert gateway.admin("POST", path, own).json()["template_warning"] is None
