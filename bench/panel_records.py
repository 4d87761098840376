"""Years of records for the panel's bench: generations, builds, keys, audit events, usage.

`python -m bench.panel` calls `fill` once on an empty database.
"""

# ruff: noqa: PLC0415 (Django's models can be imported only once it is set up)

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

DEPLOYMENTS = 20
RECORDED = (0, 3)
"""The deployments whose generations have their template and its rendering, too: the large parts."""
TEMPLATE = "{% for message in messages %}[INST]{{ message.content }}[/INST]{% endfor %}\n" * 120
STEPS = 12
OF_FILES = 999
"""How much the running step has to do."""
HOUR = timedelta(hours=1)


def fill(generations: int, keys: int, usage: int) -> None:
    """Write so many of each."""
    from deployments.models import User

    ada = User.objects.create_superuser("ada", password="x", role="admin")
    names = _generations(ada, generations)
    _build_under_way(ada)
    _usage(names, _keys(ada, keys), usage)


def _generations(ada: Any, count: int) -> list[str]:
    from deployments.models import (
        Activation,
        AuditEvent,
        Build,
        Deployment,
        Generation,
        GenerationReport,
        Replica,
        Transition,
    )
    from tests.panel import seed

    host = seed.hosts(datetime.now(UTC))["local"]
    specs = [
        seed.mistral_spec(quant=quant, engine=f"11{engine}.0.0", slots=1)
        for quant, engine in (("Q4_K_M", 401), ("Q5_K_M", 434))
    ]
    locks = [seed._lock(spec, number) for number, spec in enumerate(specs)]  # noqa: SLF001
    start = datetime.now(UTC) - timedelta(days=700)
    each = count // DEPLOYMENTS
    names = []
    for d in range(DEPLOYMENTS):
        deployment = Deployment.objects.create(
            name=f"model-{d:02}", public_name=f"model-{d:02}", host=host, created_by=ada
        )
        names.append(deployment.name)
        generations = Generation.objects.bulk_create(
            Generation(
                deployment=deployment,
                number=n,
                spec_toml=specs[n % 2],
                lock=locks[n % 2],
                host_facts=host.facts,
                author=ada,
                reason=f"change {n}",
                state="live" if n == each else "retired",
                system=f"{n:064x}-system",
                created_at=start + n * HOUR,
            )
            for n in range(1, each + 1)
        )
        GenerationReport.objects.bulk_create(
            GenerationReport(generation=g, kind=kind, data=data, made_by="bench")
            for g in generations
            for kind, data in _reports(whole=d in RECORDED or g.number == each).items()
        )
        parents = dict(zip(generations[1:], generations, strict=False))
        for generation, parent in parents.items():
            generation.parent = parent
        Generation.objects.bulk_update(list(parents), ["parent"], batch_size=500)
        Transition.objects.bulk_create(
            Transition(generation=g, before=b, after=a, actor=ada, at=g.created_at + k * HOUR / 9)
            for g in generations
            for k, (b, a) in enumerate(
                [("", "planned"), ("planned", "building"), ("building", "built")]
                + [("built", "starting"), ("starting", "probing"), ("probing", "live")]
                + ([] if g.state == "live" else [("live", "draining"), ("draining", "retired")])
            )
        )
        Build.objects.bulk_create(
            Build(
                deployment=deployment,
                generation=g,
                spec_toml="",
                host=host,
                actor=ada,
                state="succeeded",
                created_at=g.created_at,
            )
            for g in generations
        )
        Activation.objects.bulk_create(
            Activation(
                deployment=deployment,
                target=g,
                kind="activate",
                host=host,
                actor=ada,
                state="succeeded",
                created_at=g.created_at,
            )
            for g in generations
        )
        AuditEvent.objects.bulk_create(
            AuditEvent(
                actor=ada,
                verb="deployment.deploy",
                subject=f"deployment:{deployment.name}",
                summary=f"generation {g.number} of {deployment.name}",
                at=g.created_at,
            )
            for g in generations
        )
        deployment.live = generations[-1]
        deployment.save()
        Replica.objects.create(uid=f"r-{d}", generation=generations[-1], host=host, state="ready")
    return names


