"""The panel's forms: their fields, their help, and their validation messages.

What an answer means is decided by the actions; a form only reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django import forms
from django.contrib.auth.forms import AuthenticationForm
from django.utils import timezone

from deployments.models import Role, Scope
from mmadmin.core.access import ENDPOINTS
from mmadmin.core.generations.trial import MINUTES, MOST_MINUTES
from mmadmin.core.snapshot import KEY_LIMITS

PASSWORD_RULES = "At least 12 characters, not a common one, and not like the username."  # noqa: S105


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
        "invalid_login": "Incorrect username or password.",
        "inactive": "This account is deactivated. Ask an admin.",
    }


class Code(Described):
    """The code of a second factor."""

    code = forms.CharField(
        label="Code",
        max_length=32,
        widget=forms.TextInput(attrs={"autocomplete": "one-time-code", "autofocus": True}),
        help_text="6 digits from your authenticator app, or one of your recovery codes.",
        error_messages={"required": "Enter a code."},
    )


class Reason(Described):
    """Why somebody does what they do: history keeps it."""

    reason = forms.CharField(
        label="Reason",
        max_length=1000,
        strip=True,
        widget=forms.Textarea(attrs={"rows": 2, "autofocus": True}),
        help_text="A short explanation for your teammates.",
        error_messages={"required": "Enter a reason: it is kept in the history."},
    )


class OptionalReason(Reason):
    """A reason that may be left out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["reason"].required = False


SOURCE_KINDS = (
    ("hub", "Hub repository"),
    ("index", "Python package"),
    ("address", "Address"),
    ("folder", "Folder of the host"),
    ("digest", "Content (SHA-256)"),
)


class Exceptional(Reason):
    """What the admins are asked to allow."""

    kind = forms.ChoiceField(label="Kind", choices=SOURCE_KINDS)
    pattern = forms.CharField(
        label="Pattern",
        max_length=255,
        widget=forms.TextInput(attrs={"class": "code", "spellcheck": "false"}),
        help_text="owner/name or owner/*; a package; a host name, an address or a network; an"
        " absolute folder; a SHA-256.",
        error_messages={"required": "Enter what the rule is about."},
    )
    field_order = ("kind", "pattern", "effect", "reason")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        asked = "reason" if self.initial.get("pattern") else "pattern"
        for name in ("pattern", "reason"):
            self.fields[name].widget.attrs["autofocus"] = name == asked


class PolicyRuleForm(Exceptional):
    """A rule of the policy."""

    effect = forms.ChoiceField(label="Effect", choices=(("allow", "Allow"), ("deny", "Deny")))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["reason"].required = False


