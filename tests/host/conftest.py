"""Fixtures of this room's tests."""

from tests.support.caches import s3, s3_endpoint

__all__ = ["s3", "s3_endpoint"]
