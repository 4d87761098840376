"""`python-env`: wheels → a Python environment, without network and byte for byte the same.

inputs: one object with one wheel for each package, by the package's name. params:
`{"interpreter": "cpython-3.11-linux-x86_64", "requirements": ["demo==1.0"], "overlays"?: [...]}`.
An overlay is a small correction: `{"file", "sha256", "diff", "reason"}`, a unified diff against the
installed file with that digest; the digest of a file that the overlay adds is "".

Output: `site` (what `pip install --target` would write, without bytecode and without scripts that
name an interpreter), `environment.json`, `sbom.cdx.json`: see `mmadmin.core.environments`. Every
file is checked against its wheel's RECORD, and linked where the store has its bytes. Where two
wheels bring one file with other bytes, the package that comes first in the alphabet wins, and the
listing says so. Bitwise: depends on the wheels and the parameters alone.
"""

from __future__ import annotations

import base64
import binascii
import csv
import email.parser
import email.policy
import hashlib
import io
import posixpath
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.params import (
    at_path,
    fields,
    items,
    refuse,
    relative_path,
    table,
    text,
    texts,
)
from mmadmin.core.build.recipe import Determinism, FixedFile, Json, Params, Recipe, Toolbox
from mmadmin.core.canonical import canonical
from mmadmin.core.chat_templates.patches import PatchFails, apply_diff
from mmadmin.core.environments import (
    LISTING,
    SBOM,
    SITE,
    SITECUSTOMIZE,
    WRONG_INTERPRETER,
    Environment,
    Package,
    sbom,
)
from mmadmin.core.errors import DigestMismatch, InvalidDerivation, InvalidInput
from mmadmin.core.recipes.unpack import Entry, HostileArchive, Writer, only_file, opened, refusing
from mmadmin.core.spec.lock import Lock
from mmadmin.core.spec.steps import fetch, step
from mmadmin.core.store import hash_file

INTERPRETER = re.compile(r"[a-z]+-\d+\.\d+-[a-z0-9]+-\w+")
MOST_METADATA_BYTES = 64 << 20
"""A RECORD or METADATA file; the largest known RECORD has 3 MB."""
_SCRIPT = b"#!python"
"""What a wheel writes where an installer puts its interpreter's path."""


@dataclass(frozen=True, slots=True)
class Overlay:
    """A correction of one file of an environment."""

    file: str
    """Relative path in `site`."""
    sha256: str
    """Of the file before; empty = the overlay adds the file."""
    diff: str
    reason: str


def derivation(
    lock: Lock, name: str, requirements: Sequence[str], overlays: Sequence[Overlay] = ()
) -> Derivation:
    """The environment of the lock's list `name`: one fetch for each wheel, and the tree.

    `requirements` are those of the `PinRequest`; they say why each package is there. Raises
    `InvalidInput` when the lock does not hold the environment.
    """
    wheels = lock.of(name)
    if not wheels or name not in lock.interpreters:
        raise InvalidInput(f"the lock names no {name} packages", remedy="make the lock again")
    inputs = {}
    for wheel in wheels:
        project = wheel.path.partition("-")[0].lower().replace("_", "-").replace(".", "-")
        inputs[project] = fetch(wheel.path, [wheel])
    params: dict[str, Json] = {
        "interpreter": lock.interpreters[name],
        "requirements": list(requirements),
        "overlays": [dict(asdict(one)) for one in overlays],
    }
    return step("python-env", f"{name}-environment", params, inputs)


def _overlay(value: Json, where: str) -> Overlay:
    one = table(value, where)
    fields(one, where, required=("file", "sha256", "diff", "reason"))
    return Overlay(
        relative_path(text(one, "file", where), f"{where}.file"),
        text(one, "sha256", where, ""),
        text(one, "diff", where),
        text(one, "reason", where),
    )


def _read(params: Params) -> tuple[str, list[str], list[Overlay]]:
    fields(params, "python-env", required=("interpreter", "requirements"), optional=("overlays",))
    interpreter = text(params, "interpreter", "python-env")
    if not INTERPRETER.fullmatch(interpreter):
        refuse("python-env.interpreter", interpreter, "for example cpython-3.11-linux-x86_64")
    overlays = [
        _overlay(value, f"python-env.overlays[{i}]")
        for i, value in enumerate(items(params, "overlays", "python-env"))
    ]
    return interpreter, texts(params, "requirements", "python-env"), overlays


