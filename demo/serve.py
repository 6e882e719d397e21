"""Service with the demo's model, tenants and adapters: `make serve`, and `python -m demo.serve`."""

import os
import sys

from lorikeet.interrupts import killed_by_sigint

with killed_by_sigint():  # the imports take a second
    from demo.fill_catalog import DemoKeys, fill_catalog
    from demo.tasks import TASKS
    from lorikeet.cli.admin_client import AdminClient
    from lorikeet.cli.output import print_error
    from lorikeet.cli.serve.environment import service_environment
    from lorikeet.cli.serve.greeting import (
        HOW_TO_STOP,
        curl,
        for_administrators,
        print_lines,
        ready_line,
    )
    from lorikeet.cli.serve.keys import keys_folder
    from lorikeet.cli.serve.run import Planned, Prepared, run_service
    from lorikeet.errors import LorikeetError

_CATALOG = ".lorikeet/demo"


def main() -> int:
    """Run the demo until Ctrl-C; return the exit status."""
    environ = service_environment({"LORIKEET_CATALOG": _CATALOG, **os.environ})
    try:
        return run_service(environ, _prepare)
    except LorikeetError as error:
        print_error(error.message)
        return 1


def _prepare(planned: Planned) -> Prepared:
    keys = fill_catalog(planned.settings, keys_folder(planned.settings.catalog))
    admin = AdminClient(planned.admin_url, keys.admin)
    return Prepared(admin, lambda _: None, lambda: _greet(planned, keys))


def _greet(planned: Planned, keys: DemoKeys) -> None:
    first = next(task for task in TASKS if task.model == "kestrel/intake")
    key = keys.tenants[first.tenant]
    admin_file = keys_folder(planned.settings.catalog) / "admin"
    print_lines(
        [
            ready_line(planned),
            "\nTenants and their keys:",
            *(f"  {tenant:<10} {secret}" for tenant, secret in keys.tenants.items()),
            "\nModels: lorikeet-demo, and the fine-tunes",
            *(f"  {each.model:<20} {each.about}{' (shared)' * each.shared}" for each in TASKS),
            "\nTry:\n",
            curl(planned.url, key, first.model, first.example.prompt, temperature=0),
            *for_administrators(planned, admin_file, ".venv/bin/lorikeet"),
            f"\n{HOW_TO_STOP}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
