"""What a new installation still needs from the people who run it."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.models import AuditEvent, ClientKey, Deployment, Role, User

DEMO = "smollm2-135m"
"""The deployment that the first run makes."""
DEMO_OWNER = "first run"
"""The owner of the key that the first run makes."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do, and whether somebody has done it."""

    title: str
    why: str
    page: str
    """Name of the page's address."""
    done: bool


def first_steps(actor: User) -> tuple[Step, ...]:
    """The steps of a person who runs the installation; empty once all are done or it is closed.

    A viewer has none. A person who logs in elsewhere has no password to change.
    """
    if not actor.at_least(Role.OPERATOR) or actor.first_steps_closed_at is not None:
        return ()
    steps = []
    if actor.has_usable_password():
        changed = AuditEvent.objects.filter(
            actor=actor, verb="user.password", subject=f"user:{actor.get_username()}"
        )
        steps.append(
            Step(
                "Change your password",
                "The first one was shown in a terminal.",
                "account",
                changed.exists(),
            )
        )
    if actor.at_least(Role.ADMIN):
        others = User.objects.exclude(pk=actor.pk)
        steps.append(
            Step(
                "Add a teammate",
                "Every change is kept with its author's name.",
                "people",
                others.exists(),
            )
        )
    own = Deployment.objects.exclude(name=DEMO).exclude(live=None)
    keys = ClientKey.objects.exclude(owner=DEMO_OWNER)
    steps += [
        Step(
            "Deploy a model of your own",
            "From the model hub, or a file on the host.",
            "new-deployment",
            own.exists(),
        ),
        Step(
            "Create a key",
            "One for each client, with its own limits.",
            "keys",
            keys.exists(),
        ),
    ]
    return () if all(step.done for step in steps) else tuple(steps)
