"""The command snapshot: makes a snapshot of the catalog."""

import typer

from lorikeet.cli.admin_client import admin
from lorikeet.cli.output import AsJson, print_answer


def snapshot(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Make a snapshot of the catalog now.

    Gateways that start read it instead of the whole log. The controller makes one every 256
    changes anyway.

    Example: `lorikeet snapshot`
    """
    answer = admin(ctx).post("/snapshots", {})
    print_answer(answer, f"There is a snapshot of entry {answer['seq']}.", as_json)
