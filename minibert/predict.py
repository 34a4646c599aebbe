"""Texts in, a label for every token out. (Entities follow; this is what they will be made from.)"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer

from minibert.config import SOURCE_OPTIONS
from minibert.errors import CheckpointError, DataError
from minibert.hub import Source
from minibert.model.heads import BertForTokenClassification
from minibert.text.tokenizer import load_tokenizer
from minibert.text.windows import Window, windows

logger = logging.getLogger("minibert")

OVERLAP = 64  # tokens that two windows of a long text share, so that each is read with context on both sides
MAX_TOKENS_PER_BATCH = 4096
OTHER_CLASSIFIERS = {"BertForSequenceClassification", "BertForMultipleChoice"}  # their heads have the same name


@dataclass(frozen=True)
class TokenLabel:
    """One token of a text: `text[start:end]` as the caller wrote it, its label, and the label's probability."""

    label: str
    start: int
    end: int
    text: str
    score: float


class TokenClassifier:
    """A token-classification model with its tokeniser.

    Args:
        model: the model; its mode (training or eval) is left as it is found.
        tokenizer: the tokeniser of the same checkpoint.

    Raises:
        CheckpointError: the tokeniser has ids beyond the model's word embeddings, or adds other special tokens than
            one in front and one behind; or the model has no room for a token between these two.
    """

    def __init__(self, model: BertForTokenClassification, tokenizer: Tokenizer) -> None:
        largest, rows = max(tokenizer.get_vocab().values()), model.config.vocab_size
        if largest >= rows:
            raise CheckpointError(
                f"the tokenizer's largest id is {largest} but the word embeddings have {rows} rows (vocab_size): "
                "tokenizer and checkpoint do not match"
            )
        frame = tokenizer.encode("").ids
        if len(frame) != 2:
            raise CheckpointError(f"expected a tokenizer that adds [CLS] and [SEP], got {len(frame)} special tokens")
        self.model, self.tokenizer = model, tokenizer
        self._first_id, self._last_id = frame
        self._window_size = model.config.max_position_embeddings - len(frame)
        if self._window_size < 1:
            raise CheckpointError(f"max_position_embeddings {self._window_size + 2} leaves no room for text")
        self._overlap = min(OVERLAP, self._window_size // 4)

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | os.PathLike[str], *, allow_untrained_head: bool = False, **options: Any
    ) -> TokenClassifier:
        """Loads a checkpoint, local or from the Hub; `options` as for `BertForTokenClassification.from_pretrained`.

        Raises:
            CheckpointError: as there; or the checkpoint has no token-classification head, whose labels would be
                random, and `allow_untrained_head` is False.
        """
        model, report = BertForTokenClassification.from_pretrained(name_or_path, output_loading_info=True, **options)
        trained_for = set(model.config.architectures or ())
        of_another_task = bool(trained_for & OTHER_CLASSIFIERS)
        if report["missing_keys"] or report["mismatched_keys"] or of_another_task:
            if not allow_untrained_head:
                raise CheckpointError(
                    f"{name_or_path}: no trained token-classification head of {model.config.num_labels} labels in this "
                    "checkpoint; fine-tune it first, or pass allow_untrained_head (--allow-untrained-head) and get "
                    "random labels"
                )
            logger.warning("%s: the token-classification head is untrained; its labels are random", name_or_path)
        where = {name: options[name] for name in SOURCE_OPTIONS if name in options}
        return cls(model, load_tokenizer(Source(os.fspath(name_or_path), **where)))

    def label_tokens(self, texts: Iterable[str]) -> list[list[TokenLabel]]:
        """The label of every token of every text, in order; special tokens have none.

        A text longer than the model is read in overlapping windows; nothing is cut off.

        Raises:
            TypeError: a text is not a string, or `texts` is one.
            DataError: a text holds half of a surrogate pair, which is no character.
        """
        if isinstance(texts, str):
            raise TypeError(f"expected a list of strings, got the string {texts!r}")
        texts = list(texts)
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(f"expected a string, got {text!r}")
            if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                raise DataError(f"expected Unicode text, got half of a surrogate pair in {text!r}")
        encodings = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        # An Encoding makes these lists anew at each access, so they are asked for once a text and not once a token.
        ids, offsets = ([getattr(e, name) for e in encodings] for name in ("ids", "offsets"))
        results: list[list[TokenLabel]] = [[] for _ in texts]
        names = self.model.config.id2label
        was_training = self.model.training
        self.model.eval()
        try:
            for batch in self._batches([len(row) for row in ids]):
                logits = self._logits([ids[row][window.start : window.end] for row, window in batch])
                scores, labels = logits.float().softmax(-1).max(-1)
                for (row, window), row_scores, row_labels in zip(batch, scores.tolist(), labels.tolist(), strict=True):
                    for token in range(window.first, window.last):
                        start, end = offsets[row][token]
                        cell = token - window.start + 1  # the first cell is [CLS]
                        results[row].append(
                            TokenLabel(names[row_labels[cell]], start, end, texts[row][start:end], row_scores[cell])
                        )
        finally:
            self.model.train(was_training)
        return results

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[tuple[int, Window]]]:
        """Every window of every text, as many at a time as `MAX_TOKENS_PER_BATCH` cells hold."""
        batch: list[tuple[int, Window]] = []
        longest = 0
        for row, length in enumerate(lengths):
            for window in windows(length, self._window_size, self._overlap):
                longest = max(longest, window.end - window.start + 2)
                if batch and longest * (len(batch) + 1) > MAX_TOKENS_PER_BATCH:
                    yield batch
                    batch, longest = [], window.end - window.start + 2
                batch.append((row, window))
        if batch:
            yield batch

    @torch.inference_mode()
    def _logits(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        longest = max(map(len, sequences)) + 2
        input_ids = torch.full((len(sequences), longest), self.model.config.pad_token_id or 0)
        mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(sequences):
            input_ids[row, : len(ids) + 2] = torch.tensor([self._first_id, *ids, self._last_id])
            mask[row, : len(ids) + 2] = 1
        device = self.model.device
        logits: torch.Tensor = self.model(input_ids.to(device), mask.to(device), return_dict=False)[0]
        return logits
