"""Parity proofs at the gateway: a replica scores a trainer's probes before a version is taken."""

from dataclasses import asdict, replace
from typing import Annotated, Any

from pydantic import Field

from lorikeet.errors import InvalidAdapter, InvalidInput
from lorikeet.gateway.replica_tests import result_of
from lorikeet.gateway.services import Services
from lorikeet.parity.figures import REFUSE_ABOVE, WARN_ABOVE, Bounds, GapCause, Parity, Verdict
from lorikeet.parity.probes import Probes
from lorikeet.protocol.parity import ParityTest
from lorikeet.request_defaults import RequestDefaults
from lorikeet_engine.adapter import AdapterRef

Nats = Annotated[float, Field(gt=0, le=100)]


def bounds_of(warn_above: float | None, refuse_above: float | None) -> Bounds:
    """Return the bounds of a parity proof, with defaults for bounds that a request leaves out.

    warn_above, refuse_above: bounds on the mean difference from the trainer's log-probabilities, in
        nats; None: left out.

    Raises InvalidInput if refuse_above is less than warn_above.
    """
    warn = WARN_ABOVE if warn_above is None else warn_above
    refuse = max(REFUSE_ABOVE, warn) if refuse_above is None else refuse_above
    if warn_above is None:
        warn = min(warn, refuse)
    if refuse < warn:
        raise InvalidInput(
            f"refuse_above={refuse:g} is below warn_above={warn:g}", param="refuse_above"
        )
    return Bounds(warn, refuse)


async def check_parity(
    services: Services,
    base_model: str,
    adapter: AdapterRef,
    request_id: str,
    probes: Probes,
    bounds: Bounds,
    defaults: RequestDefaults | None = None,
) -> Parity:
    """Have a replica compare an adapter's log-probabilities with its trainer's (parity proof), and
    compare the prompts that the served chat template makes with the trainer's.

    A replica must be able to load the adapter; the adapter need not have a version yet.

    probes: sequences of tokens with the trainer's log-probabilities.
    bounds: differences above which the proof warns or refuses.
    defaults: the adapter's own request defaults.

    Raises InvalidInput for an adapter with a head, InvalidAdapter if the proof is refused,
    Unavailable if no replica answers, and Refused for probes that the replica cannot score.
    """
    if adapter.head is not None:
        raise InvalidInput(
            f"{adapter} has a classification head, and probes score generated tokens: send it "
            "without probes",
            param="probes",
        )
    test = ParityTest(request_id, adapter, probes, bounds)
    proof = services.engines.parity(base_model, test)
    parity = await result_of(services, base_model, f"scored the probes of {adapter}", proof)
    if parity.verdict is Verdict.ACCEPTED:
        reason = await _other_prompt(services, base_model, adapter.tenant, probes, defaults)
        if reason is not None:
            parity = replace(parity, verdict=Verdict.WARNED, cause=GapCause.TEMPLATE, reason=reason)
    services.metrics.count_parity(base_model, parity)
    if parity.verdict is Verdict.REFUSED:
        raise InvalidAdapter(
            f"log-probabilities of {parity.tokens} tokens differ from the trainer's by "
            f"{parity.mean:.2g} nats on average, more than {bounds.refuse_above:g}: "
            f"{parity.reason}",
            param="probes",
        )
    return parity


def parity_json(parity: Parity | None) -> dict[str, Any] | None:
    """Return the result of a parity proof as JSON; None without a proof."""
    if parity is None:
        return None
    cause = None if parity.cause is None else parity.cause.value
    return asdict(parity) | {"verdict": parity.verdict.value, "cause": cause}


async def _other_prompt(
    services: Services,
    base_model: str,
    tenant: str,
    probes: Probes,
    defaults: RequestDefaults | None,
) -> str | None:
    """Return how the served chat template's prompts differ from the trainer's; None if they are
    equal.

    probes: sequences that the trainer scored; those made of chat messages are compared.
    """
    chats = [probe for probe in probes.probes if probe.messages]
    if not chats:
        return None
    context = services.engines.max_context(base_model)
    try:
        made = await services.encoders.encode_chats(
            base_model, tenant, [probe.messages for probe in chats], context, defaults
        )
    except InvalidInput as error:
        return f"the served chat template refuses the probes' messages: {error.message}"
    for probe, served in zip(chats, made, strict=True):
        if list(served) != probe.prompt_ids:
            equal = [a == b for a, b in zip(served, probe.prompt_ids, strict=False)]
            at = [*equal, False].index(False)
            return (
                "the served chat template makes other prompts of the probes' messages, from "
                f"token {at} on: train with that template, or register it with --use-chat-template"
            )
    return None
