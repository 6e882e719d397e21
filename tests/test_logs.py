import json
import logging

from lorikeet.logs import JsonLines


def formatted(**fields):
    record = logging.makeLogRecord({"msg": "adapter_evicted", "levelno": 20, **fields})
    return json.loads(JsonLines().format(record))


def test_an_event_is_logged_as_one_json_object_with_its_fields():
    line = formatted(created=0.25, msecs=250, levelname="INFO", adapter="acme/support@1", idle_s=41)
    assert line == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "info",
        "event": "adapter_evicted",
        "adapter": "acme/support@1",
        "idle_s": 41,
    }


def test_an_exceptions_stack_trace_is_on_the_events_line():
    try:
        raise ValueError("first\nsecond")
    except ValueError as error:
        exc_info = (type(error), error, error.__traceback__)
    record = logging.makeLogRecord({"msg": "failed", "exc_info": exc_info})
    line = JsonLines().format(record)
    assert "\n" not in line
    assert "ValueError: first\nsecond" in json.loads(line)["stack"]
