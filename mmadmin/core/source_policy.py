"""Who may take what from where: an admin's rules as data, and the one function that decides.

A rule allows or denies a pattern of one kind:

    hub       repositories of the model hub: `owner/name`, `datasets/owner/name`, with `*` and `?`
    index     packages of the Python index: `name` or `name==version`, with `*` and `?`
    address   hosts of `url` sources: `public`, a host name (with `*`), an address, a network
    folder    folders of the host that builds, with all below them
    digest    one content, by its SHA-256

The most specific rule that matches decides; between equal ones the denial does. The defaults
below are rules like any other: an admin's rule with the same kind and pattern replaces one.

A host name with a `*`, and `*` itself, allow public addresses only: a private one is reached when
its exact name, its address or its network is listed.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from posixpath import normpath
from urllib.parse import parse_qsl, unquote, urlsplit

from mmadmin.core.build.derivation import Derivation, thawed, topological
from mmadmin.core.build.recipe import HubSource, IndexSource, PathSource, Source, UrlSource
from mmadmin.core.errors import InvalidInput, InvalidSpec, SourceRefused
from mmadmin.core.recipes.fetch import RECIPE as FETCH
from mmadmin.core.recipes.fetch import pinned_sources
from mmadmin.core.spec.lock import Lock
from mmadmin.core.spec.questions import requests_of
from mmadmin.core.spec.spec import Spec

KINDS = ("hub", "index", "address", "folder", "digest")
PUBLIC = "public"
PATTERN_MAX = 255
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_REPO = re.compile(r"\*|(datasets/)?[a-z0-9*?][\w.*?-]*/[a-z0-9*?][\w.*?-]*")
_PACKAGE = re.compile(r"[a-z0-9*?][a-z0-9*?-]*(==[A-Za-z0-9.!+_*?-]+)?")
_HOST = re.compile(r"(?!-)[a-z0-9_*?-]+(\.[a-z0-9_*?-]+)*")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a policy."""

    kind: str
    pattern: str
    """As `normal_pattern` writes it."""
    allow: bool
    reason: str = ""
    default: bool = False
    """It stands because no admin said otherwise."""

    def __str__(self) -> str:
        by_default = ", by default" if self.default else ""
        return f"{'allow' if self.allow else 'deny'} {self.kind} {self.pattern}{by_default}"


DEFAULTS = (
    Rule("hub", "*", allow=True, reason="Every repository of the configured hub.", default=True),
    Rule("index", "*", allow=True, reason="Every package of the configured index.", default=True),
    Rule("address", PUBLIC, allow=True, reason="Every public address.", default=True),
    Rule("address", "*", allow=False, reason="No other address.", default=True),
    Rule("folder", "/", allow=False, reason="No folder of the host.", default=True),
)
NO_OTHER = DEFAULTS[3]
NOWHERE = ipaddress.IPv4Address("0.0.0.0")  # noqa: S104 (an address that nothing has)
"""Stands for the private addresses that no rule lists."""
NOT_LISTED = Rule("digest", "*", allow=True, reason="No rule names this content.", default=True)


def normal_pattern(kind: str, pattern: str) -> str:
    """The pattern as it is kept and compared. Raises `InvalidInput`."""
    text = pattern.strip()
    if kind not in KINDS:
        raise InvalidInput(
            f"{kind!r} is not a kind of rule", remedy=f"use {', '.join(KINDS)}", field="kind"
        )
    if not text.isprintable() or not 0 < len(text) <= PATTERN_MAX:
        raise _bad(kind, pattern)
    if kind == "hub" and _REPO.fullmatch(text.lower()):
        return text.lower()
    if kind == "index":
        name, equals, version = text.partition("==")
        found = re.sub(r"[-_.]+", "-", name).lower() + equals + version
        if _PACKAGE.fullmatch(found):
            return found
    if kind == "address":
        found = _normal_address(text)
        if found:
            return found
    if kind == "folder" and text.startswith("/"):
        return normal_folder(text)
    if kind == "digest" and _DIGEST.fullmatch(text.lower()):
        return text.lower()
    raise _bad(kind, pattern)


