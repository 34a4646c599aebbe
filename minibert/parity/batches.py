"""What both models are given: texts of different lengths, padded, with a pair among them, and labels.

Shapes: B sequences of S cells.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minibert.errors import CheckpointError, MinibertError
from minibert.model.heads import IGNORED_LABEL
from minibert.text.tokenizer import load_tokenizer

logger = logging.getLogger("minibert")

SENTENCES = (
    "今天天气很好。",
    "王小明在北京大学人民医院住院，2024年3月出院。",
    "The quick brown fox jumps over the lazy dog, twice.",
    "好",
)
ROWS = 16  # texts that go through a model at once


@dataclass(frozen=True)
class Batch:
    """Arguments of a forward pass, as a model takes them, and what is known of them."""

    inputs: dict[str, Tensor]
    labels: dict[str, Tensor]
    real: Tensor  # (B, S) bool: no padding; of multiple choice, (B * N, S)

    @property
    def ids(self) -> Tensor:
        """(B, S)."""
        return self.inputs["input_ids"].reshape(self.real.shape)

    @property
    def types(self) -> Tensor:
        """(B, S)."""
        types = self.inputs.get("token_type_ids")
        return torch.zeros_like(self.ids) if types is None else types.reshape(self.real.shape)


def from_texts(name_or_path: str | os.PathLike[str], texts: Sequence[str], config: Any) -> Iterator[dict[str, Tensor]]:
    """Padded batches of the texts, each alone, and of one pair, so that there is a second token type.

    Texts are cut to the model's length: this compares arithmetic. Without a tokeniser, random ids, with a notice.
    """
    try:
        tokenizer = load_tokenizer(name_or_path)
    except CheckpointError as error:
        logger.warning("%s; random ids are compared instead of texts", error)
        yield random_inputs(config)
        return
    if not any(text.strip() for text in texts):
        raise MinibertError("texts: expected at least one that is not empty")
    tokenizer.enable_truncation(config.max_position_embeddings)
    tokenizer.enable_padding(pad_id=config.pad_token_id or 0)
    rows: list[Any] = list(texts)
    if config.type_vocab_size > 1:
        rows.insert(min(len(rows), ROWS - 1), (texts[0], texts[-1]))
    for start in range(0, len(rows), ROWS):
        encodings = tokenizer.encode_batch(rows[start : start + ROWS])
        yield {
            "input_ids": torch.tensor([encoding.ids for encoding in encodings]),
            "attention_mask": torch.tensor([encoding.attention_mask for encoding in encodings]),
            "token_type_ids": torch.tensor([encoding.type_ids for encoding in encodings]),
        }


def random_inputs(config: Any) -> dict[str, Tensor]:
    """Ids of no meaning: four sequences of different lengths, with every token type."""
    generator = torch.Generator().manual_seed(0)
    longest = min(16, config.max_position_embeddings)
    lengths = torch.tensor([longest, max(1, longest // 2), max(1, longest - 3), 1])
    real = torch.arange(longest) < lengths[:, None]
    pad = config.pad_token_id or 0
    ids = torch.randint(1, config.vocab_size, real.shape, generator=generator)
    ids = torch.where(ids == pad, (ids + 1) % config.vocab_size, ids)
    types = torch.arange(longest) * config.type_vocab_size // longest
    return {
        "input_ids": ids.masked_fill(~real, pad),
        "attention_mask": real.long(),
        "token_type_ids": (types * real).long(),
    }


def make_batch(inputs: Mapping[str, Tensor], head: str, config: Any, device: torch.device) -> Batch:
    """A batch with labels for a head, by the name of its class; a head that is not known gets none.

    Raises:
        MinibertError: no `input_ids`, or arguments of different shapes.
    """
    inputs = {name: value.to(device) for name, value in inputs.items()}
    if "input_ids" not in inputs or any(value.shape != inputs["input_ids"].shape for value in inputs.values()):
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
        raise MinibertError(f"inputs: expected input_ids, and all of one shape, got {shapes or 'nothing'}")
    if head == "BertForMultipleChoice" and inputs["input_ids"].dim() == 2:  # a text, or one from the other end
        inputs = {name: torch.stack([value, value.flip(0)], 1) for name, value in inputs.items()}
    mask = inputs.get("attention_mask")
    real = torch.ones_like(inputs["input_ids"], dtype=torch.bool) if mask is None else mask.bool()
    return Batch(inputs, _labels(head, real, config), real.flatten(0, -2))


def _labels(head: str, real: Tensor, config: Any) -> dict[str, Tensor]:
    rows = torch.arange(len(real), device=real.device)
    last = real.sum(-1) - 1
    tokens = torch.arange(real.numel(), device=real.device).view(real.shape) * 7
    match head:
        case "BertForTokenClassification":
            return {"labels": (tokens % config.num_labels).masked_fill(~real, IGNORED_LABEL)}
        case "BertForMaskedLM":
            return {"labels": (tokens % config.vocab_size).masked_fill(~real, IGNORED_LABEL)}
        case "BertForPreTraining":
            labels = (tokens % config.vocab_size).masked_fill(~real, IGNORED_LABEL)
            return {"labels": labels, "next_sentence_label": rows % 2}
        case "BertForNextSentencePrediction":
            return {"labels": rows % 2}
        case "BertForSequenceClassification":
            problem = "regression" if config.num_labels == 1 else config.problem_type
            if problem == "multi_label_classification":
                return {"labels": (rows[:, None] + torch.arange(config.num_labels, device=real.device)) % 2 * 1.0}
            if problem == "regression":
                return {"labels": (rows * 0.5)[:, None].expand(-1, config.num_labels).squeeze(-1)}
            return {"labels": rows % config.num_labels}
        case "BertForMultipleChoice":
            return {"labels": rows % real.shape[1]}
        case "BertForQuestionAnswering":
            return {"start_positions": rows % (last + 1), "end_positions": last}
    return {}
