"""The panel's forms: their fields, their help, and what is wrong with an answer in words.

What an answer means is decided by the actions; a form only reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django import forms
from django.contrib.auth.forms import AuthenticationForm
from django.utils import timezone

from deployments.models import Role
from mmadmin.core.access import ENDPOINTS
from mmadmin.core.generations.trial import MINUTES, MOST_MINUTES
from mmadmin.core.snapshot import KEY_LIMITS


class Described(forms.Form):
    """A form whose fields point a screen reader to their help and to what is wrong with them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("label_suffix", "")
        super().__init__(*args, **kwargs)
        for name, field in self.fields.items():
            if field.help_text:
                field.widget.attrs["aria-describedby"] = f"id_{name}_help"


class Login(AuthenticationForm):
    """Name and password."""

    error_messages = {  # noqa: RUF012 (Django's own shape)
        "invalid_login": "This name and password do not fit together.",
        "inactive": "This account is switched off. Ask an admin.",
    }


class Reason(Described):
    """Why somebody does what they do: history keeps it."""

    reason = forms.CharField(
        label="Reason",
        max_length=1000,
        strip=True,
        widget=forms.Textarea(attrs={"rows": 2, "autofocus": True}),
        help_text="One sentence that your teammates will understand in half a year.",
        error_messages={"required": "Say why: the history keeps it."},
    )


