"""Downloads by expected sha256: resumable, verified, polite.

A download is known by the digest it must have, not by where it comes from. Its bytes lie in the
store's `downloads/<sha256>.part`, the list of finished segments beside it in `.state`; both outlive
the build that wanted them, and the process. Promises:

- killed at any byte, the next attempt fetches only the segments that were not finished;
- the whole file is hashed while it arrives, by a second thread that follows the written prefix;
- nothing is handed over whose size and sha256 are not as pinned; bytes with another digest are
  kept under their true one, so that correcting a pin downloads nothing, or dropped where the asker
  may not have them;
- 401, 403, 404 and 429 are told apart and explained; the first three are never retried;
  Retry-After is honoured up to a cap; a stalled connection is replaced;
- a credential goes to the host it belongs to, never into a message.
"""

from mmadmin.host.download.answers import Remote, client, describe, refusal, retry_after, tls
from mmadmin.host.download.files import copy_hashed, download

__all__ = [
    "Remote",
    "client",
    "copy_hashed",
    "describe",
    "download",
    "refusal",
    "retry_after",
    "tls",
]
