"""Django's own admin, for looking: nothing can be added, changed or removed there.

It is for everybody with the role admin. Login, logout and password are the panel's own. What people
change goes through the panel, the API or `mm`, where roles are checked, audit events
are written and the gate is told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

from deployments import models
from deployments.views import session

if TYPE_CHECKING:
    Base = admin.ModelAdmin[Any]
else:
    Base = admin.ModelAdmin


class Site(admin.AdminSite):
    """The records, for admins of the panel."""

    site_header = site_title = "mmadmin: raw records"

    def has_permission(self, request: HttpRequest) -> bool:
        """By role, however the account was made."""
        user = request.user
        return isinstance(user, models.User) and user.is_active and user.at_least(models.Role.ADMIN)

    def login(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:  # noqa: ARG002
        """The panel's own page; whoever is logged in and no admin reads why they are not let in."""
        if request.user.is_authenticated:
            raise PermissionDenied
        return redirect_to_login(request.GET.get("next") or request.get_full_path())

    def logout(  # type: ignore[override]
        self,
        request: HttpRequest,
        extra_context: Any = None,  # noqa: ARG002
    ) -> HttpResponse:
        """As anywhere in the panel."""
        return session.logout(request)

    def password_change(  # type: ignore[override]
        self,
        request: HttpRequest,  # noqa: ARG002
        extra_context: Any = None,  # noqa: ARG002
    ) -> HttpResponse:
        """The page of one's own account."""
        return redirect("account")


site = Site()


class ReadOnly(Base):
    """A record to look at."""

    list_per_page = 50
    show_full_result_count = False
    hidden: ClassVar[tuple[str, ...]] = ()
    """Fields that are not shown."""

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Whoever the site lets in."""
        return site.has_permission(request)

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:  # noqa: ARG002
        """Whoever the site lets in."""
        return site.has_permission(request)

    def has_add_permission(self, request: HttpRequest) -> bool:  # noqa: ARG002
        """Nobody."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:  # noqa: ARG002
        """Nobody."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:  # noqa: ARG002
        """Nobody."""
        return False

    def get_fields(self, request: HttpRequest, obj: Model | None = None) -> Any:
        """All but the hidden ones."""
        return [f for f in super().get_fields(request, obj) if f not in self.hidden]


LISTS: dict[type[Model], tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    models.Host: (("name", "seen_at"), (), ("name",)),
    models.Deployment: (("name", "public_name", "host", "live"), (), ("name", "public_name")),
    models.Generation: (
        ("deployment", "number", "state", "author", "created_at"),
        ("state", "mark", "pinned"),
        ("deployment__name", "reason"),
    ),
    models.Transition: (("generation", "before", "after", "actor", "at"), ("after",), ()),
    models.Build: (("id", "deployment", "generation", "state", "created_at"), ("state",), ()),
    models.Activation: (
        ("id", "deployment", "kind", "mode", "state", "phase", "created_at"),
        ("state", "kind"),
        ("deployment__name",),
    ),
    models.Trial: (
        ("id", "generation", "state", "phase", "opened_at", "ends_at"),
        ("state",),
        ("deployment__name",),
    ),
    models.HostTask: (("id", "kind", "host", "state", "created_at"), ("kind", "state"), ()),
    models.GenerationReport: (("generation", "kind", "made_by", "at"), ("kind",), ()),
    models.Replica: (("uid", "generation", "state", "pid"), ("state",), ("uid",)),
    models.Alarm: (("deployment", "kind", "subject", "raised_at", "cleared_at"), ("kind",), ()),
    models.UsageBucket: (("hour", "key_id", "deployment", "requests"), (), ("key_id",)),
    models.UsageDay: (("day", "of", "deployment", "key_id", "requests"), ("of",), ("key_id",)),
    models.AuditEvent: (
        ("at", "actor", "verb", "subject", "summary"),
        ("verb",),
        ("subject", "summary"),
    ),
    models.ClientKey: (
        ("key_id", "owner", "created_at", "expires_at", "revoked_at"),
        (),
        ("key_id", "owner", "note"),
    ),
    models.UserToken: (
        ("token_id", "user", "scopes", "expires_at", "revoked_at"),
        (),
        ("token_id",),
    ),
    models.User: (("username", "role", "is_active", "last_login"), ("role",), ("username",)),
}
HIDDEN = ("digest", "password", "second_factor_key")

for model, (columns, filters, search) in LISTS.items():
    site.register(
        model,
        type(
            f"{model.__name__}Admin",
            (ReadOnly,),
            {
                "list_display": columns,
                "list_filter": filters,
                "search_fields": search,
                "list_select_related": True,
                "hidden": HIDDEN,
            },
        ),
    )