def _bad(kind: str, pattern: str) -> InvalidInput:
    forms = {
        "hub": "write owner/name, owner/* or * (datasets/owner/name for a dataset)",
        "index": "write a package's name, name==version or *",
        "address": "write public, a host name (*.example.org), an address or a network"
        " (10.0.0.0/8), without scheme and port",
        "folder": "write an absolute folder",
        "digest": "write the 64 hex digits of a SHA-256",
    }
    return InvalidInput(
        f"{pattern[:80]!r} is not a pattern of kind {kind}", remedy=forms[kind], field="pattern"
    )


def normal_folder(path: str) -> str:
    """An absolute path without `.`, `..` and doubled slashes."""
    return normpath("/" + path.lstrip("/"))


def _normal_address(text: str) -> str:
    if "/" in text or ":" in text:
        try:
            net = ipaddress.ip_network(text, strict=False)
        except ValueError:
            return ""
        return str(net.network_address) if net.prefixlen == net.max_prefixlen else str(net)
    host = normal_host(text)
    return host if host == "*" or _HOST.fullmatch(host) else ""


def normal_host(host: str) -> str:
    """A host name as it is compared: lower case, in ASCII, without a last dot."""
    host = host.rstrip(".").lower()
    if not host.isascii():
        try:
            host = host.encode("idna").decode()
        except UnicodeError:
            return ""
    return host