@dataclass(frozen=True, slots=True)
class _Wheel:
    """A wheel's own account of itself."""

    path: Path
    name: str
    """Of the package, normalised."""
    version: str
    licence: str
    requires: tuple[str, ...]
    record: Mapping[str, tuple[str, int]]
    """Member → sha256 in hex and size."""


def _read_wheel(path: Path) -> _Wheel:
    """Raises `InvalidInput` for what is not a wheel."""
    try:
        with zipfile.ZipFile(path) as zipped:
            found = {
                posixpath.basename(name): name
                for name in zipped.namelist()
                if name.count("/") == 1 and posixpath.dirname(name).endswith(".dist-info")
            }
            record = _small(zipped, found["RECORD"]).decode("utf-8")
            metadata = _small(zipped, found["METADATA"]).decode("utf-8")
    except (KeyError, zipfile.BadZipFile, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"{path.name} is not a wheel, or it is damaged: {error}", remedy="check the pinned file"
        ) from error
    said = email.parser.Parser(policy=email.policy.compat32).parsestr(metadata)
    return _Wheel(
        path,
        re.sub(r"[-_.]+", "-", said["Name"]).lower(),
        said["Version"],
        _licence(said.get("License-Expression"), said.get("License"), said.get_all("Classifier")),
        tuple(" ".join(one.split()) for one in said.get_all("Requires-Dist") or ()),
        _digests(record, path.name),
    )


def _small(zipped: zipfile.ZipFile, name: str) -> bytes:
    size = zipped.getinfo(name).file_size
    if size > MOST_METADATA_BYTES:
        raise HostileArchive(f"{name} has {size} bytes", remedy="do not use this wheel")
    return zipped.read(name)


def _licence(expression: str | None, written: str | None, classifiers: list[str] | None) -> str:
    """The licence in one line: the expression, else the classifiers, else a short text."""
    if expression:
        return expression
    named = [one.rpartition(" :: ")[2] for one in classifiers or () if one.startswith("License ::")]
    first = (written or "").strip().partition("\n")[0][:80]
    return ", ".join(named) or first


def _digests(record: str, label: str) -> dict[str, tuple[str, int]]:
    """The digests of a RECORD. Raises `InvalidInput`."""
    found = {}
    for row in csv.reader(io.StringIO(record)):
        if len(row) != 3 or not row[1].startswith("sha256="):  # noqa: PLR2004 (path, digest, size)
            continue  # RECORD itself and its signatures have none
        value = row[1].removeprefix("sha256=")
        try:
            raw = base64.b64decode(value + "=" * (-len(value) % 4), b"-_", validate=True)
            size = int(row[2])
        except (binascii.Error, ValueError):
            raw, size = b"", 0
        if len(raw) != hashlib.sha256().digest_size:
            raise InvalidInput(f"{label}: a row of RECORD is damaged", remedy="fetch it again")
        found[row[0]] = (raw.hex(), size)
    return found


def _place(member: str) -> str | None:
    """Where a member of a wheel lies in `site`; None = it is left out."""
    parts = member.split("/")
    if parts[0].endswith(".data") and len(parts) > 2:  # noqa: PLR2004 (data, scheme, file)
        scheme, rest = parts[1], "/".join(parts[2:])
        homes = {"purelib": "", "platlib": "", "data": "", "scripts": "bin/"}
        if scheme not in homes:
            return None  # C headers
        member = homes[scheme] + rest
    if "__pycache__" in parts or member.endswith((".pyc", ".pyo")):
        return None
    return member


