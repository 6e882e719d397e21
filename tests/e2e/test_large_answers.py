"""Answers larger than the largest message between replica and gateway."""

from tests.e2e.conftest import LARGEST_MESSAGE
from tests.e2e.load import Load
from tests.e2e.service_processes import complete


def test_a_large_answer_is_complete_and_breaks_no_other_stream(service, crowd):
    assert complete(service)
    with Load(service.url, [crowd.base()], streams=4, tokens=60) as others:
        others.wait_for(4)
        # Asked at the gateway's own listener, as Serve's proxy has the same limit.
        gateway = service.client(min(service.tenant_keys)).with_options(
            base_url=f"{service.admin_url}/v1"
        )
        answer = gateway.chat.completions.with_raw_response.create(
            model="lorikeet-demo",
            messages=[{"role": "user", "content": "Hello"}],
            n=16,
            max_tokens=60,
            logprobs=True,
            top_logprobs=20,
            extra_body={"ignore_eos": True},
        )
    assert len(answer.content) > LARGEST_MESSAGE
    whole = answer.parse()
    assert (len(whole.choices), whole.usage.completion_tokens) == (16, 16 * 60)
    assert others.unfinished() == []
