"""The command serve: runs the service on this machine."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Annotated

import typer
from typer.core import TyperCommand

from lorikeet.cli.admin_client import AdminClient
from lorikeet.cli.arguments import parse_tenant
from lorikeet.cli.output import AsJson, print_json, print_line
from lorikeet.cli.serve.adapters import (
    CheckedAdapter,
    GivenAdapter,
    check_adapters,
    name_adapters,
    register_adapters,
)
from lorikeet.cli.serve.base_models import as_setting, fetch_base_models, name_base_models
from lorikeet.cli.serve.environment import HTTP_HOST, changed, service_environment
from lorikeet.cli.serve.greeting import (
    HOW_TO_STOP,
    curl,
    for_administrators,
    print_lines,
    ready_line,
)
from lorikeet.cli.serve.keys import KeyFiles, keys_folder, open_or_make_catalog
from lorikeet.cli.serve.options import MODELS, takes_settings
from lorikeet.cli.serve.run import INTERRUPTED, Planned, Prepared, run_service
from lorikeet.cli.serve.running import STATE, is_ready
from lorikeet.settings import PREFIX, Settings
from lorikeet_engine.adapter_format import AdapterLimits

_ADAPTERS, _DETACH = "--adapters", "--detach"
_MODELS = f"{PREFIX}{MODELS.upper()}"
_REPLICAS = f"{PREFIX}REPLICAS"
_LOG = STATE / "serve.log"
_TRIED_TOKENS = 64  # an untrained or slow model would go on for minutes


class ServeCommand(TyperCommand):
    """Command whose option --adapters takes all words up to the next option, as a shell writes a
    pattern such as ./tuned/*.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Repeat --adapters before each of its words, and parse the arguments."""
        return super().parse_args(ctx, list(_with_repeated_option(args)))


def _with_repeated_option(args: list[str]) -> Iterator[str]:
    first = in_list = False
    for word in args:
        if word == _ADAPTERS:
            first = in_list = True
            yield word
        elif in_list and not word.startswith("-"):
            yield from [word] if first else [_ADAPTERS, word]
            first = False
        elif first:
            raise typer.BadParameter("want at least one adapter", param_hint=_ADAPTERS)
        else:
            in_list = False
            yield word


@takes_settings
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Base models: folders, or repositories of the Hugging Face Hub, which are "
            "downloaded. name=MODEL gives another name. Default: LORIKEET_BASE_MODELS.",
            show_default=False,
        ),
    ] = None,
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            _ADAPTERS,
            metavar="ADAPTER...",
            help="Adapters: folders, archives, s3://bucket/prefix or hf:organisation/name. "
            "name=ADAPTER gives another name than the folder's.",
            show_default=False,
        ),
    ] = None,
    tenant: Annotated[
        str, typer.Option(parser=parse_tenant, metavar="NAME", help="Owner of the adapters.")
    ] = "local",
    port: Annotated[
        str | None,
        typer.Option(
            metavar="PORT",
            help="Port for tenants (or PORT). Default: 8000, or another if it is taken.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Address for tenants; 0.0.0.0 admits other machines. Default: 127.0.0.1.",
            show_default=False,
        ),
    ] = None,
    detach: Annotated[
        bool,
        typer.Option(_DETACH, help="Leave the service running; `lorikeet stop` ends it."),
    ] = False,
    print_env: Annotated[
        bool, typer.Option("--print-env", help="Print the variables that it sets, and end.")
    ] = False,
    as_json: AsJson = False,
    *,
    settings: dict[str, str],
) -> None:
    """Serve base models and adapters on this machine.

    Checks the machine, makes the catalog and keys if they are missing, registers the adapters that
    are new or changed, and stays until Ctrl-C. Every setting is an option here, or a LORIKEET_
    variable.

    Example: `lorikeet serve Qwen/Qwen3-0.6B --adapters ./tuned/*`
    """
    given = _environment(models or [], port, host, settings, quiet=as_json)
    environ = service_environment(given)
    if print_env:
        _print_environment(changed(environ, os.environ), as_json=as_json)
        return
    if _MODELS not in environ:
        raise typer.BadParameter(
            "want a base model: a folder, or a repository such as Qwen/Qwen3-0.6B",
            param_hint="MODEL",
        )
    named = name_adapters(adapters or [])
    if detach:
        raise typer.Exit(_start_detached())
    own = OwnService(named, tenant, as_json=as_json)
    raise typer.Exit(run_service(environ, own.prepare))


class OwnService:
    """Steps of `lorikeet serve` that prepare the catalog, keys and adapters of one tenant.

    given: adapters on the command line.
    tenant: their owner.
    as_json: print the addresses and names as JSON.
    """

    def __init__(self, given: list[GivenAdapter], tenant: str, *, as_json: bool) -> None:
        self._given, self._tenant, self._as_json = given, tenant, as_json

    def prepare(self, planned: Planned) -> Prepared:
        """Make the catalog and keys if they are missing, and check the adapters."""
        from lorikeet.gateway.services import read_base_models  # which other commands do not need

        settings = planned.settings
        catalog = open_or_make_catalog(settings.catalog)
        keys = KeyFiles(catalog, keys_folder(settings.catalog).resolve())
        admin = AdminClient(planned.admin_url, keys.admin())
        keys.tenant(self._tenant)
        checked = check_adapters(
            self._given,
            self._tenant,
            read_base_models(settings),
            AdapterLimits(settings.max_rank, settings.max_adapter_bytes, settings.max_added_tokens),
            catalog,
            quiet=self._as_json,
        )
        refused: dict[str, str] = {}
        return Prepared(
            admin,
            lambda show: refused.update(register_adapters(checked, self._tenant, admin, show)),
            lambda: self._greet(planned, keys, checked, refused),
        )

    def _greet(
        self,
        planned: Planned,
        keys: KeyFiles,
        checked: list[CheckedAdapter],
        refused: dict[str, str],
    ) -> None:
        names = [each.given.name for each in checked if each.given.name not in refused]
        adapters = [f"{self._tenant}/{name}" for name in names]
        base_models, key_file = list(planned.settings.base_models), keys.tenant_file(self._tenant)
        if self._as_json:
            print_json(
                {
                    "url": planned.url,
                    "admin_url": planned.admin_url,
                    "tenant": self._tenant,
                    "key_file": str(key_file),
                    "admin_key_file": str(keys.admin_file),
                    "base_models": base_models,
                    "adapters": adapters,
                    "refused": refused,
                }
            )
            return
        lines = [ready_line(planned), f"\nModels: {', '.join([*base_models, *adapters])}"]
        for file in keys.new:
            lines.append(f"New key, kept in {file}: {file.read_text().strip()}")
        key = f"$(cat {key_file})"
        first = (adapters or base_models)[0]
        lines += ["\nTry:\n", curl(planned.url, key, first, "Hello", max_tokens=_TRIED_TOKENS)]
        lines.append(f"\nWith the same key {planned.url}/ui shows limits, requests and usage.")
        lines += for_administrators(planned, keys.admin_file, "lorikeet")
        print_lines([*lines, f"\n{HOW_TO_STOP}"])


def _environment(
    models: list[str], port: str | None, host: str | None, settings: dict[str, str], *, quiet: bool
) -> dict[str, str]:
    """Return this process's environment with what the command's options set.

    An own base model has one replica, unless LORIKEET_REPLICAS or --replicas says otherwise.
    """
    given = {_REPLICAS: "1", **os.environ, **settings}
    given |= {"PORT": port} if port is not None else {}
    given |= {HTTP_HOST: host} if host is not None else {}
    named = name_base_models(models)
    if named:
        given[_MODELS] = as_setting(named)
    Settings.from_env(given)  # raises before anything is downloaded
    if named:
        given[_MODELS] = as_setting(fetch_base_models(named, quiet=quiet))
    return given


def _print_environment(variables: Mapping[str, str], *, as_json: bool) -> None:
    if as_json:
        print_json(variables)
    else:
        print_lines([f"export {name}={shlex.quote(text)}" for name, text in variables.items()])


def _start_detached() -> int:
    """Start this command without --detach in a session of its own; wait until it is ready.

    Its output goes to a file, which is shown meanwhile. Returns the exit status.
    """
    STATE.mkdir(mode=0o700, exist_ok=True)
    words = [word for word in sys.argv[1:] if word != _DETACH]
    with _LOG.open("w") as log, _LOG.open() as shown:
        _LOG.chmod(0o600)
        process = subprocess.Popen(
            [sys.executable, "-m", "lorikeet", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            while process.poll() is None and not is_ready(process.pid):
                print(shown.read(), end="", flush=True)
                time.sleep(0.2)
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            return INTERRUPTED
        finally:
            print(shown.read(), end="", flush=True)
    if process.returncode is not None:
        return process.returncode
    print_line(f"It runs in the background. `lorikeet stop` here ends it; its output: {_LOG}")
    return 0
