"""The attention of one text: every layer's and head's weights, their averages, and rollout.

L layers, H heads, S tokens. Layers and heads are counted from 1, as people count them in pictures.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from minibert.config import SOURCE_OPTIONS
from minibert.errors import DataError, MinibertError
from minibert.hub import DEFAULT_MODEL, Source
from minibert.model.encoder import BertModel
from minibert.model.pretrained import BertPreTrainedModel
from minibert.text.alignment import tokenize
from minibert.text.labels import Floats
from minibert.text.tokenizer import load_tokenizer
from minibert.visualize.figures import attention_figure, png
from minibert.visualize.page import attention_page
from minibert.writing import replacing

SUFFIXES = (".html", ".png")


@dataclass(frozen=True, eq=False)
class Attention:
    """What `read_attention` found. A notebook shows it as the page that `save` writes.

    tokens are S labels, special tokens included; weights are (L, H, S, S) float32, from query (row) to key (column),
    and every row sums to 1.
    """

    tokens: Sequence[str]
    weights: Floats = field(repr=False)
    title: str = "Attention"

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.weights)

    @property
    def num_heads(self) -> int:
        """H."""
        return int(self.weights.shape[1])

    def head(self, layer: int, head: int | None = None) -> Floats:
        """The weights (S, S) of a head; without `head`, the average over the heads of the layer.

        Raises:
            MinibertError: there is no such layer or head.
        """
        _check("layer", layer, self.num_layers)
        if head is None:
            average: Floats = self.weights[layer - 1].mean(0)
            return average
        _check("head", head, self.num_heads)
        weights: Floats = self.weights[layer - 1, head - 1]
        return weights

    def rollout(self) -> Floats:
        """How much of each input token is in each token after each layer, (L, S, S); rows sum to 1.

        Attention rollout (https://arxiv.org/abs/2005.00928, section 3): heads are averaged, the residual connection
        counts as much as the attention, and the layers are multiplied.
        """
        mixing = (self.weights.mean(1) + np.eye(len(self.tokens), dtype=np.float32)) / 2  # (L, S, S)
        mixing /= mixing.sum(-1, keepdims=True)
        layers = [mixing[0]]
        for matrix in mixing[1:]:
            layers.append(matrix @ layers[-1])
        return np.stack(layers)

    def to_html(self, layer: int = 1, head: int = 1) -> str:
        """A page that needs nothing but itself; it opens with the given head in detail."""
        self.head(layer, head)  # refuses what is not there
        columns = np.concatenate([self.weights, self.weights.mean(1, keepdims=True), self.rollout()[:, None]], 1)
        return attention_page(self.title, self.tokens, columns, (layer, head))

    def save(self, path: str | os.PathLike[str], layer: int = 1, head: int = 1, font: str | None = None) -> None:
        """Writes the page (`.html`), or one picture of everything (`.png`; needs matplotlib).

        Args:
            layer, head: the one in detail.
            font: as in `figures.head_figure`; a page takes the fonts of whoever reads it.

        Raises:
            MinibertError: another suffix; no such layer or head; too many tokens for a picture; no matplotlib.
            CheckpointError: the file cannot be written.
        """
        path = check_suffix(path)
        if path.suffix == ".html":
            content = self.to_html(layer, head).encode("utf-8")
        else:
            content = png(attention_figure(self, layer, head, font=font))
        with replacing(path.parent) as write:
            write(path.name, lambda place: place.write_bytes(content))

    def _repr_html_(self) -> str:
        # A frame of its own, so that the page's script and style stay apart from the notebook's.
        return f'<iframe srcdoc="{escape(self.to_html())}" style="width:100%;height:60em;border:0"></iframe>'


def read_attention(
    model: BertPreTrainedModel | str | os.PathLike[str] | None,
    text: str,
    tokenizer: Tokenizer | None = None,
    *,
    title: str | None = None,
    **options: Any,
) -> Attention:
    """The attention weights of a model for a text, as they are: by the explicit attention, in float32.

    Args:
        model: a model of any head; or a directory or name on the Hub, of which the encoder is read; None for the model
            that comes with the package.
        text: is tokenised as `TokenClassifier` does, by words or, if the model was trained so, by characters.
        tokenizer: of a model that is given as an object.
        title: default the checkpoint's name.
        options: as for `BertModel.from_pretrained`, if a name is given.

    Raises:
        DataError: the text has more tokens than the model reads at once, or holds half of a surrogate pair.
        CheckpointError: the checkpoint cannot be loaded.
        MinibertError: a model as an object without its tokeniser.
    """
    if isinstance(model, BertPreTrainedModel):
        if tokenizer is None:
            raise MinibertError("tokenizer: expected the model's tokeniser beside a model, got None")
        encoder = model
    else:
        name = DEFAULT_MODEL if model is None else model
        where = {name: options[name] for name in SOURCE_OPTIONS if name in options}
        source = Source(os.fspath(name), **where)
        options = {"dtype": torch.float32, **options, "output_loading_info": True}  # the pooler may be missing
        with source.unchanged():
            encoder, _ = BertModel.from_pretrained(name, **options)
            tokenizer = tokenizer or load_tokenizer(source)
        title = title or f"Attention of {Path(name).name}"
    ids, tokens = _labelled(tokenizer, text, encoder.config.extra.get("split_mode", "text"))
    longest = encoder.config.max_position_embeddings
    if len(ids) > longest:
        raise DataError(f"a text of {len(ids)} tokens is longer than max_position_embeddings {longest}; shorten it")
    return Attention(tokens, _weights(encoder, ids), title or f"Attention of {type(encoder).__name__}")


def _weights(model: BertPreTrainedModel, ids: Sequence[int]) -> Floats:
    encoder = model if isinstance(model, BertModel) else model.get_submodule(model.base_model_prefix)
    was_training = encoder.training
    encoder.eval()
    try:
        with torch.inference_mode():
            output = encoder(torch.tensor([ids], device=model.device), output_attentions=True, return_dict=True)
    finally:
        encoder.train(was_training)
    weights: Floats = torch.cat(output.attentions).float().cpu().numpy()  # (L, H, S, S), from L of (1, H, S, S)
    return weights


def _labelled(tokenizer: Tokenizer, text: str, split_mode: str) -> tuple[list[int], list[str]]:
    """Ids with the special tokens around them, and what to call each; an unknown token has its text beside it."""
    (tokens,) = tokenize(tokenizer, [text], split_mode)
    first, *rest = tokenizer.encode("").ids
    unknown = {tokenizer.token_to_id(name) for name in ("[UNK]", getattr(tokenizer.model, "unk_token", None)) if name}
    labels = [
        f"{text[start:end]} [UNK]" if number in unknown else str(tokenizer.id_to_token(number))
        for number, start, end in zip(tokens.ids.tolist(), tokens.starts, tokens.ends, strict=True)
    ]
    around = [str(tokenizer.id_to_token(number)) for number in (first, *rest)]
    return [first, *tokens.ids.tolist(), *rest], [around[0], *labels, *around[1:]]


def check_suffix(path: str | os.PathLike[str]) -> Path:
    """The path, if its suffix says what to write.

    Raises:
        MinibertError: it does not.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise MinibertError(f"{path}: expected a name that ends in {' or '.join(SUFFIXES)}")
    return path


def _check(name: str, value: int, count: int) -> None:
    if not 1 <= value <= count:
        raise MinibertError(f"{name}: expected 1 to {count}, got {value}")
