"""Labelled texts to the token ids and labels that a model is trained on, and batches of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from minibert.errors import DataError
from minibert.text.alignment import IGNORED, LABEL_PIECES, labels_from_spans, tokenize
from minibert.text.labels import LabelSet, Span
from minibert.text.windows import sentence_starts, windows
from minibert.train.data import Example

if TYPE_CHECKING:
    from datasets import Dataset

VERSION = 2  # of what `features` makes; another one makes cached results miss


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
    dataset: Dataset,
    tokenizer: Tokenizer,
    labels: LabelSet,
    max_length: int = 512,
    split_mode: str = "text",
    label_pieces: str = "first",
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
        label_pieces: "first" labels the first token of each word, as `TokenClassifier` reads them, and the others
            with -100; "all" labels them too: B-X I-X, and B-X E-X for one that by itself were S-X.

    Returns:
        A dataset with the columns input_ids, labels, length, and unspelled: how many entities the row's text has
        whose edges no token has (counted once, in the text's first row).

    Raises:
        DataError: naming the row's place: a type that is not among the labels; or no such option.
    """
    if label_pieces not in LABEL_PIECES:
        raise DataError(f"label_pieces: expected {' or '.join(LABEL_PIECES)}, got {label_pieces!r}")
    frame: list[int] = tokenizer.encode("").ids
    settings = (VERSION, tokenizer.to_str(), labels.names, labels.scheme, max_length, split_mode, label_pieces)
    fingerprint = hashlib.sha256(repr((dataset._fingerprint, settings)).encode()).hexdigest()[:32]
    known = set(labels.entity_types)

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
                raise DataError(f"{place}: type {unknown[0]!r} is not among {', '.join(labels.entity_types)}")
            if label_pieces == "all":
                ids, unspelled = labels_from_spans(tokens, wanted, labels)
            else:
                words = tokens.by_word()
                of_words, unspelled = labels_from_spans(words, wanted, labels)
                ids = np.full(len(tokens), IGNORED, dtype=np.int64)
                ids[tokens.begins_word] = of_words
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

    A row may also be a batch of rows already, as `TokenBatches` has them.

    Args:
        pad_token_id: what fills input_ids.
        padding_side: "right" or "left".
        pad_to_multiple_of: the width becomes a multiple of this.
    """

    pad_token_id: int = 0
    padding_side: str = "right"
    pad_to_multiple_of: int = 1

    def __call__(self, rows: Sequence[dict[str, Any] | list[dict[str, Any]]]) -> dict[str, Tensor]:
        """input_ids, attention_mask and, if the rows have them, labels: (B, S) int64.

        Raises:
            DataError: naming the row whose labels are not as many as its tokens.
        """
        checked = _checked(rows)
        lengths = [len(row["input_ids"]) for row in checked]
        width = -(-max(lengths) // self.pad_to_multiple_of) * self.pad_to_multiple_of
        batch = {
            "input_ids": torch.full((len(checked), width), self.pad_token_id),
            "attention_mask": torch.zeros(len(checked), width, dtype=torch.int64),
        }
        if "labels" in checked[0]:
            batch["labels"] = torch.full((len(checked), width), IGNORED)
        for number, (row, length) in enumerate(zip(checked, lengths, strict=True)):
            cells = slice(width - length, width) if self.padding_side == "left" else slice(0, length)
            batch["attention_mask"][number, cells] = 1
            for name in batch.keys() - {"attention_mask"}:
                batch[name][number, cells] = torch.as_tensor(row[name], dtype=torch.int64)
        return batch


@dataclass(frozen=True)
class PackingCollator:
    """Rows of input_ids and labels to one row in which they lie one behind another, without padding.

    The model removes padding by itself, so this saves only the moving of it. For training: `Trainer` joins what it
    predicts by rows, and here a row is a whole batch.
    """

    def __call__(self, rows: Sequence[dict[str, Any] | list[dict[str, Any]]]) -> dict[str, Tensor]:
        """input_ids and, if the rows have them, labels, (1, T) int64, and sequence_lengths (N,).

        Raises:
            DataError: naming the row whose labels are not as many as its tokens.
        """
        checked = _checked(rows)
        batch = {"sequence_lengths": torch.tensor([len(row["input_ids"]) for row in checked])}
        for name in ("input_ids", "labels"):
            if name in checked[0]:
                batch[name] = torch.cat([torch.as_tensor(row[name], dtype=torch.int64) for row in checked])[None]
        return batch


def _checked(rows: Sequence[dict[str, Any] | list[dict[str, Any]]]) -> list[dict[str, Any]]:
    flat = [row for item in rows for row in (item if isinstance(item, list) else [item])]
    for number, row in enumerate(flat):
        if "labels" in row and len(row["labels"]) != len(row["input_ids"]):
            raise DataError(
                f"row {number} of the batch: {len(row['labels'])} labels for {len(row['input_ids'])} tokens"
            )
    return flat


def batches_by_tokens(
    lengths: Sequence[int], max_tokens: int, generator: torch.Generator | None = None
) -> list[list[int]]:
    """Rows of like length together, of at most `max_tokens` real tokens, the longest first.

    Args:
        lengths: tokens of each row.
        max_tokens: at least one row comes even if it is longer.
        generator: with one, lengths count for up to a tenth more or less, so that each time others come together.
    """
    order = torch.tensor(lengths, dtype=torch.float64)
    if generator is not None:
        order = order * (0.9 + 0.2 * torch.rand(len(lengths), generator=generator))
    batches: list[list[int]] = []
    tokens = max_tokens
    for row in order.argsort(descending=True, stable=True).tolist():
        if tokens + lengths[row] > max_tokens:
            batches.append([])
            tokens = 0
        batches[-1].append(row)
        tokens += lengths[row]
    return batches


class TokenBatches(TorchDataset[list[dict[str, Any]]]):
    """A data set whose items are batches of rows of like length, of at most so many real tokens.

    For a `Trainer` with `per_device_train_batch_size=1`, which asks for the items in random order. Batches are other
    ones in each epoch (and the same again for the same seed and epoch), but always as many, so that the steps of a
    run are known before.

    Args:
        rows: as `features` makes them.
        max_tokens: of a batch; a longer row is one by itself.
        epochs: for which the number of batches is to be enough.
        seed: of what comes together.
        multiple_of: the number of batches is a multiple of this, such as that of the processes, as far as there are
            rows for it.
    """

    def __init__(self, rows: Dataset, max_tokens: int, epochs: int = 1, seed: int = 0, multiple_of: int = 1) -> None:
        self.rows, self.max_tokens, self.seed = rows, max_tokens, seed
        self.lengths: list[int] = list(rows["length"])
        most = max(len(self._batches(epoch)) for epoch in range(epochs))
        self.size = min(-(-most // multiple_of) * multiple_of, len(self.lengths))
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Makes the batches of another epoch; `accelerate` calls this before each."""
        batches = self._batches(epoch)
        while len(batches) < self.size:  # halve the one with the most rows
            largest = max(range(len(batches)), key=lambda number: len(batches[number]))
            batches.append(batches[largest][::2])
            batches[largest] = batches[largest][1::2]
        self.batches = batches

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> list[dict[str, Any]]:
        rows = self.rows[self.batches[index]]
        return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]

    def _batches(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return batches_by_tokens(self.lengths, self.max_tokens, generator)
