"""How well models predict a text: reports of perplexity, and two of them compared.

Chunks of a text differ far more from each other than two quantizations of one model do, so a
comparison is paired: chunk by chunk, on the same tokens. The interval of the mean difference is a
percentile bootstrap over chunks (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
chapter 13) with a fixed seed: the same reports always give the same numbers.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from mmadmin.core.errors import InvalidInput, Refused

REPORT = "report.json"
CONTEXTS = (128, 256, 512, 1024, 2048)
"""Tokens per chunk that a measurement may have."""
RESAMPLES = 4000
SEED = 0
LEAST_CHUNKS = 8
"""With fewer, a bootstrap's interval is too narrow to be believed."""

Verdict = Literal["better", "worse", "no difference seen"]


@dataclass(frozen=True, slots=True)
class TextReport:
    """What one model made of one text."""

    text_sha256: str
    tokenizer: str
    """A digest: equal where two models turn a text into the same tokens."""
    context: int
    """Tokens per chunk."""
    perplexity: str
    """As the engine's program printed it."""
    standard_error: str
    """Of the perplexity, as printed; it takes every token as independent."""
    chunk_nll: Sequence[float]
    """Mean negative log-likelihood of each chunk, nats per token."""

    @property
    def mean_nll(self) -> float:
        """Of all tokens, nats per token."""
        return math.fsum(self.chunk_nll) / len(self.chunk_nll)


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % confidence interval."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A model against a reference on the same chunks."""

    perplexity_change_percent: Interval
    """Above 0 = the model predicts the text worse than the reference."""
    chunks: int
    verdict: Verdict


def parse_report(data: Mapping[str, Any]) -> TextReport:
    """A report's JSON. Raises `InvalidInput` for a format that this version does not know."""
    if data.get("format") != 1:
        raise InvalidInput(
            f"the evaluation's report has format {data.get('format')!r}",
            remedy="it was made by another version of mmadmin: run the evaluation again",
        )
    running = [float(mean) for mean in data["running_nll"]]
    sums = [0.0, *(mean * n for n, mean in enumerate(running, 1))]
    return TextReport(
        text_sha256=data["text_sha256"],
        tokenizer=data["tokenizer"],
        context=data["context"],
        perplexity=data["perplexity"],
        standard_error=data["standard_error"],
        chunk_nll=[after - before for before, after in pairwise(sums)],
    )


def read_report(folder: Path) -> TextReport:
    """The report in an object's folder."""
    return parse_report(json.loads((folder / REPORT).read_text(encoding="utf-8")))


def bootstrap_mean(values: Sequence[float]) -> Interval:
    """The mean of `values` with its 95 % interval. Raises `InvalidInput` when there are none."""
    if not values:
        raise InvalidInput("an interval needs at least one value")
    rng = random.Random(SEED)  # noqa: S311 (statistics, no secret)
    count = len(values)
    means = sorted(math.fsum(rng.choices(values, k=count)) / count for _ in range(RESAMPLES))
    tail = RESAMPLES // 40
    return Interval(math.fsum(values) / count, means[tail - 1], means[-tail])


def compare(model: TextReport, reference: TextReport) -> Comparison:
    """Paired by chunk. Raises `Refused` where the two did not predict the same tokens."""
    _check_comparable(model, reference)
    pairs = zip(model.chunk_nll, reference.chunk_nll, strict=True)
    nll = bootstrap_mean([ours - theirs for ours, theirs in pairs])
    change = Interval(*(100 * math.expm1(value) for value in (nll.estimate, nll.low, nll.high)))
    verdict: Verdict = "no difference seen"
    if nll.low > 0:
        verdict = "worse"
    elif nll.high < 0:
        verdict = "better"
    return Comparison(change, len(model.chunk_nll), verdict)


def _check_comparable(model: TextReport, reference: TextReport) -> None:
    if model.tokenizer != reference.tokenizer:
        raise Refused(
            "the two models have different tokenizers: their perplexities are per different tokens",
            remedy="compare models of one family, or compare them by tasks",
        )
    if model.text_sha256 != reference.text_sha256:
        raise Refused(
            "the two were measured on different texts", remedy="measure both on the same text"
        )
    ours, theirs = len(model.chunk_nll), len(reference.chunk_nll)
    if (model.context, ours) != (reference.context, theirs):
        raise Refused(
            f"the two were measured differently: {ours} chunks of {model.context} tokens against "
            f"{theirs} of {reference.context}",
            remedy="measure both with the same --context and --chunks",
        )
    if ours < LEAST_CHUNKS:
        raise Refused(
            f"{ours} chunks are too few to tell a difference from chance",
            remedy=f"take a text of at least {LEAST_CHUNKS} chunks of {model.context} tokens",
        )