def _reports(*, whole: bool) -> dict[str, Any]:
    """What is known of a generation; where it is `whole`, its template too."""
    from tests.panel import seed

    told = {"command": seed.COMMAND, "probe_report": seed.PROBES}
    return told | ({"template": TEMPLATE, "rendering": seed.RENDERING} if whole else {})


def _build_under_way(ada: Any) -> None:
    """The newest build: twelve steps with long logs, one of them running."""
    from deployments.models import Build, BuildStep, Deployment, LogChunk

    deployment = Deployment.objects.get(name="model-00")
    build = Build.objects.create(
        deployment=deployment,
        generation=deployment.generations.order_by("-number")[0],
        spec_toml="",
        host=deployment.host,
        actor=ada,
        state="running",
        phase="building",
        started_at=datetime.now(UTC),
    )
    steps = BuildStep.objects.bulk_create(
        BuildStep(
            build=build,
            position=n,
            derivation=f"{n:064x}",
            name=f"step-{n}",
            recipe="build-engine",
            inputs=[f"{n - 1:064x}"] if n else [],
            state="running" if n == STEPS - 1 else "built",
            progress_total=OF_FILES,
            progress_unit="files",
            started_at=datetime.now(UTC),
        )
        for n in range(STEPS)
    )
    LogChunk.objects.bulk_create(
        LogChunk(build=build, step=step, text=f"[{i}/400] Building CXX object file-{i}.cpp.o\n")
        for step in steps
        for i in range(400)
    )


def _keys(ada: Any, count: int) -> list[str]:
    from deployments.models import ClientKey
    from tests.panel import seed

    made = seed.keys({"ada": ada}, datetime.now(UTC), n=count)
    return [key.key_id for key in ClientKey.objects.filter(pk__in=[k.pk for k in made[:400]])]


def _usage(names: list[str], keys: list[str], count: int) -> None:
    """Events by the database's own hand: a million objects would take minutes."""
    from django.db import connection

    from deployments.models import UsageBucket, UsageDay
    from tests.panel import seed

    chance = random.Random(3)
    now = datetime.now(UTC).replace(tzinfo=None)
    table = "deployments_usageevent"
    columns = (
        "id, at, key_id, deployment, generation, endpoint, status, outcome, streamed,"
        " prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens, exact, queue_ms,"
        " ttft_ms, duration_ms, tokens_per_s_milli"
    )

    def rows() -> Iterator[tuple[Any, ...]]:
        for n in range(count):
            at = now - timedelta(seconds=chance.random() * 90 * 86400)
            yield (
                f"req-{n:08x}",
                at.isoformat(sep=" "),
                chance.choice(keys),
                chance.choice(names),
                500,
                "chat",
                200,
                "ok",
                True,
                400,
                120,
                50,
                20,
                True,
                3,
                700,
                9000,
                9000,
            )

    marks = ",".join(["%s"] * 18)
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.executemany(f"INSERT INTO {table} ({columns}) VALUES ({marks})", rows())
        cursor.execute("COMMIT")
    this_hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    buckets = [
        UsageBucket(
            hour=this_hour - back * HOUR,
            key_id=key,
            deployment=name,
            generation=500,
            endpoint="chat",
            requests=30,
            failed=1,
            prompt_tokens=12_000,
            completion_tokens=3_600,
            ttft_ms=21_000,
            duration_ms=270_000,
        )
        for back in range(90 * 24)
        for key, name in {(chance.choice(keys), chance.choice(names)) for _ in range(60)}
    ]
    UsageBucket.objects.bulk_create(buckets, batch_size=2000)
    UsageDay.objects.bulk_create(seed.days_of(buckets), batch_size=2000)