class Answer(Reason):
    """What is said to a request; a refusal needs a reason."""

    def __init__(self, *args: Any, grant: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["reason"].required = not grant


class BeginTrial(OptionalReason):
    """Which generation to try beside the live one, and for how long."""

    which = forms.ChoiceField(
        label="Generation",
        widget=forms.Select(attrs={"autofocus": True}),
        help_text="It is available in the playground only. Clients keep using the live generation.",
        error_messages={"required": "Choose a generation."},
    )
    minutes = forms.IntegerField(
        label="Minutes",
        initial=MINUTES,
        min_value=1,
        max_value=MOST_MINUTES,
        help_text="Ends automatically, or earlier if you stop it or an activation needs the"
        " memory.",
        error_messages={"required": "Enter a duration."},
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
        help_text="TOML. Commits, digests and sizes are pinned when you plan.",
        error_messages={"required": "Paste a deployment file, or choose one from the catalog."},
    )
    reason = forms.CharField(
        label="Reason",
        required=False,
        max_length=1000,
        widget=forms.TextInput(attrs={"placeholder": "What this changes, and why"}),
        help_text="Shown in the history next to your name.",
    )
    activate = forms.BooleanField(
        label="Activate after build",
        required=False,
        initial=True,
        help_text="Goes live after passing its probes. The current generation serves until then.",
    )


class DeploymentSettings(Described):
    """What belongs to a deployment and to none of its generations."""

    description = forms.CharField(
        label="Description",
        required=False,
        widget=forms.Textarea(attrs={"rows": 2}),
        help_text="What this deployment is for, and for whom.",
    )
    keep_generations = forms.IntegerField(
        label="Generations to keep",
        min_value=1,
        max_value=1000,
        help_text="The newest generations to keep, in addition to live and pinned ones.",
    )
    auto_rollback = forms.BooleanField(
        label="Automatic rollback",
        required=False,
        help_text="When the live engine keeps failing. Skips generations marked bad.",
    )


class IssueKey(Described):
    """Whom a key is for and what it may do."""

    owner = forms.CharField(
        label="Owner",
        max_length=128,
        widget=forms.TextInput(attrs={"placeholder": "Dana Ruiz, search team", "autofocus": True}),
        help_text="The person or service that will use it. Usage is counted under this name.",
        error_messages={"required": "Enter an owner: who will use this key."},
    )
    note = forms.CharField(
        label="Note",
        required=False,
        max_length=255,
        widget=forms.TextInput(attrs={"placeholder": "Nightly summaries"}),
        help_text="What it is for.",
    )
    deployments = forms.MultipleChoiceField(
        label="Allowed models",
        required=False,
        widget=forms.CheckboxSelectMultiple,
        help_text="Leave empty to allow all, including future models.",
    )
    endpoints = forms.MultipleChoiceField(
        label="Allowed endpoints",
        choices=[(name, name) for name in ENDPOINTS],
        required=False,
        widget=forms.CheckboxSelectMultiple,
        help_text="Leave empty to allow all.",
    )
    rpm = forms.IntegerField(
        label="Requests per minute", min_value=0, required=False, help_text="Empty or 0: no limit."
    )
    tpm = forms.IntegerField(
        label="Tokens per minute",
        min_value=0,
        required=False,
        help_text="Prompt and output tokens together.",
    )
    concurrency = forms.IntegerField(
        label="Concurrent requests",
        min_value=0,
        required=False,
        help_text="Further requests get a 429 error.",
    )
    tokens_per_day = forms.IntegerField(
        label="Tokens per day", min_value=0, required=False, help_text="Resets at 00:00 UTC."
    )
    tokens_per_month = forms.IntegerField(
        label="Tokens per month",
        min_value=0,
        required=False,
        help_text="Resets on the 1st at 00:00 UTC.",
    )
    expires_at = forms.DateTimeField(
        label="Expires",
        required=False,
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
        help_text="In UTC. Leave empty for no expiry.",
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
        """An expiry is in the future."""
        moment = self.cleaned_data["expires_at"]
        if moment is not None and moment <= timezone.now():
            raise forms.ValidationError(
                "This date is in the past. Choose a later one, or leave it empty."
            )
        return moment

    def wanted(self) -> dict[str, Any]:
        """What the action takes; an empty limit is 0."""
        answers = dict(self.cleaned_data)
        for name in KEY_LIMITS:
            answers[name] = answers[name] or 0
        return answers


class NewUser(Described):
    """A person to let in."""

    username = forms.CharField(
        label="Username",
        max_length=150,
        widget=forms.TextInput(attrs={"autocomplete": "off", "autofocus": True}),
        help_text="Used to log in. Letters, digits and @ . + - _ only.",
    )
    email = forms.EmailField(label="Email", required=False)
    role = forms.ChoiceField(
        label="Role",
        choices=[
            (Role.VIEWER, "Viewer: read-only, without keys and the audit log"),
            (Role.OPERATOR, "Operator: deploys, activates, rolls back"),
            (Role.ADMIN, "Admin: also manages keys and people"),
        ],
        initial=Role.VIEWER,
    )
    password = forms.CharField(
        label="Initial password",
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text=f"{PASSWORD_RULES} They can change it under Account.",
    )


class Confirmation(Described):
    """The person is there, not only their open session."""

    current_password = forms.CharField(
        label="Current password",
        required=False,
        strip=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "current-password"}),
        help_text="Not needed in the first minutes after you log in.",
    )


class Enrolment(Confirmation):
    """The first code of an authenticator app."""

    code = forms.CharField(
        label="Code",
        max_length=16,
        widget=forms.TextInput(attrs={"autocomplete": "one-time-code", "inputmode": "numeric"}),
        help_text="The 6 digits that the app shows.",
        error_messages={"required": "Enter the code that the app shows."},
    )
    field_order = ("code", "current_password")


class RequiredFactor(forms.Form):
    """The roles that need a second factor."""

    roles = forms.MultipleChoiceField(
        label="Required for",
        choices=Role.choices,
        required=False,
        widget=forms.CheckboxSelectMultiple,
    )


class NewPassword(Described):
    """One's own new password."""

    current_password = forms.CharField(
        label="Current password",
        strip=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "current-password"}),
    )
    password = forms.CharField(
        label="New password",
        strip=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text=PASSWORD_RULES,
    )


class FirstPassword(Described):
    """A new password for somebody else."""

    password = forms.CharField(
        label="New password",
        strip=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password", "autofocus": True}),
        help_text=f"{PASSWORD_RULES} Share it over a secure channel.",
    )


class NewToken(Confirmation):
    """What a personal API token is for, what it may do, and until when."""

    note = forms.CharField(
        label="Purpose",
        required=False,
        max_length=255,
        widget=forms.TextInput(attrs={"placeholder": "Deploy script on my laptop"}),
    )
    scopes = forms.MultipleChoiceField(
        label="Scopes",
        initial=[Scope.READ],
        widget=forms.CheckboxSelectMultiple,
        help_text="Choose as few as the script needs. A token never does more than your role.",
        error_messages={"required": "Choose at least one scope."},
    )
    days = forms.TypedChoiceField(
        label="Expires",
        coerce=int,
        initial=90,
        choices=[(30, "in 30 days"), (90, "in 90 days"), (365, "in a year"), (0, "never")],
    )
    field_order = ("note", "scopes", "days", "current_password")

    def __init__(self, *args: Any, scopes: Sequence[Scope], password: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        choice = self.fields["scopes"]
        assert isinstance(choice, forms.MultipleChoiceField)  # noqa: S101 (for the type checker)
        choice.choices = [(scope.value, scope.label) for scope in scopes]
        if not password:
            del self.fields["current_password"]

    def wanted(self) -> dict[str, Any]:
        """What the action takes."""
        days = self.cleaned_data["days"]
        return {
            "note": self.cleaned_data["note"],
            "scopes": self.cleaned_data["scopes"],
            "expires_at": timezone.now() + timedelta(days=days) if days else None,
        }
