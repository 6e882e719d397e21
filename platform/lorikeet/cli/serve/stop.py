"""The command stop: ends the service of this folder."""

from lorikeet.cli.output import AsJson, print_answer
from lorikeet.cli.serve.running import stop_service


def stop(as_json: AsJson = False) -> None:
    """Stop the service that `lorikeet serve` started in this folder.

    Example: `lorikeet stop`
    """
    ran = stop_service()
    text = "Stopped." if ran else "No service of this folder runs."
    print_answer({"stopped": ran}, text, as_json)
