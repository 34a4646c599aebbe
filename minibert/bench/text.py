"""From texts to entities: everything that a user waits for, tokenising and decoding included."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from minibert.bench.peers import Setting
from minibert.predict import TokenClassifier

RunTexts = Callable[[Sequence[str]], Any]
BATCH_SIZES = (1, 8, 16, 32)  # of which the pipeline gets the one that it does best with
TRIED = 48  # texts
BUDGETS = (64, 256, 512, 1024, 2048, 4096, 8192, 16384)  # cells of a batch


def minibert(setting: Setting, precision: str) -> RunTexts:
    """`TokenClassifier`, as it comes."""
    classifier = TokenClassifier.from_pretrained(setting.checkpoint, device="cpu", precision=precision)
    return lambda texts: classifier(list(texts))


def pipeline(setting: Setting, texts: Sequence[str]) -> tuple[RunTexts, int]:
    """`transformers.pipeline` at its best batch size, and that size."""
    import torch
    import transformers

    made = transformers.pipeline(
        "token-classification",
        model=transformers.BertForTokenClassification.from_pretrained(setting.checkpoint, dtype=torch.float32),
        tokenizer=transformers.BertTokenizer.from_pretrained(setting.checkpoint),
        device="cpu",
        aggregation_strategy="first",
    )
    some = list(texts[:TRIED])
    made(some[:4])
    took = {}
    for size in BATCH_SIZES:
        start = time.perf_counter()
        made(some, batch_size=size)
        took[size] = time.perf_counter() - start
    best = min(took, key=lambda size: took[size])
    return lambda given: made(list(given), batch_size=best), best


def budgets(setting: Setting, precision: str) -> dict[str, RunTexts]:
    """`TokenClassifier` with one token budget and another, to choose one by."""
    classifier = TokenClassifier.from_pretrained(setting.checkpoint, device="cpu", precision=precision)

    def with_budget(budget: int) -> RunTexts:
        def run(texts: Sequence[str]) -> Any:
            classifier.max_tokens_per_batch = budget
            return classifier(list(texts))

        return run

    return {f"{precision}, {budget:,} cells": with_budget(budget) for budget in BUDGETS}


def text_peers(setting: Setting, texts: Sequence[str]) -> dict[str, RunTexts]:
    """All of them by name."""
    theirs, size = pipeline(setting, texts)
    return {
        "minibert fp32": minibert(setting, "fp32"),
        "minibert int8": minibert(setting, "int8"),
        f"pipeline, batch {size}": theirs,
    }
