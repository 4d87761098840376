"""Reports of perplexity, and comparisons with their uncertainty."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmadmin.core.errors import InvalidInput, Refused
from mmadmin.core.evaluation.text import (
    TextReport,
    bootstrap_mean,
    compare,
    parse_report,
)

NLLS = st.lists(st.floats(0.5, 9.0), min_size=8, max_size=20)
REPORT = TextReport("a" * 64, "t", 512, "20.0855", "0.50000", [2.0, 4.0, 3.0, 3.0] * 4)


def test_chunks_are_recovered_from_running_means() -> None:
    """The program prints the mean so far; a chunk's own is the difference of two sums."""
    report = parse_report(
        {
            "format": 1,
            "text_sha256": "a",
            "tokenizer": "t",
            "context": 512,
            "perplexity": "20.0855",
            "standard_error": "0.5",
            "running_nll": ["2.000000", "3.000000", "3.000000"],
        }
    )
    assert report.chunk_nll == pytest.approx([2.0, 4.0, 3.0])
    assert math.exp(report.mean_nll) == pytest.approx(20.0855, abs=1e-4)


def test_another_format_is_refused() -> None:
    """A report of another version is not guessed at."""
    with pytest.raises(InvalidInput, match="format 2"):
        parse_report({"format": 2})


@given(NLLS)
def test_an_interval_holds_its_estimate_and_stays_in_range(values: list[float]) -> None:
    """Means of resamples lie between the least and the largest value."""
    interval = bootstrap_mean(values)
    slack = 1e-9
    assert min(values) - slack <= interval.low <= interval.high <= max(values) + slack
    assert interval == bootstrap_mean(values)


@given(NLLS, st.floats(0.01, 0.5))
def test_a_constant_rise_is_seen_however_chunks_differ(values: list[float], rise: float) -> None:
    """Pairing removes the spread between chunks; the opposite comparison has the opposite sign."""
    reference = replace(REPORT, chunk_nll=values)
    model = replace(REPORT, chunk_nll=[value + rise for value in values])
    found = compare(model, reference)
    assert found.verdict == "worse"
    assert found.perplexity_change_percent.estimate == pytest.approx(100 * math.expm1(rise))
    assert compare(reference, model).verdict == "better"


@given(NLLS)
def test_a_model_does_not_differ_from_itself(values: list[float]) -> None:
    """No winner where there is none."""
    report = replace(REPORT, chunk_nll=values)
    found = compare(report, report)
    assert found.verdict == "no difference seen"
    assert found.perplexity_change_percent.low == found.perplexity_change_percent.high == 0


def test_differences_within_the_noise_have_no_winner() -> None:
    """Half the chunks better, half worse by as much."""
    shaken = [nll + (0.1 if n % 2 else -0.1) for n, nll in enumerate(REPORT.chunk_nll)]
    found = compare(replace(REPORT, chunk_nll=shaken), REPORT)
    assert found.verdict == "no difference seen"
    assert found.perplexity_change_percent.low < 0 < found.perplexity_change_percent.high


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(REPORT, tokenizer="u"), "different tokenizers"),
        (replace(REPORT, text_sha256="b" * 64), "different texts"),
        (replace(REPORT, context=256), "16 chunks of 512 tokens against 16 of 256"),
        (replace(REPORT, chunk_nll=[3.0] * 9), "against 9 of 512"),
    ],
)
def test_what_cannot_be_compared_says_why(other: TextReport, words: str) -> None:
    """A perplexity is a figure per token of one text."""
    with pytest.raises(Refused, match=words):
        compare(REPORT, other)


def test_too_few_chunks_are_refused() -> None:
    """An interval from seven chunks would promise too much."""
    short = replace(REPORT, chunk_nll=[3.0] * 7)
    with pytest.raises(Refused, match="7 chunks are too few"):
        compare(short, short)
