"""What every cache promises, tried on each kind: a folder, a web server, a bucket.

The tests are those of the exchange itself; here they meet real sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.store.test_substitute import (  # noqa: F401 (the fixtures and tests that run here)
    other,
    store,
    test_a_cache_that_is_all_wrong_costs_only_the_building,
    test_a_missing_blob_is_a_miss,
    test_a_swapped_record_is_refused,
    test_an_untrusted_attestation_does_not_stand_in_the_way,
    test_attestations_without_enough_trusted_signatures_are_refused,
    test_caches_that_disagree_are_not_overwritten,
    test_enough_of_several_signatures_will_do,
    test_executable_files_and_links_arrive_as_they_were,
    test_pushing_puts_attestations_last_and_sends_nothing_twice,
    test_signatures_cannot_be_replayed,
    test_swapped_bytes_are_refused_and_the_next_cache_is_asked,
    test_two_wants_of_one_blob_are_one_transfer,
    test_what_was_pushed_is_not_built_again,
    test_without_a_signer_content_is_pushed_but_no_attestations,
)
from tests.support.caches import Watched, bucket_cache, http_cache


@pytest.fixture(params=["http", "s3"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Watched]:
    """A cache of each kind but the folder, which the tests of the core have."""
    if request.param == "http":
        with http_cache(tmp_path / "cache") as found:
            yield found
    else:
        yield bucket_cache(request.getfixturevalue("s3"))
