"""The `mm` command: one word for each thing that a person does.

Loading this module loads neither Django nor Celery; a command loads what it needs.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer
from typer.exceptions import TyperException

from mmadmin.cli import (
    build,
    bundle,
    containers,
    deployments,
    doctor,
    fit,
    history,
    keys,
    logs,
    rebuild,
    status,
    store,
    template,
    top,
    trial,
    tunnel,
    up,
)
from mmadmin.cli.installation import load_environment
from mmadmin.cli.interrupts import hear_every_interrupt
from mmadmin.cli.output import of_the_disk, report
from mmadmin.cli.records import ACTING_AS
from mmadmin.core.errors import InvalidInput, MmError

app = typer.Typer(
    name="mm",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Build, serve, share and roll back large open models, reproducibly.",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Everything is kept in var/, or where MM_HOME says. "
    "Exit codes: 0 done, 1 failed or found wanting, 2 wrong usage, 130 interrupted.",
)

RUNNING = "Running it"
SERVING = "Serving models"
STORE = "Building and the store"
ALONE = "One service at a time, for containers"


def _version(value: bool) -> None:  # noqa: FBT001 (a callback's signature)
    if value:
        sys.stdout.write(f"mm {version('mmadmin')}\n")
        raise typer.Exit


@app.callback()
def options(
    *,
    acting_as: Annotated[
        str, typer.Option("--as", help="Act as this user; else the first administrator.")
    ] = "",
    _show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command's word."""
    ACTING_AS.set(acting_as)


for command, panel in (
    (up.up, RUNNING),
    (up.down, RUNNING),
    (status.status, RUNNING),
    (up.password, RUNNING),
    (logs.logs, RUNNING),
    (top.top, RUNNING),
    (doctor.doctor, RUNNING),
    (containers.init, ALONE),
    (containers.run, ALONE),
    (containers.healthy, ALONE),
    (deployments.deploy, SERVING),
    (deployments.activate, SERVING),
    (deployments.rollback, SERVING),
    (deployments.stop, SERVING),
    (trial.trial, SERVING),
    (deployments.follow, SERVING),
    (deployments.cancel, SERVING),
    (history.history, SERVING),
    (history.diff, SERVING),
    (history.mark, SERVING),
    (history.pin, SERVING),
    (history.request, SERVING),
    (fit.browse, STORE),
    (fit.fit, STORE),
    (build.plan, STORE),
    (build.build, STORE),
    (build.lock, STORE),
    (rebuild.rebuild, STORE),
):
    app.command(rich_help_panel=panel)(command)
app.command("export", rich_help_panel=STORE)(bundle.export)
app.command("import", rich_help_panel=STORE)(bundle.import_)
app.add_typer(keys.app, name="keys", rich_help_panel=SERVING)
app.add_typer(tunnel.app, name="tunnel", rich_help_panel=RUNNING)
app.add_typer(template.app, name="template", rich_help_panel=STORE)
app.add_typer(store.app, name="store", rich_help_panel=STORE)


def main() -> None:
    """Run `mm`; an expected failure is said in words and ends with 1, wrong usage with 2."""
    as_json = "--json" in sys.argv
    hear_every_interrupt()
    try:
        load_environment()
        if not as_json:
            app()
        done = app(standalone_mode=False)
        sys.exit(done if isinstance(done, int) else 0)
    except MmError as error:
        report(error, as_json=as_json)
        sys.exit(1)
    except TyperException as error:  # wrong usage; without --json typer has said it itself
        said = str(getattr(error, "format_message", error.__str__)())
        refused = InvalidInput(said, remedy="`mm COMMAND --help` says how it is written")
        report(refused, as_json=as_json)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if (expected := of_the_disk(error) or doctor.of_the_database(error)) is None:
            raise
        report(expected, as_json=as_json)
        sys.exit(1)
