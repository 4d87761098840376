"""Filling one store from another of this machine."""

from __future__ import annotations

import shutil

from mmadmin.core.store import Lease, Store


def copy_object(source: Store, target: Store, name: str, lease: Lease) -> None:
    """Copy an object into another store; what it refers to is there already.

    Not by links: a test that damages its own store would damage the source with it.
    """
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
                shutil.copy(found.path / entry.path, path)
                staging.hashed(path, entry.sha256)
        target.seal(staging, name[65:], refs=found.refs, expect=name)