def literal_address(host: str) -> Address | None:
    """The address that a host is written as; None = it is a name."""
    try:
        return unmapped(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    name = normal_host(host)
    if name == "localhost" or name.endswith(".localhost"):  # RFC 6761
        return ipaddress.IPv4Address("127.0.0.1")
    return None


def unmapped(address: Address) -> Address:
    """The IPv4 address inside an IPv6 one that only carries it."""
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or address.sixtofour or address
    return address


def is_public(address: Address) -> bool:
    """True for addresses of the whole internet: no private, loopback, local or reserved one."""
    address = unmapped(address)
    nat64 = ipaddress.ip_network("64:ff9b::/96")
    if isinstance(address, ipaddress.IPv6Address) and address in nat64:
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return address.is_global and not address.is_multicast


@dataclass(frozen=True, slots=True)
class SourcePolicy:
    """The rules of one installation."""

    rules: tuple[Rule, ...] = ()
    """An admin's; the defaults that none of them replaces hold besides."""
    admins: tuple[str, ...] = ()
    """Whom to ask; named in refusals."""

    @property
    def in_force(self) -> tuple[Rule, ...]:
        """Every rule that counts, by kind, those of an admin first."""
        said = {(rule.kind, rule.pattern) for rule in self.rules}
        left = [rule for rule in DEFAULTS if (rule.kind, rule.pattern) not in said]
        return tuple(rule for kind in KINDS for rule in (*self.rules, *left) if rule.kind == kind)

    def _best(self, kind: str, rank: dict[Rule, tuple[int, int]]) -> Rule:
        """The most specific of the rules that match; a denial before its equal."""
        found = max(rank, key=lambda rule: (*rank[rule], not rule.allow), default=None)
        if found is None and kind != "digest":
            return next(rule for rule in DEFAULTS if rule.kind == kind and not rule.allow)
        return found or NOT_LISTED

    def decide(self, kind: str, subject: str) -> Rule:
        """What decides on something of a kind, by what a person would write of it."""
        if kind == "index":
            name, _, version = subject.partition("==")
            return self.index(name, version)
        one: dict[str, Callable[[str], Rule]] = {
            "hub": self.hub,
            "address": self.address,
            "folder": self.folder,
            "digest": self.digest,
        }
        return one[kind](subject)

    def hub(self, repo: str) -> Rule:
        """What decides on a repository of the hub."""
        return self._named("hub", [repo.lower()])

    def index(self, project: str, version: str) -> Rule:
        """What decides on a release of the Python index."""
        name = re.sub(r"[-_.]+", "-", project).lower()
        return self._named("index", [name, f"{name}=={version}"])

    def digest(self, sha256: str) -> Rule:
        """What decides on a content, wherever it comes from."""
        return self._named("digest", [sha256])

    def _named(self, kind: str, names: Sequence[str]) -> Rule:
        rank = {
            rule: (_literal(rule.pattern), len(rule.pattern))
            for rule in self.in_force
            if rule.kind == kind and any(fnmatchcase(name, rule.pattern) for name in names)
        }
        return self._best(kind, rank)

    def folder(self, path: str) -> Rule:
        """What decides on a file of the host, by its normal path."""
        parents = {path, *map(str, PurePosixPath(path).parents)}
        rank = {
            rule: (1, len(PurePosixPath(rule.pattern).parts))
            for rule in self.in_force
            if rule.kind == "folder" and rule.pattern in parents
        }
        return self._best("folder", rank)

    def address(self, host: str, address: Address | None = None) -> Rule:
        """What decides on a connection to `address`, which `host` resolved to.

        Without an address: whether the name could be allowed at all.
        """
        address = literal_address(host) if address is None else unmapped(address)
        public = address is None or is_public(address)
        rank: dict[Rule, tuple[int, int]] = {}
        for rule in self.in_force:
            if rule.kind == "address":
                found = _address_rank(rule, normal_host(host), address, public=public)
                if found is not None:
                    rank[rule] = found
        return self._best("address", rank)


def _literal(pattern: str) -> int:
    """How much of a pattern is fixed; all of it counts more than any part."""
    fixed = len(re.sub(r"[*?]", "", pattern))
    return fixed if fixed < len(pattern) else PATTERN_MAX + fixed


def _address_rank(
    rule: Rule, host: str, address: Address | None, *, public: bool
) -> tuple[int, int] | None:
    """How specifically a rule is about a connection; None = it is not about it."""
    pattern = rule.pattern
    if pattern == PUBLIC:
        return (1, 0) if public else None
    if pattern == host or (address is not None and pattern == str(address)):
        return (4, 0)
    if "/" in pattern:
        network = ipaddress.ip_network(pattern)
        inside = address is not None and address in network
        return (3, network.prefixlen) if inside else None
    if not fnmatchcase(host, pattern):
        return None
    if rule.allow and not public:
        return None
    return (0, 0) if pattern == "*" else (2, _literal(pattern))


def refuse_login(url: str, field: str) -> None:
    """Refuse an address that holds a login: everybody who sees the file would know it."""
    if "@" in urlsplit(url).netloc:
        raise InvalidSpec(
            f"{field}: the address holds a user name or a password",
            remedy="leave it out and name a secret instead: an admin sets one with"
            ' `mm secret set NAME --for https://HOST`, the file says secret = "NAME"',
            field=field,
        )


_TOKEN = re.compile(r"(?i)token|secret|passw|signature|credential|api.?key|auth|^key$|^sig$")


def token_names(url: str) -> list[str]:
    """Names in an address's query that look as if they held a credential."""
    return [name for name, _ in parse_qsl(urlsplit(url).query) if _TOKEN.search(name)]


@dataclass(frozen=True, slots=True)
class Access:
    """Who takes something, and by which policy."""

    policy: SourcePolicy = SourcePolicy()
    on_host: bool = False
    """Asked by `mm` on the host that builds, as the user that mmadmin runs as: who can read every
    file and reach every address from there needs no rule for them."""
    by_admin: bool = False
    """Asked by somebody who may change the policy."""

    @property
    def trusted(self) -> bool:
        """True when the asker may learn what a private source answered."""
        return self.on_host or self.by_admin

    def check_spec(self, spec: Spec) -> None:
        """Refuse what a deployment file names and the policy does not allow.

        Before anything is resolved: a name is looked up, and a link is followed, on the host.
        Raises `SourceRefused`, and `InvalidSpec` for an address that holds a login.
        """
        for request in requests_of(spec):
            origin, field = request.origin, request.field
            if origin is None:
                continue
            if origin.source == "hub":
                self.check_hub(origin.repo, field)
            elif origin.source == "index":
                project, _, version = origin.package.partition("==")
                self.check_index(project, version, field)
            elif origin.source == "url":
                refuse_login(origin.url, field)
                self.check_source(UrlSource(origin.url), origin.sha256, field)
            else:
                self.check_folder(origin.path, field)

    def check_lock(self, lock: Lock) -> None:
        """Refuse what a lock pins, whoever wrote it."""
        for name, files in lock.pins.items():
            for file in files:
                self.check_source(file.source, file.sha256, name)

    def check_graph(self, goal: Derivation) -> None:
        """Refuse what the steps of a graph would fetch, whoever wrote it."""
        for derivation in topological(goal):
            if derivation.recipe == FETCH.kind:
                for pinned, source in pinned_sources(thawed(derivation.params)):
                    self.check_source(source, pinned.sha256, derivation.name)

    def check_source(self, source: Source, sha256: str, field: str) -> None:
        """Refuse one pinned file."""
        self._refuse(self.policy.digest(sha256), f"the content {sha256[:12]}…", sha256, field)
        if isinstance(source, HubSource):
            self.check_hub(source.repo, field)
        elif isinstance(source, IndexSource):
            self.check_index(source.project, source.version, field)
        elif isinstance(source, PathSource):
            self.check_folder(source.path, field)
        elif source.url.startswith("file:"):
            self.check_folder(unquote(urlsplit(source.url).path), field)
        elif not self.on_host:
            host = urlsplit(source.url).hostname or ""
            self._refuse(self._host_rule(host, sha256), f"the host {host}", host, field)

    def check_hub(self, repo: str, field: str) -> None:
        """Refuse a repository of the hub."""
        self._refuse(self.policy.hub(repo), f"the repository {repo}", repo, field)

    def check_index(self, project: str, version: str, field: str) -> None:
        """Refuse a release of the Python index."""
        release = f"{project}=={version}"
        self._refuse(self.policy.index(project, version), f"the package {release}", release, field)

    def check_folder(self, path: str, field: str) -> None:
        """Refuse a file of the host by its path."""
        if not self.on_host:
            path = normal_folder(path)
            folder = str(PurePosixPath(path).parent)
            self._refuse(self.policy.folder(path), f"the folder {folder}", folder, field)

    def reachable(
        self, host: str, addresses: Iterable[Address], sha256: str, field: str
    ) -> list[Address]:
        """Those of a host's addresses that may be connected to.

        Raises `SourceRefused` where there are none: in the same words for a name that nobody knows
        and for one that leads to a forbidden place.
        """
        known = list(addresses)
        if self.on_host:
            return known
        allowed = [one for one in known if self._host_rule(host, sha256, one).allow]
        if not allowed:
            rule = self._host_rule(host, sha256, NOWHERE)
            raise self._refusal(
                rule if not rule.allow else NO_OTHER, f"the host {host}", host, field
            )
        return allowed

    def _host_rule(self, host: str, sha256: str, address: Address | None = None) -> Rule:
        """What decides on a connection; a listed content may come from any public address."""
        rule = self.policy.address(host, address)
        by_content = self.policy.digest(sha256)
        address = literal_address(host) if address is None else address
        if by_content.allow and not by_content.default and (address is None or is_public(address)):
            return by_content
        return rule

    def _refuse(self, rule: Rule, what: str, subject: str, field: str) -> None:
        if not rule.allow:
            raise self._refusal(rule, what, subject, field)

    def _refusal(self, rule: Rule, what: str, subject: str, field: str) -> SourceRefused:
        names = ", ".join(self.policy.admins[:3])
        why = f"; the reason given: {rule.reason}" if rule.reason and not rule.default else ""
        return SourceRefused(
            f"{field}: the policy does not allow {what} (rule: {rule}{why})",
            remedy="request an exception on the page Policy, or ask an admin"
            + (f" ({names})" if names else ""),
            field=field,
            kind=rule.kind,
            subject=subject,
            rule=f"{rule.kind} {rule.pattern}",
        )