@dataclass(slots=True)
class _Tree:
    """The tree while it grows."""

    site: Path
    tools: Toolbox
    writer: Writer
    owners: dict[str, tuple[str, str]]
    """Path → who brought it, and its sha256."""
    clashes: list[dict[str, str]] = field(default_factory=list)

    def install(self, wheel: _Wheel) -> Package:
        """Put a wheel's files into the tree."""
        size = 0
        with opened(wheel.path) as entries:
            for entry, stream in entries:
                if entry.kind == "folder":
                    continue
                if entry.kind != "file" or stream is None:
                    raise HostileArchive(
                        f"{wheel.path.name}: {entry.name} is not a regular file",
                        remedy="do not use this wheel",
                    )
                place = _place(_checked(entry.name, wheel.path.name))
                if place is not None and not (place.startswith("bin/") and _is_script(stream)):
                    size += self._add(wheel, entry, stream, place)
        return Package(
            *(wheel.name, wheel.version, wheel.licence, size),
            *(wheel.path.name, hash_file(wheel.path)[0], wheel.requires),
        )

    def _add(self, wheel: _Wheel, entry: Entry, stream: IO[bytes], place: str) -> int:
        """Put one file into the tree; its size, 0 where another package brought it."""
        sha256, size = wheel.record.get(entry.name, ("", entry.size))
        if place in self.owners:
            owner, theirs = self.owners[place]
            if theirs != sha256:
                self.clashes.append({"file": place, "kept": owner, "dropped": wheel.name})
            return 0
        found, path = sha256, self.site / place
        with refusing(entry):
            there = bool(sha256) and self.tools.reuse(
                sha256, size, path, executable=entry.executable
            )
        if not there:
            found = self.writer.write(entry, stream, place)
        if (sha256 and found != sha256) or size != entry.size:
            raise DigestMismatch(
                f"{wheel.path.name}: {entry.name} is not as the wheel's RECORD says",
                remedy="the wheel is damaged, or was repacked: use another version",
            )
        self.owners[place] = (wheel.name, found)
        return entry.size

    def correct(self, overlay: Overlay) -> None:
        """Apply an overlay. Raises `DigestMismatch` where the file is another."""
        path = self.site / overlay.file
        here = self.owners.get(overlay.file, ("", ""))[1]
        if here != overlay.sha256:
            raise DigestMismatch(
                f"the overlay of {overlay.file} is for a file with sha256 "
                f"{overlay.sha256 or '(none)'}; the environment has {here or 'no such file'}",
                remedy="write the overlay for the pinned version, or remove it",
            )
        before = path.read_bytes().decode("utf-8") if here else ""
        try:
            after = apply_diff(before, overlay.diff, f"overlay of {overlay.file}").encode()
        except PatchFails as error:
            raise InvalidDerivation(error.message, remedy="make the diff with diff -u") from error
        path.unlink(missing_ok=True)  # it may be shared with the store
        self.write(overlay.file, after)
        self.tools.log(f"{overlay.file}: {overlay.reason}")

    def write(self, place: str, content: bytes) -> None:
        """Write a file of our own."""
        path = at_path(self.site, place)
        path.write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        self.tools.hashed(path, sha256)
        self.owners[place] = ("mmadmin", sha256)


def _checked(member: str, label: str) -> str:
    """The name of a member that stays inside the tree. Raises `HostileArchive`."""
    try:
        return relative_path(member, label)
    except InvalidDerivation:
        raise HostileArchive(
            f"{label} has a member {member!r}", remedy="do not use this wheel"
        ) from None


def _is_script(stream: IO[bytes]) -> bool:
    """True for a script that an installer would point to its interpreter."""
    begin = stream.read(len(_SCRIPT))
    stream.seek(0)
    return begin == _SCRIPT


class PythonEnv:
    """Wheels in, an environment out."""

    kind = "python-env"
    version = 1
    determinism: Determinism = "bitwise"
    refers_to_inputs = False
    copies: Sequence[str] = ()

    def check(self, params: Params) -> None:
        """Refuse bad params."""
        _read(params)

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """Not known beforehand."""

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        """Install the wheels in the order of their names, then the overlays."""
        interpreter, requirements, overlays = _read(params)
        wheels = [_read_wheel(only_file({"archive": inputs[name]})) for name in sorted(inputs)]
        site = out / SITE
        site.mkdir()
        sizes = sum(size for wheel in wheels for _sha256, size in wheel.record.values())
        tree = _Tree(site, tools, Writer(site, tools, sizes), {})
        custom = SITECUSTOMIZE.format(interpreter=interpreter, code=WRONG_INTERPRETER)
        tree.write("sitecustomize.py", custom.encode())
        packages = []
        for number, wheel in enumerate(wheels):
            tools.progress(number, len(wheels), "packages")
            tools.log(f"installing {wheel.name} {wheel.version}")
            packages.append(tree.install(wheel))
        for overlay in overlays:
            tree.correct(overlay)
        made = Environment(
            interpreter,
            tuple(requirements),
            tuple(sorted(packages, key=lambda package: package.name)),
            tuple({"file": one.file, "reason": one.reason} for one in overlays),
            tuple(tree.clashes),
        )
        for clash in tree.clashes:
            tools.log(f"{clash['file']}: kept from {clash['kept']}, not {clash['dropped']}")
        (out / LISTING).write_bytes(canonical(made.as_json()))
        (out / SBOM).write_bytes(canonical(sbom(made)))


RECIPE: Recipe = PythonEnv()
