"""How far a checkpoint's numbers are from those of `transformers`, layer by layer."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import minibert
from minibert.config import BertConfig
from minibert.errors import MinibertError
from minibert.model.pretrained import BertPreTrainedModel
from minibert.text.tokenizer import load_tokenizer

logger = logging.getLogger("minibert")

SENTENCES = (
    "今天天气很好。",
    "王小明在北京大学人民医院住院，2024年3月出院。",
    "The quick brown fox jumps over the lazy dog, twice.",
    "好",
)


@dataclass(frozen=True)
class Difference:
    """Largest and mean absolute difference of one result over the real tokens."""

    name: str
    largest: float
    mean: float


def compare(
    name_or_path: str | os.PathLike[str], texts: Sequence[str] = SENTENCES, attn_implementation: str = "sdpa"
) -> Iterator[Difference]:
    """Runs one padded batch of `texts` through minibert and `transformers`, in float32 on the CPU.

    The class is the one that the checkpoint names in `architectures`, else `BertModel`. A head that the checkpoint
    lacks, or that is neither's, is left out, with a notice in the log. Texts are cut to the model's length: this
    compares arithmetic.

    Yields:
        The embeddings' difference, every layer's, then those of the head's results.

    Raises:
        MinibertError: `transformers` is not installed, or the checkpoint cannot be loaded.
    """
    try:
        import transformers
    except ImportError:
        raise MinibertError("parity needs the reference: pip install 'minibert[train]'") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name = next(iter(BertConfig.from_pretrained(name_or_path).architectures or ()), "BertModel")
    model_class = getattr(minibert, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, BertPreTrainedModel)):
        logger.warning("%s: the head of %s is not compared, only the encoder", name_or_path, name)
        name, model_class = "BertModel", minibert.BertModel
    ours, report = model_class.from_pretrained(
        name_or_path, dtype=torch.float32, attn_implementation=attn_implementation, output_loading_info=True
    )
    theirs = getattr(transformers, name).from_pretrained(
        name_or_path, dtype=torch.float32, attn_implementation=attn_implementation
    )
    if report["missing_keys"]:
        logger.warning("%s: not in the checkpoint, not compared: %s", name_or_path, ", ".join(report["missing_keys"]))
    inputs = _batch(name_or_path, texts, ours.config)
    real = inputs["attention_mask"].bool()
    if name == "BertForMultipleChoice":  # every text is the only choice
        inputs = {key: value.unsqueeze(1) for key, value in inputs.items()}
    with torch.inference_mode():
        our_output = ours(**inputs, output_hidden_states=True, return_dict=True)
        their_output = theirs.eval()(**inputs, output_hidden_states=True, return_dict=True)
    pairs = zip(our_output.hidden_states, their_output.hidden_states, strict=True)
    for index, (mine, reference) in enumerate(pairs):
        yield _difference(f"layer {index}" if index else "embeddings", mine, reference, real)
    if not report["missing_keys"]:
        for key, value in our_output.items():
            if key != "hidden_states":
                yield _difference(key, value, their_output[key], real)


def _batch(name_or_path: str | os.PathLike[str], texts: Sequence[str], config: BertConfig) -> dict[str, Tensor]:
    tokenizer = load_tokenizer(name_or_path)
    tokenizer.enable_truncation(config.max_position_embeddings)
    tokenizer.enable_padding(pad_id=config.pad_token_id or 0)
    encodings = tokenizer.encode_batch(list(texts))
    return {
        "input_ids": torch.tensor([encoding.ids for encoding in encodings]),
        "attention_mask": torch.tensor([encoding.attention_mask for encoding in encodings]),
        "token_type_ids": torch.tensor([encoding.type_ids for encoding in encodings]),
    }


def _difference(name: str, ours: Tensor, theirs: Any, real: Tensor) -> Difference:
    if ours.shape[:2] == real.shape:
        ours, theirs = ours[real], theirs[real]
    distance = (ours.double() - theirs.double()).abs()
    return Difference(name, distance.max().item(), distance.mean().item())
