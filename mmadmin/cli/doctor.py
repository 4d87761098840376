"""`mm doctor`: is this installation well? Every check with its remedy."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import typer

from mmadmin.cli.installation import is_set_up
from mmadmin.cli.output import JsonFlag, console, counted, emit_json, escape
from mmadmin.cli.settings_file import read_settings
from mmadmin.cli.tables import Column, table
from mmadmin.core.errors import MmError, Unreachable
from mmadmin.core.home import Home, Ports

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from mmadmin.host.doctor import Result

MISSED_SWEEPS = 12
"""Sweeps in a row that a busy machine may miss."""
MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}


def doctor(*, as_json: JsonFlag = False) -> None:
    """Check host, store, services, database, ports, disk, toolchain, clock, hub; name remedies.

    Looks and changes nothing. Ends with 1 when a check fails; warnings do not count.

    Example: mm doctor
    """
    from mmadmin.host.doctor import Patient, run_checks, worst
    from mmadmin.host.facts import host_facts
    from mmadmin.host.hub import Hub

    home = Home.from_env()
    patient = Patient(
        home=home,
        ports=Ports.from_env(),
        facts=host_facts(home.store if home.store.exists() else home.root.parent),
        redis_url=os.environ.get("REDIS_URL") or home.broker_url,
        hub=Hub.from_env(),
        public_origin=os.environ.get("PUBLIC_ORIGIN", ""),
    )
    found = run_checks(
        patient,
        [
            ("settings", settings),
            ("database", database),
            ("administrator", administrator),
            ("sweeper", sweeper),
            ("live", live),
        ],
    )
    if as_json:
        emit_json({"level": worst(found), "checks": [result.as_json() for result in found]})
    else:
        table(
            [Column("", whole=True), Column("what", whole=True), Column("found")],
            [[MARKS[r.level], escape(r.name), escape(r.fact) + _remedy(r)] for r in found],
            empty="nothing was checked",
        )
        words = {"ok": "all checks passed", "warn": "it works; read the warnings"}
        console.print(f"\n{words.get(worst(found), 'something is wrong: see above')}")
    if worst(found) == "fail":
        raise typer.Exit(1)


def _remedy(result: Result) -> str:
    return f"\n[dim]→ {escape(result.remedy)}[/]" if result.remedy else ""


def settings() -> Result:
    """Every line of the settings can be used."""
    from mmadmin.host.doctor import Result

    problems = read_settings(Home.from_env()).problems
    if problems:
        return Result(
            "settings",
            "fail",
            "; ".join(problem.message for problem in problems),
            "; ".join(dict.fromkeys(problem.remedy for problem in problems)),
        )
    return Result("settings", "ok", "all can be used; `mm set` lists them")


def database() -> Result:
    """The database answers and has the schema of this version."""
    from mmadmin.host.doctor import Result

    if not is_set_up(Home.from_env()) and not os.environ.get("DATABASE_URL"):
        return Result("database", "fail", "there is none yet", "run `mm up`")
    import django

    django.setup()
    from django.db import DatabaseError, connection
    from django.db.migrations.executor import MigrationExecutor

    try:
        executor = MigrationExecutor(connection)
        waiting = executor.migration_plan(executor.loader.graph.leaf_nodes())
        read_only = _is_read_only(connection)
    except DatabaseError as error:
        return Result("database", "fail", f"it does not answer: {error}", "check DATABASE_URL")
    finally:
        connection.close()
    vendor = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}.get(
        connection.vendor, connection.vendor
    )
    if waiting:
        lacks = f"{vendor} lacks {counted(len(waiting), 'migration')}"
        return Result("database", "fail", lacks, "run `mm up`")
    if read_only:
        fact = f"{vendor} cannot be written ({read_only})"
        return Result("database", "fail", fact, "look at its disk, mount options and owner")
    return Result("database", "ok", f"{vendor}, schema is current")


def _is_read_only(connection: BaseDatabaseWrapper) -> str:
    """Why the database takes no writes; empty when it does, or is busy with one."""
    from django.db import OperationalError

    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SHOW transaction_read_only")
            return "it is read-only" if cursor.fetchone()[0] == "on" else ""
        try:
            cursor.execute("BEGIN IMMEDIATE")
            cursor.execute("ROLLBACK")
        except OperationalError as error:
            return "" if "locked" in str(error) else str(error)
    return ""


def sweeper() -> Result:
    """Beat sends the sweep every few seconds, and a worker takes it."""
    from mmadmin.host.doctor import Result
    from mmadmin.host.supervisor import Supervisor

    home = Home.from_env()
    if not is_set_up(home) or not (os.environ.get("REDIS_URL") or Supervisor(home).running()):
        return Result("sweeper", "ok", "nothing runs")
    import django

    django.setup()
    import redis

    from deployments.broker.feed import swept_at
    from mmadmin.celery import SWEEP_S

    try:
        age_s = int(time.time()) - swept_at()
    except (redis.RedisError, OSError):
        return Result("sweeper", "warn", "the broker cannot say", "see `broker`")
    if 0 <= age_s <= MISSED_SWEEPS * SWEEP_S:
        return Result("sweeper", "ok", f"it ran {age_s} s ago")
    fact = (
        "its last run lies in the future: the clock was set back"
        if age_s < 0
        else f"no sweep ran for {age_s // SWEEP_S} periods of {SWEEP_S} s"
        if age_s < time.time() - 1
        else "it has never run"
    )
    return Result(
        "sweeper",
        "fail",
        f"{fact}; jobs, usage and alarms may wait",
        "wait a minute after `mm up`; then `mm up --restart`, and read `mm logs beat` and"
        " `mm logs worker`",
    )


def live() -> Result:
    """Every host with a live deployment reports, and this one has the bytes of its own."""
    from mmadmin.host.doctor import Result

    if database().level == "fail":
        return Result("live", "fail", "the database cannot say", "see `database`")
    from django.db import connection

    from deployments.jobs.hosts import lacking
    from deployments.models import Deployment
    from mmadmin.core.store import Store

    home = Home.from_env()
    try:
        found = list(Deployment.objects.filter(live__isnull=False).select_related("host"))
        missing = lacking(Store(home.store)) if found else {}
    finally:
        connection.close()
    if missing:
        names = ", ".join(generation.uid for generation in missing)
        fact = f"the store lacks bytes of what is live: {names}"
        return Result("live", "fail", fact, "run `mm rebuild --live`")
    if away := {deployment.host.name for deployment in found if deployment.host.is_away}:
        fact = f"workers that do not report: {', '.join(sorted(away))}"
        return Result("live", "fail", fact, "run `mm up` there, and read `mm logs worker`")
    return Result("live", "ok", counted(len(found), "live deployment"))


def of_the_database(error: BaseException) -> MmError | None:
    """Explain a database that does not answer or has another schema; None for other errors."""
    if "django.db" not in sys.modules:
        return None
    from django.db import DatabaseError

    if not isinstance(error, DatabaseError) or (found := database()).level != "fail":
        return None
    return Unreachable(f"the database cannot be used: {found.fact}", remedy=found.remedy)


def administrator() -> Result:
    """Somebody can log in as administrator."""
    from mmadmin.host.doctor import Result

    if database().level == "fail":
        return Result("administrator", "fail", "the database cannot say", "see `database`")
    from django.db import connection

    from deployments.models import Role, User

    try:
        count = User.objects.filter(role=Role.ADMIN, is_active=True).count()
    finally:
        connection.close()
    if count == 0:
        return Result("administrator", "fail", "there is none", "run `mm up`: it makes one")
    return Result("administrator", "ok", f"{count} active")
