"""The places of a store on the disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from mmadmin.core.errors import InvalidInput

HEX_LENGTH = 64


def is_sha256(text: str) -> bool:
    """True for 64 lower-case hex digits."""
    return len(text) == HEX_LENGTH and all(c in "0123456789abcdef" for c in text)


def check_object_name(name: str) -> str:
    """The name itself when it is `<64 hex>-<name>`; anything else could leave the store."""
    if not is_sha256(name[:HEX_LENGTH]) or name[HEX_LENGTH : HEX_LENGTH + 1] != "-" or "/" in name:
        raise InvalidInput(
            f"{name!r} is not the name of a store object",
            remedy="object names look like <64 hex digits>-<name>; see `mm store ls`",
        )
    return name


@dataclass(frozen=True, slots=True)
class Layout:
    """Names the places; `create` makes the folders."""

    root: Path

    @property
    def index(self) -> Path:
        """The SQLite index, rebuildable from the sidecars."""
        return self.root / "index.sqlite3"

    @property
    def blobs(self) -> Path:
        """Every file's bytes, by sha256."""
        return self.root / "blobs" / "sha256"

    @property
    def objects(self) -> Path:
        """Finished outputs, each with its sidecar beside it."""
        return self.root / "objects"

    @property
    def derivations(self) -> Path:
        """Derivations and realisations, as data."""
        return self.root / "drvs"

    @property
    def logs(self) -> Path:
        """Build logs."""
        return self.root / "logs"

    @property
    def staging(self) -> Path:
        """Attempts under way, one folder each."""
        return self.root / "staging"

    @property
    def downloads(self) -> Path:
        """Downloads under way, keyed by the expected sha256; they outlive builds."""
        return self.root / "downloads"

    @property
    def trash(self) -> Path:
        """What was taken out of sight and waits to be unlinked."""
        return self.root / "trash"

    @property
    def locks(self) -> Path:
        """Lock files, leases and reservations."""
        return self.root / "locks"

    @property
    def leases(self) -> Path:
        """One file a living lease."""
        return self.locks / "leases"

    @property
    def reservations(self) -> Path:
        """One file a promise of disk space."""
        return self.locks / "reservations"

    @property
    def roots(self) -> Path:
        """What must be kept, and why: one file a root, in a folder a kind."""
        return self.root / "roots"

    @property
    def quarantine(self) -> Path:
        """Damaged blobs, kept for a look."""
        return self.root / "quarantine"

    def create(self) -> None:
        """Make the folders; does nothing when they are there."""
        for folder in (
            self.blobs,
            self.objects,
            self.derivations / "realised",
            self.logs,
            self.staging,
            self.downloads,
            self.trash,
            self.leases,
            self.reservations,
            self.roots,
        ):
            folder.mkdir(parents=True, exist_ok=True)

    def blob(self, sha256: str, *, executable: bool) -> Path:
        """Where a file's bytes are; the executable form is an inode of its own."""
        if not is_sha256(sha256):
            raise InvalidInput(f"{sha256!r} is not a sha256 digest")
        return self.blobs / sha256[:2] / (f"{sha256}-x" if executable else sha256)

    def object(self, name: str) -> Path:
        """The folder of an object."""
        return self.objects / check_object_name(name)

    def sidecar(self, name: str) -> Path:
        """The record beside an object, from which the index can be rebuilt."""
        return self.objects / f"{check_object_name(name)}.json"

    def derivation(self, digest: str) -> Path:
        """A derivation as data."""
        return self.derivations / f"{digest}.json"

    def realisation(self, resolved_key: str) -> Path:
        """The record that a derivation produced an object."""
        return self.derivations / "realised" / f"{resolved_key}.json"

    def root_file(self, kind: str, key: str) -> Path:
        """The file of one root; the key may hold any text."""
        return self.roots / kind / f"{quote(key, safe='')}.json"

    def lock(self, key: str) -> Path:
        """The file of one named lock."""
        return self.locks / f"{quote(key, safe='')}.lock"
