"""What a source answers, and what that means: a refusal, a wait, other bytes than were wanted."""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

import certifi
import httpx2

from mmadmin.core.errors import (
    Cancelled,
    Gated,
    RateLimited,
    SourceMissing,
    SourceUnavailable,
    Unauthorized,
)
from mmadmin.host.network import check_proxies
from mmadmin.host.reach import GuardedTransport, Reach

HEAD_BYTES = 512
OK, PARTIAL = 200, 206
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
AGENT = "mmadmin"


@dataclass(frozen=True, slots=True)
class Remote:
    """Where the bytes can be had."""

    url: str
    label: str
    """Named in messages and logs; holds no credential."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent to the URL's own host only; a redirect elsewhere drops `Authorization`."""
    cert: str = ""
    """Path of a further CA bundle."""
    reach: Reach | None = None
    """Which addresses may be connected to; None = the source is the host's own setting."""


class Retry(Exception):
    """Try again after `wait_s` (None: by back-off); `why` is said in the end."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.wait_s = wait_s


def tls(cert: str = "") -> ssl.SSLContext:
    """Trust the system's and certifi's authorities, and `cert` if given."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    if cert:
        context.load_verify_locations(cert)
    return context


def client(cert: str = "", *, stall_s: float = 60.0, reach: Reach | None = None) -> httpx2.Client:
    """An HTTP client as all our downloads use it. Raises `InvalidInput` for an unusable proxy."""
    check_proxies()
    context = tls(cert)
    return httpx2.Client(
        verify=context,
        transport=GuardedTransport(reach, context) if reach else None,
        follow_redirects=True,
        timeout=httpx2.Timeout(30.0, connect=10.0, read=stall_s),
        headers={"User-Agent": AGENT, "Accept-Encoding": "identity"},
    )


def describe(head: bytes) -> str:
    """What a file that starts like this really is, or "" when nothing is wrong."""
    start = head.lstrip()[:HEAD_BYTES].lower()
    if head.startswith(LFS_POINTER):
        return "a Git-LFS pointer, not the file itself"
    if start.startswith((b"<!doctype html", b"<html", b"<?xml")):
        return "a web page, not the file"
    return ""


def refusal(status: int, label: str, reason: str = "") -> SourceUnavailable:
    """The error for an HTTP status that no retry helps."""
    said = f" ({reason})" if reason else ""
    if status == httpx2.codes.UNAUTHORIZED:
        return Unauthorized(
            f"{label}: the source answers 401, it wants a login{said}",
            remedy="give a token that may read it (HF_TOKEN), or check the name",
            status=status,
        )
    if status == httpx2.codes.FORBIDDEN:
        return Gated(
            f"{label}: the source answers 403, access is not granted{said}",
            remedy="accept its licence on its page with the account that the token belongs to",
            status=status,
        )
    if status in (httpx2.codes.NOT_FOUND, httpx2.codes.GONE):
        return SourceMissing(
            f"{label}: the source answers {status}, it does not exist there{said}",
            remedy="check repository, revision and file name; it may have been renamed or removed",
            status=status,
        )
    return SourceUnavailable(
        f"{label}: the source answers {status}{said}", remedy="try again later", status=status
    )


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a Retry-After header asks for (number or HTTP date), or None."""
    value = headers.get("retry-after", "").strip()
    if not value:
        return None
    if value.replace(".", "", 1).isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def check_status(response: httpx2.Response, label: str, wait_cap_s: float) -> None:
    """Raise what a bad status means: a refusal for good, or `Retry`."""
    status = response.status_code
    if status in (OK, PARTIAL):
        return
    wait = retry_after(response.headers)
    if status == httpx2.codes.TOO_MANY_REQUESTS and (wait or 0) > wait_cap_s:
        raise RateLimited(
            f"{label}: the source asks to wait {wait:.0f} s (429)",
            remedy="try again later, or give a token with a higher limit",
            status=status,
            retry_after_s=int(wait or 0),
        )
    if status in (408, 425, 429) or status >= httpx2.codes.INTERNAL_SERVER_ERROR:
        if wait is not None:
            wait = min(wait, wait_cap_s) * random.uniform(1.0, 1.1)  # noqa: S311 (jitter)
        raise Retry(f"the source answers {status}", wait)
    raise refusal(status, label, response.headers.get("x-error-message", ""))


def wait_for(seconds: float, cancelled: Callable[[], bool], label: str) -> None:
    """Sleep, but notice a cancellation within a fifth of a second."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if cancelled():
            raise Cancelled(f"download of {label} was cancelled")
        time.sleep(min(0.2, max(0.0, end - time.monotonic())))
