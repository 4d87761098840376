"""What binary caches refuse, explained. Of the library's errors only codes are quoted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self

from mmadmin.core.errors import (
    Gated,
    MmError,
    RateLimited,
    SourceMissing,
    SourceUnavailable,
    Unauthorized,
)

RETRY_AFTER_S = 60

STATUS = re.compile(r"status code: (\d{3})")
CODE = re.compile(r"<Code>(\w+)</Code>")
REGION = re.compile(r"<Region>([\w-]+)</Region>|expecting '([\w-]+)'")
ELSEWHERE = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "TemporaryRedirect",
}
STRANGERS = {
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
"""Codes for credentials that are unknown, or no longer valid."""
REASONS = (
    ("ConnectionRefused", "connection refused"),
    ("dns error", "unknown host name"),
    ("ertificate", "its certificate is not trusted"),
    ("TimedOut", "timed out"),
    ("Content-Length", "its answer has no Content-Length"),
)
CREDENTIAL_SOURCES = ("/latest/api/token", "/latest/meta-data/")
"""Where the library asks when the environment has no credentials."""


def first_line(error: Exception) -> str:
    """The library's sentence, without what it adds for developers."""
    return str(error).partition("\n")[0]


def status_of(error: Exception) -> int:
    """The HTTP status of an error; 0 when there was no answer."""
    found = STATUS.search(str(error))
    return int(found[1]) if found else 0


def code_of(error: Exception) -> str:
    """The S3 error code that the answer named, or nothing."""
    found = CODE.search(str(error))
    return found[1] if found else ""


def starts_beyond_end(error: Exception) -> bool:
    """True when the rest of a file was asked for that is shorter than what is here already."""
    beyond = status_of(error) == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
    return beyond or "Wanted range starting at" in str(error)


def is_miss(error: Exception) -> bool:
    """True for a file that is not there, in a bucket that is."""
    return isinstance(error, FileNotFoundError) and code_of(error) != "NoSuchBucket"


@dataclass(frozen=True, slots=True)
class _Answer:
    """An error of the library, taken apart."""

    text: str
    status: int
    code: str
    absent: bool

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Take it apart."""
        absent = isinstance(error, FileNotFoundError)
        return cls(str(error), status_of(error), code_of(error), absent)

    @property
    def reason(self) -> str:
        """Why there was no answer."""
        found = (plain for sign, plain in REASONS if sign in self.text)
        return next(found, "no connection")

    @property
    def said(self) -> str:
        """Status and code."""
        return f"{self.status} {self.code}".rstrip()


def bucket_refusal(error: Exception, bucket: str, label: str, endpoint: str) -> MmError:
    """What a bucket's error means, with a remedy."""
    answer = _Answer.of(error)
    at = f"{label} at {endpoint}" if endpoint else label
    return (
        _of_place(answer, bucket, at, endpoint)
        or _of_person(answer, at)
        or _of_the_moment(answer, at)
    )


def _of_place(answer: _Answer, bucket: str, at: str, endpoint: str) -> MmError | None:
    """The bucket is not found, or is elsewhere."""
    if answer.absent:
        return SourceMissing(
            f"bucket {bucket} not found" + (f" at {endpoint}" if endpoint else ""),
            remedy="make it, or correct the address, its endpoint or its region",
        )
    if answer.code in ELSEWHERE or "redirect without LOCATION" in answer.text:
        found = REGION.search(answer.text)
        region = (found[1] or found[2]) if found else ""
        return SourceUnavailable(
            f"{at} is in another region" + (f": {region}" if region else ""),
            remedy=f"add ?region={region or '…'} to its address, or set AWS_REGION",
        )
    return None


def _of_person(answer: _Answer, at: str) -> MmError | None:
    """The credentials are missing, unknown, or not sufficient."""
    if any(source in answer.text for source in CREDENTIAL_SOURCES):
        return Unauthorized(
            f"no credentials for {at}",
            remedy="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or AWS_SKIP_SIGNATURE=true for a public bucket",
        )
    if answer.code == "RequestTimeTooSkewed":
        return Unauthorized(f"{at} refuses this machine's clock", remedy="set the clock")
    if answer.status == HTTPStatus.UNAUTHORIZED or answer.code in STRANGERS:
        return Unauthorized(
            f"{at} rejects the credentials ({answer.said})",
            remedy="look at AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
        )
    if answer.status == HTTPStatus.FORBIDDEN:
        return Gated(
            f"{at} refuses access ({answer.said})",
            remedy="pulling needs s3:GetObject and s3:ListBucket (without it what is missing looks "
            "refused); pushing also s3:PutObject and s3:AbortMultipartUpload",
        )
    return None


def _of_the_moment(answer: _Answer, at: str) -> MmError:
    """Busy, broken, or unreachable."""
    return _busy_or_broken(answer, at) or SourceUnavailable(
        f"{at} does not answer ({answer.reason})",
        remedy="is the endpoint right (?endpoint=… or AWS_ENDPOINT_URL), and reachable?",
    )


def web_refusal(error: Exception, url: str) -> MmError:
    """What a web server's error means, with a remedy."""
    answer = _Answer.of(error)
    if answer.status == HTTPStatus.UNAUTHORIZED:
        return Unauthorized(
            f"{url} requires a login", remedy="write it into the address: https://NAME:PASSWORD@…"
        )
    if answer.status == HTTPStatus.FORBIDDEN:
        return Gated(f"{url} refuses access", remedy="ask its owner for access")
    return _busy_or_broken(answer, url) or SourceUnavailable(
        f"{url} does not answer ({answer.reason})", remedy="check the address and the network"
    )


def _busy_or_broken(answer: _Answer, at: str) -> MmError | None:
    busy = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
    if answer.status in busy or answer.code == "SlowDown":
        return RateLimited(
            f"{at} asks to slow down", remedy="try again later", retry_after_s=RETRY_AFTER_S
        )
    if answer.status:
        return SourceUnavailable(f"{at} answered {answer.said}", remedy="try again later")
    return None
