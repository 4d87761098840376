"""The store: immutable objects by content, on one host's disk (see `docs/store.md`)."""

from mmadmin.core.store.ingest import HashingWriter, hash_file
from mmadmin.core.store.locks import Lease
from mmadmin.core.store.records import Realisation, Root, StoreObject
from mmadmin.core.store.staging import Staging
from mmadmin.core.store.store import Store
from mmadmin.core.store.tree import Entry

__all__ = [
    "Entry",
    "HashingWriter",
    "Lease",
    "Realisation",
    "Root",
    "Staging",
    "Store",
    "StoreObject",
    "hash_file",
]
