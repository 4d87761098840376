"""Filling one store from another of this machine."""

from __future__ import annotations

from mmadmin.core.store import Lease, Store
from mmadmin.core.store.files import link_or_copy


def copy_object(source: Store, target: Store, name: str, lease: Lease) -> None:
    """Link an object with its files into another store; what it refers to is there already."""
    found = source.object(name)
    assert found is not None
    if not target.protect(lease, [name]):
        return
    with target.staging(lease) as staging:
        for entry in found.files:
            path = staging.out / entry.path
            path.parent.mkdir(parents=True, exist_ok=True)
            if entry.kind == "dir":
                path.mkdir(exist_ok=True)
            elif entry.kind == "link":
                path.symlink_to(entry.target)
            else:
                link_or_copy(found.path / entry.path, path)
                staging.hashed(path, entry.sha256)
        target.seal(staging, name[65:], refs=found.refs, expect=name)
