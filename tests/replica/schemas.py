"""JSON schemas as applications send them: a flat one, a nested one, one of many enums.

Every text, list and number is bounded, so that answers of a model with random weights end.
"""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]


def _object(**properties: Schema) -> Schema:
    """Return the schema of an object with exactly these properties, all required."""
    required, closed = list(properties), {"additionalProperties": False}
    return {"type": "object", "properties": properties, "required": required, **closed}


def _text(most: int) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": most}


def _number(most: int) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": most}


def _one_of(values: str) -> Schema:
    return {"type": "string", "enum": values.split()}


def _list(items: Schema, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def _pattern(regex: str) -> Schema:
    return {"type": "string", "pattern": regex}


_DATE = _pattern("^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])$")
_ADDRESS = _object(street=_text(30), postcode=_pattern("^[0-9]{5}$"), city=_text(20))

SHIPMENT = _object(
    sender=_text(30),
    recipient=_text(30),
    pickup_date=_DATE,
    parcel_count=_number(999),
    weight_in_grams=_number(100_000),
    destination_city=_text(20),
    signature_required={"type": "boolean"},
    delivery_instructions=_text(80),
)
INVOICE = _object(
    invoice_number=_pattern("^INV-[0-9]{6}$"),
    issued_on=_DATE,
    seller=_object(company=_text(30), address=_ADDRESS),
    buyer=_object(company=_text(30), address=_ADDRESS),
    lines=_list(
        _object(description=_text(40), quantity=_number(99), unit_price_in_cents=_number(99_999)),
        most=3,
    ),
    payment=_object(iban=_pattern("^[A-Z]{2}[0-9]{20}$"), due_in_days=_number(90)),
)
TICKET = _object(
    language=_one_of("en de fr es it nl pl pt sv da fi cs hu ro bg el tr uk ar ja ko zh"),
    channel=_one_of("email phone chat form app letter social"),
    product=_one_of("account billing checkout search catalogue delivery returns gift_cards api"),
    category=_one_of("outage defect question complaint praise cancellation refund fraud legal"),
    severity=_one_of("critical high medium low none"),
    sentiment=_one_of("furious angry annoyed neutral pleased delighted"),
    customer_tier=_one_of("free basic plus business enterprise"),
    team=_one_of("first_line payments logistics platform trust_and_safety legal press"),
    next_step=_one_of("answer ask_back escalate merge close refund call_back"),
    labels=_list(_one_of("vip repeat regression gdpr chargeback translated urgent spam"), most=3),
)
SCHEMAS: Mapping[str, Schema] = {"flat": SHIPMENT, "nested": INVOICE, "enums": TICKET}
