"""Logging setup: events of this package and the engine on stderr, one JSON object per line."""

import json
import logging
import sys
import time
import traceback

log = logging.getLogger(__name__)

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def log_to_stderr() -> None:
    """Send the events of `lorikeet` and `lorikeet_engine` to the process's original stderr.

    Ray Serve may replace sys.stderr by its own buffered log, which drops the events' fields. The
    original stderr is a file that Ray keeps and shows to the driver.
    """
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(JsonLines())
    for name in ("lorikeet", "lorikeet_engine"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False


class JsonLines(logging.Formatter):
    """Formatter of an event as JSON: time (UTC), level, event, the event's fields, stack."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one event as one line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **{
                name: value
                for name, value in vars(record).items()
                if name not in _STANDARD and not name.startswith("_")  # attributes that Ray adds
            },
        }
        if record.exc_info:
            # Not formatException, which uses print: Serve may have replaced print.
            line["stack"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, default=str)


def log_unexpected(event: str, request_id: str, error: Exception) -> None:
    """Log an unexpected exception's type and stack as the event `event`.

    The exception's text is not logged, since it may quote a prompt or a key.
    """
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error(event, extra={"request_id": request_id, "error": type(error).__name__, "at": where})
