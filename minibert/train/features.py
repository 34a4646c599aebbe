"""Labelled texts to the token ids and labels that a model is trained on, and batches of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from minibert.errors import DataError
from minibert.text.alignment import IGNORED, labels_from_spans, tokenize
from minibert.text.labels import LabelSet, Span
from minibert.text.windows import sentence_starts, windows
from minibert.train.data import Example

if TYPE_CHECKING:
    from datasets import Dataset

VERSION = 1  # of what `features` makes; another one makes cached results miss


def as_dataset(examples: Sequence[Example]) -> Dataset:
    """Examples as rows of text, entities (label, start, end among the characters) and place."""
    from datasets import Dataset, Features, List, Value

    entity = {"label": Value("string"), "start": Value("int64"), "end": Value("int64")}
    columns = Features({"text": Value("string"), "entities": List(entity), "place": Value("string")})
    rows = [
        {
            "text": example.text,
            "entities": [{"label": s.label, "start": s.start, "end": s.end} for s in example.in_text(example.entities)],
            "place": example.place,
        }
        for example in examples
    ]
    return Dataset.from_list(rows, features=columns)


def features(
    dataset: Dataset, tokenizer: Tokenizer, labels: LabelSet, max_length: int = 512, split_mode: str = "text"
) -> Dataset:
    """Rows of input_ids, labels and length, special tokens included, from rows of text and entities.

    Nothing is cut: a text of more than `max_length` tokens becomes several rows, parted where a sentence or a word
    begins. Special tokens have the label -100. Results are cached by `datasets`; another tokeniser, label list,
    length or split mode is another entry.

    Args:
        dataset: as `as_dataset` makes it, or with the same columns.
        tokenizer: one that adds a token in front and one behind.
        labels: of the model.
        max_length: the most tokens of a row.
        split_mode: "text" or "characters", as for `text.alignment.tokenize`.

    Returns:
        A dataset with the columns input_ids, labels, length, and unspelled: how many entities the row's text has
        whose edges no token has (counted once, in the text's first row).

    Raises:
        DataError: naming the row's place: a type that is not among the labels.
    """
    frame: list[int] = tokenizer.encode("").ids
    settings = (VERSION, tokenizer.to_str(), labels.names, labels.scheme, max_length, split_mode)
    fingerprint = hashlib.sha256(repr((dataset._fingerprint, settings)).encode()).hexdigest()[:32]
    known = set(labels.types)

    def rows_of(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        made: dict[str, list[Any]] = {"input_ids": [], "labels": [], "length": [], "unspelled": []}
        texts, entities = batch["text"], batch["entities"]
        places = batch.get("place") or ["?"] * len(texts)
        for text, spans, place, tokens in zip(
            texts, entities, places, tokenize(tokenizer, texts, split_mode), strict=True
        ):
            wanted = [Span(span["label"], span["start"], span["end"]) for span in spans]
            unknown = sorted({span.label for span in wanted} - known)
            if unknown:
                raise DataError(f"{place}: type {unknown[0]!r} is not among {', '.join(sorted(known - {''}))}")
            ids, unspelled = labels_from_spans(tokens, wanted, labels)
            sentences = sentence_starts(text, tokens.starts) if len(tokens) else np.zeros(0, dtype=bool)
            for number, (start, end) in enumerate(windows(max_length - 2, 0, tokens.begins_word, sentences)):
                made["input_ids"].append([frame[0], *tokens.ids[start:end].tolist(), frame[1]])
                made["labels"].append([IGNORED, *ids[start:end].tolist(), IGNORED])
                made["length"].append(end - start + 2)
                made["unspelled"].append(len(unspelled) if number == 0 else 0)
        return made

    return dataset.map(rows_of, batched=True, remove_columns=dataset.column_names, new_fingerprint=fingerprint)


@dataclass(frozen=True)
class Collator:
    """Rows of input_ids and labels to a batch, padded on one side; labels with -100.

    Args:
        pad_token_id: what fills input_ids.
        padding_side: "right" or "left".
        pad_to_multiple_of: the width becomes a multiple of this.
    """

    pad_token_id: int = 0
    padding_side: str = "right"
    pad_to_multiple_of: int = 1

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """input_ids, attention_mask and, if the rows have them, labels: (B, S) int64.

        Raises:
            DataError: naming the row whose labels are not as many as its tokens.
        """
        lengths = [len(row["input_ids"]) for row in rows]
        width = -(-max(lengths) // self.pad_to_multiple_of) * self.pad_to_multiple_of
        batch = {
            "input_ids": torch.full((len(rows), width), self.pad_token_id),
            "attention_mask": torch.zeros(len(rows), width, dtype=torch.int64),
        }
        if "labels" in rows[0]:
            batch["labels"] = torch.full((len(rows), width), IGNORED)
        for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if "labels" in batch and len(row["labels"]) != length:
                raise DataError(f"row {number} of the batch: {len(row['labels'])} labels for {length} tokens")
            cells = slice(width - length, width) if self.padding_side == "left" else slice(0, length)
            batch["attention_mask"][number, cells] = 1
            for name in batch.keys() - {"attention_mask"}:
                batch[name][number, cells] = torch.as_tensor(row[name], dtype=torch.int64)
        return batch


def batches_by_tokens(
    lengths: Sequence[int], max_tokens: int, generator: torch.Generator | None = None
) -> Iterator[list[int]]:
    """Rows of like length together, of at most `max_tokens` real tokens, the batches in random order.

    Args:
        lengths: tokens of each row.
        max_tokens: at least one row comes even if it is longer.
        generator: without one, the longest come first.
    """
    order = list(range(len(lengths)))
    if generator is not None:
        noise = torch.rand(len(order), generator=generator).tolist()
        order.sort(key=lambda row: -lengths[row] * (0.9 + 0.2 * noise[row]))
    else:
        order.sort(key=lambda row: -lengths[row])
    batches: list[list[int]] = []
    tokens = max_tokens
    for row in order:
        if tokens + lengths[row] > max_tokens:
            batches.append([])
            tokens = 0
        batches[-1].append(row)
        tokens += lengths[row]
    places = range(len(batches)) if generator is None else torch.randperm(len(batches), generator=generator).tolist()
    for place in places:
        yield batches[place]