class OptionalReason(Reason):
    """A reason that may be left out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["reason"].required = False


class BeginTrial(OptionalReason):
    """Which generation to try beside the live one, and for how long."""

    which = forms.ChoiceField(
        label="Generation",
        widget=forms.Select(attrs={"autofocus": True}),
        help_text="It answers in the playground only: clients go on being served by the live one.",
        error_messages={"required": "Choose a generation."},
    )
    minutes = forms.IntegerField(
        label="Minutes",
        initial=MINUTES,
        min_value=1,
        max_value=MOST_MINUTES,
        help_text="Then it ends by itself, or before: at a click, or for an activation's memory.",
        error_messages={"required": "Say for how long."},
    )
    field_order = ("which", "minutes", "reason")

    def __init__(self, *args: Any, choices: Sequence[tuple[str, Any]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.fields["reason"].widget.attrs["autofocus"]
        which = self.fields["which"]
        assert isinstance(which, forms.ChoiceField)  # noqa: S101 (declared above)
        which.choices = choices


class Deploy(Described):
    """A deployment file and why it is wanted."""

    spec_toml = forms.CharField(
        label="Deployment file",
        strip=False,
        widget=forms.Textarea(
            attrs={
                "class": "code",
                "rows": 26,
                "spellcheck": "false",
                "autocapitalize": "off",
                "autocomplete": "off",
            }
        ),
        help_text="TOML. Whatever moves (commits, digests, sizes) is pinned when it is planned.",
        error_messages={"required": "Paste a deployment file, or choose one from the catalog."},
    )
    reason = forms.CharField(
        label="Reason",
        required=False,
        max_length=1000,
        widget=forms.TextInput(attrs={"placeholder": "What this changes, and why"}),
        help_text="Shown in the history beside your name.",
    )
    activate = forms.BooleanField(
        label="Make it live when it is built",
        required=False,
        initial=True,
        help_text="Only after it has passed its probes. What is live now serves until then.",
    )


class DeploymentSettings(Described):
    """What belongs to a deployment and to none of its generations."""

    description = forms.CharField(
        label="Description",
        required=False,
        widget=forms.Textarea(attrs={"rows": 2}),
        help_text="For people: what this is and whom it is for.",
    )
    keep_generations = forms.IntegerField(
        label="Generations that are kept",
        min_value=1,
        max_value=1000,
        help_text="So many of the newest stay in the store, beside what is live or pinned.",
    )
    auto_rollback = forms.BooleanField(
        label="Roll back by itself",
        required=False,
        help_text="When the live engine stays dead: to the last one that is not marked bad.",
    )


class IssueKey(Described):
    """Whom a key is for and what it may do."""

    owner = forms.CharField(
        label="Owner",
        max_length=128,
        widget=forms.TextInput(attrs={"placeholder": "Dana Ruiz, search team", "autofocus": True}),
        help_text="The person or service that will use it. Usage is counted under this name.",
        error_messages={"required": "A key needs an owner: say who will use it."},
    )
    note = forms.CharField(
        label="Note",
        required=False,
        max_length=255,
        widget=forms.TextInput(attrs={"placeholder": "Nightly summaries"}),
        help_text="What it is for.",
    )
    deployments = forms.MultipleChoiceField(
        label="Models it may use",
        required=False,
        widget=forms.CheckboxSelectMultiple,
        help_text="None chosen means all, also those that come later.",
    )
    endpoints = forms.MultipleChoiceField(
        label="Endpoints it may use",
        choices=[(name, name) for name in ENDPOINTS],
        required=False,
        widget=forms.CheckboxSelectMultiple,
        help_text="None chosen means all.",
    )
    rpm = forms.IntegerField(
        label="Requests a minute", min_value=0, required=False, help_text="Empty or 0: no limit."
    )
    tpm = forms.IntegerField(
        label="Tokens a minute",
        min_value=0,
        required=False,
        help_text="Prompt and answer together.",
    )
    concurrency = forms.IntegerField(
        label="Requests at once",
        min_value=0,
        required=False,
        help_text="More are refused with 429.",
    )
    tokens_per_day = forms.IntegerField(
        label="Tokens a day", min_value=0, required=False, help_text="Starts anew at 00:00 UTC."
    )
    tokens_per_month = forms.IntegerField(
        label="Tokens a month",
        min_value=0,
        required=False,
        help_text="Starts anew on the 1st, UTC.",
    )
    expires_at = forms.DateTimeField(
        label="Expires",
        required=False,
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
        help_text="UTC. Empty: never.",
        input_formats=["%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d"],
    )

    def __init__(self, *args: Any, deployments: list[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        choice = self.fields["deployments"]
        assert isinstance(choice, forms.MultipleChoiceField)  # noqa: S101 (for the type checker)
        choice.choices = [(name, name) for name in deployments]
        for name in KEY_LIMITS:
            self.fields[name].widget.attrs |= {"placeholder": "no limit", "inputmode": "numeric"}

    def clean_expires_at(self) -> Any:
        """An expiry lies ahead."""
        moment = self.cleaned_data["expires_at"]
        if moment is not None and moment <= timezone.now():
            raise forms.ValidationError(
                "This lies in the past. Choose a later day, or leave it empty."
            )
        return moment

    def wanted(self) -> dict[str, Any]:
        """What the action takes; an empty limit is 0."""
        answers = dict(self.cleaned_data)
        for name in KEY_LIMITS:
            answers[name] = answers[name] or 0
        return answers


class Confirm(Described):
    """Nothing but a yes."""


class NewUser(Described):
    """A person to let in."""

    username = forms.CharField(
        label="Name",
        max_length=150,
        widget=forms.TextInput(attrs={"autocomplete": "off", "autofocus": True}),
        help_text="What they log in with. Letters, digits and @ . + - _ only.",
    )
    email = forms.EmailField(label="Email", required=False)
    role = forms.ChoiceField(
        label="Role",
        choices=[
            (Role.VIEWER, "Viewer: sees everything but keys, changes nothing"),
            (Role.OPERATOR, "Operator: deploys, activates, rolls back"),
            (Role.ADMIN, "Admin: also keys and people"),
        ],
        initial=Role.VIEWER,
    )
    password = forms.CharField(
        label="First password",
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text="At least 8 characters, and not a common one. They change it under Account.",
    )


class NewPassword(Described):
    """One's own new password."""

    old = forms.CharField(
        label="Present password",
        strip=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "current-password"}),
    )
    password = forms.CharField(
        label="New password",
        strip=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text="At least 8 characters, and not a common one.",
    )


class FirstPassword(Described):
    """A new password for somebody else."""

    password = forms.CharField(
        label="New password",
        strip=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password", "autofocus": True}),
        help_text="At least 8 characters, and not a common one. Tell it to them on a safe way.",
    )


class NewToken(Described):
    """What a personal API token is for."""

    note = forms.CharField(
        label="What it is for",
        required=False,
        max_length=255,
        widget=forms.TextInput(attrs={"placeholder": "Deploy script on my laptop"}),
    )
