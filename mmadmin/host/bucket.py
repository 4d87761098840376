"""Buckets of S3-compatible services: `s3://<bucket>/<prefix>`, and how they are reached.

Credentials come from the environment and are never in an address.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from obstore.store import S3Store

from mmadmin.core.errors import InvalidInput
from mmadmin.host.network import check_proxies, credential

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
PREFIX = re.compile(r"[A-Za-z0-9!_.*'()/-]*")
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
REGION = "us-east-1"
"""Amazon's first, and what other services take for theirs."""
FORM = "write s3://BUCKET/PREFIX, with ?endpoint=https://…&region=… where it is not Amazon's"


@dataclass(frozen=True, slots=True)
class Bucket:
    """What an `s3://` address says."""

    name: str
    prefix: str
    endpoint: str = ""
    """Empty: Amazon's, of the region."""
    region: str = REGION

    @property
    def label(self) -> str:
        """What a person calls it."""
        return "s3://" + "/".join(part for part in (self.name, self.prefix) if part)

    def open(self, client: ClientConfig, retry: RetryConfig) -> S3Store:
        """The library's store of this bucket; raises what the library raises, and `InvalidInput`.

        Credentials are handed over trimmed: the library takes them from the environment as they
        are, and ends the process for a line end in one.
        """
        check_proxies()
        config: S3Config = {"region": self.region}
        if key := credential("AWS_ACCESS_KEY_ID"):
            config["access_key_id"] = key
        if secret := credential("AWS_SECRET_ACCESS_KEY"):
            config["secret_access_key"] = secret
        if token := credential("AWS_SESSION_TOKEN"):
            config["session_token"] = token
        if self.endpoint:
            config["aws_endpoint_url_s3"] = self.endpoint
            client = {**client, "allow_http": self.endpoint.startswith("http://")}
        return S3Store(
            self.name,
            prefix=self.prefix or None,
            config=config,
            client_options=client,
            retry_config=retry,
        )


def bucket_at(address: str, env: Mapping[str, str] = os.environ) -> Bucket:
    """The bucket that an address names; `InvalidInput` for any other address.

    The endpoint may come from the address or from the environment.
    """
    parts = urlsplit(address)
    if parts.username is not None or parts.password is not None:
        raise InvalidInput(
            "the address of a bucket must not hold credentials",
            remedy="put them into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
    asked = parse_qsl(parts.query, keep_blank_values=True)
    given = dict(asked)
    if unknown := sorted(given.keys() - {"endpoint", "region"}):
        raise InvalidInput(f"an s3 address has no {unknown[0]!r}", remedy=FORM)
    prefix = unquote(parts.path).strip("/")
    doubtful = len(given) != len(asked) or bool(parts.fragment) or "//" in prefix
    if doubtful or not NAME.fullmatch(parts.netloc) or not PREFIX.fullmatch(prefix):
        raise InvalidInput("invalid bucket address", remedy=FORM)
    endpoint = (given.get("endpoint") or _first(env, ENDPOINTS)).rstrip("/")
    url = urlsplit(endpoint)
    if endpoint and (url.scheme not in {"http", "https"} or not url.hostname or url.username):
        raise InvalidInput(
            "the endpoint is not an http(s) address", remedy="write https://s3.example.org"
        )
    region = given.get("region") or _first(env, REGIONS) or REGION
    return Bucket(parts.netloc, prefix, endpoint, region)


def _first(env: Mapping[str, str], names: Sequence[str]) -> str:
    """The first variable that is set; one that is set to nothing is not."""
    return next((env[name] for name in names if env.get(name)), "")
