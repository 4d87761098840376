"""What every depot promises, tried on each kind: a folder, a web server, a bucket.

The tests are those of the exchange itself; here they meet real sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.store.test_substitute import (  # noqa: F401 (the fixtures and tests that run here)
    other,
    store,
    test_a_depot_that_is_all_wrong_costs_only_the_building,
    test_a_missing_blob_is_a_miss,
    test_a_stranger_s_claim_does_not_stand_in_the_way,
    test_a_swapped_record_is_refused,
    test_claims_without_enough_trusted_signatures_are_refused,
    test_depots_that_disagree_are_not_overwritten,
    test_enough_of_several_signatures_will_do,
    test_executable_files_and_links_arrive_as_they_were,
    test_pushing_puts_claims_last_and_sends_nothing_twice,
    test_signatures_cannot_be_replayed,
    test_swapped_bytes_are_refused_and_the_next_depot_is_asked,
    test_two_wants_of_one_blob_are_one_transfer,
    test_what_was_pushed_is_not_built_again,
    test_without_a_signer_content_is_pushed_but_no_claims,
)
from tests.support.depots import Watched, http_depot, s3_depot


@pytest.fixture(params=["http", "s3"])
def depot(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Watched]:
    """A depot of each kind but the folder, which the tests of the core have."""
    if request.param == "http":
        with http_depot(tmp_path / "depot") as found:
            yield found
    else:
        yield s3_depot(request.getfixturevalue("s3"))
