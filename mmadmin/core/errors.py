"""The one error tree.

Every error that a user may meet is an `MmError`: expected, explained with a message, with a remedy.
Anything else that escapes is a bug of ours and is logged with its traceback.

    MmError
    ├── InvalidInput          the person asked for something that cannot be (exit 1, HTTP 422)
    │   ├── InvalidSpec       a field of a deployment file, named, with the remedy
    │   ├── InvalidDerivation
    │   └── InvalidModel      a model file, shard set, template or checkpoint that must not be used
    ├── NotFound              (HTTP 404)
    ├── Refused               (HTTP 403) the person may not do this
    │   └── SourceRefused     the policy does not allow what a deployment takes from somewhere
    ├── TooMany               (HTTP 429) attempts or requests; says when to try again
    ├── Conflict              (HTTP 409) someone else won, or the state does not allow it
    │   ├── IllegalMove       a lifecycle move that the table does not have
    │   └── LeaseLost         the job's lease went to another worker
    ├── DigestMismatch        bytes are not what their pin says
    ├── StoreCorrupt          a record or a blob of the store is damaged
    ├── Untrusted             a claim of another store that too few trusted keys signed
    ├── DiskFull              needed and available bytes are named
    ├── SourceUnavailable     a download that cannot be had
    │   ├── Unauthorized      401: no or wrong credentials
    │   ├── Gated             403: licence not accepted, or no access
    │   ├── SourceMissing     404: repository, revision, file or release does not exist
    │   └── RateLimited       429: said to wait longer than we do
    ├── ToolMissing           a compiler or program that the host lacks
    ├── StepFailed            a recipe's program ended badly; carries the last log lines
    ├── Cancelled             a person cancelled it
    ├── ProbeFailed           an engine did not prove itself
    ├── DoesNotFit            memory or hardware refuses the placement
    └── Unreachable           broker, database, supervisor or engine does not answer (HTTP 503)

`code` is stable: clients and tests may rely on it. `HTTP_STATUS` maps codes for the API.
A remedy reads well in the panel, in the API and in a terminal; where `mm` has a command for it,
`details["command"]` is that command, and `mm` says it too.
"""

from __future__ import annotations

from typing import Any, ClassVar


class MmError(Exception):
    """An expected failure: a message, a remedy, and details for machines."""

    code: ClassVar[str] = "failed"

    def __init__(self, message: str, *, remedy: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.details = details

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message

    def as_json(self) -> dict[str, Any]:
        """The one JSON shape of an error: code, message, remedy, details."""
        return {
            "code": self.code,
            "message": self.message,
            "remedy": self.remedy,
            "details": self.details,
        }


class InvalidInput(MmError):
    """The input cannot be used as it is."""

    code = "invalid_input"


class InvalidSpec(InvalidInput):
    """A deployment file is wrong; `details["field"]` is the dotted field name."""

    code = "invalid_spec"


class InvalidDerivation(InvalidInput):
    """A derivation is not in canonical form or names an unknown recipe."""

    code = "invalid_derivation"


class InvalidModel(InvalidInput):
    """A model file, shard set or template that must not be used."""

    code = "invalid_model"


class NotFound(MmError):
    """The named thing does not exist, or the person may not see it."""

    code = "not_found"


class Refused(MmError):
    """The person's role does not allow this."""

    code = "refused"


class TooMany(MmError):
    """Too many attempts or requests; `details["retry_after_s"]` says when one is let in again."""

    code = "too_many"


class SourceRefused(Refused):
    """The policy does not allow a source; details: `kind`, `subject`, `rule`, `field`."""

    code = "source_refused"


class Conflict(MmError):
    """The present state does not allow this, or someone else acted first."""

    code = "conflict"


class IllegalMove(Conflict):
    """A lifecycle move that the table does not have."""

    code = "illegal_move"


class LeaseLost(Conflict):
    """The job's lease went to another worker; stop without writing."""

    code = "lease_lost"


class DigestMismatch(MmError):
    """The bytes are not what their pin says."""

    code = "digest_mismatch"


class StoreCorrupt(MmError):
    """A record or blob of the store is damaged; nothing is freed because of it."""

    code = "store_corrupt"


class Untrusted(MmError):
    """Another store claims what a step produced, and not enough trusted keys say so."""

    code = "untrusted"


class DiskFull(MmError):
    """Not enough room; details: `need_bytes`, `have_bytes`."""

    code = "disk_full"


class SourceUnavailable(MmError):
    """A download that cannot be had now."""

    code = "source_unavailable"


class Unauthorized(SourceUnavailable):
    """401 from a source."""

    code = "source_unauthorized"


class Gated(SourceUnavailable):
    """403 from a source."""

    code = "source_gated"


class SourceMissing(SourceUnavailable):
    """The repository, revision, file or release does not exist."""

    code = "source_missing"


class RateLimited(SourceUnavailable):
    """The source asks to wait longer than we do."""

    code = "source_rate_limited"


class ToolMissing(MmError):
    """A program that the step needs is not on this host; the remedy names the package."""

    code = "tool_missing"


class StepFailed(MmError):
    """A recipe's program ended badly; details: `exit_code`, `log_tail`."""

    code = "step_failed"


class Cancelled(MmError):
    """A person cancelled the job."""

    code = "cancelled"


class ProbeFailed(MmError):
    """An engine did not prove itself; details name the probe."""

    code = "probe_failed"


class DoesNotFit(MmError):
    """Memory or hardware refuses the placement; details name the parts."""

    code = "does_not_fit"


class Unreachable(MmError):
    """A service that we need does not answer."""

    code = "unreachable"


HTTP_STATUS: dict[str, int] = {
    "invalid_input": 422,
    "invalid_spec": 422,
    "invalid_derivation": 422,
    "invalid_model": 422,
    "not_found": 404,
    "refused": 403,
    "too_many": 429,
    "source_refused": 403,
    "conflict": 409,
    "illegal_move": 409,
    "lease_lost": 409,
    "unreachable": 503,
}
"""HTTP status by error code; a code that is not listed is a 400."""
