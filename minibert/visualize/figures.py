"""Attention as matplotlib figures, which `minibert[viz]` brings. Nothing here touches pyplot's state.

S tokens. In every matrix a row is the token that looks and a column the token that is looked at.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minibert.errors import MinibertError, printable
from minibert.text.labels import Floats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from minibert.visualize.attention import Attention
    from minibert.visualize.fonts import Fonts

LARGEST = 256  # tokens; beyond, a picture in which each can be read has more than 80 million pixels
DPI = 100
FONT_SIZES = (8.0, 12.0)  # points, the smallest and the largest
PITCH = 0.15  # inches from one token to the next, in which a Chinese character of the smallest size stands upright
SMALLEST = 7.0  # inches of a panel
COLOURS = "Blues"


def overview_figure(attention: Attention) -> Figure:
    """Every layer (rows) and head (columns), then each layer's average and rollout, each to its own largest weight."""
    figure = _figure(1, len(attention.tokens))
    _draw_overview(figure.subplots(), attention)
    return figure


def head_figure(attention: Attention, layer: int = 1, head: int | None = None, *, font: str | None = None) -> Figure:
    """One head with its tokens; without `head`, the average over the heads of the layer.

    Args:
        layer, head: counted from 1.
        font: a font file, or the name of an installed family; default one that is found to have the characters. A
            character that no font has is shown by its code point, never as a box, and a notice says so.

    Raises:
        MinibertError: no such layer, head or font; more than 256 tokens; or no matplotlib.
    """
    return _matrix_figure(attention.head(layer, head), attention.tokens, _head_name(layer, head), font)


def rollout_figure(attention: Attention, layer: int | None = None, *, font: str | None = None) -> Figure:
    """Attention rollout up to a layer, default the last; `font` and errors as in `head_figure`."""
    layer = attention.num_layers if layer is None else layer
    attention.head(layer)  # refuses what is not there
    return _matrix_figure(attention.rollout()[layer - 1], attention.tokens, _rollout_name(layer), font)


def attention_figure(attention: Attention, layer: int = 1, head: int = 1, *, font: str | None = None) -> Figure:
    """Everything in one: the overview, a head in detail, the average of its layer, and the rollout of all layers."""
    figure = _figure(2, len(attention.tokens))  # which needs matplotlib, as the fonts do
    from minibert.visualize.fonts import fonts_for

    panels = (
        (attention.head(layer, head), _head_name(layer, head)),
        (attention.head(layer), _head_name(layer, None)),
        (attention.rollout()[-1], _rollout_name(attention.num_layers)),
    )
    (first, *rest) = figure.subplots(2, 2).flat
    _draw_overview(first, attention)
    *labels, title = [printable(text) for text in (*attention.tokens, attention.title)]
    fonts = fonts_for("".join((*labels, title)), font)
    for axes, (matrix, name) in zip(rest, panels, strict=True):
        _draw_matrix(axes, matrix, labels, fonts, name)
    heading = "\n".join(filter(None, (fonts.label(title), fonts.notice)))
    size = 1.3 * _title_size(len(labels))
    figure.suptitle(heading, fontsize=size, fontfamily=fonts.families, parse_math=False)
    return figure


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _matrix_figure(matrix: Floats, tokens: Sequence[str], name: str, font: str | None) -> Figure:
    figure = _figure(1, len(tokens))
    from minibert.visualize.fonts import fonts_for

    labels = [printable(token) for token in tokens]
    fonts = fonts_for("".join(labels), font)
    _draw_matrix(figure.subplots(), matrix, labels, fonts, "\n".join(filter(None, (name, fonts.notice))))
    return figure


def _figure(panels: int, num_tokens: int) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MinibertError(
            "a picture needs matplotlib: pip install 'minibert[viz]'; a page (.html) does not"
        ) from None
    if num_tokens > LARGEST:
        raise MinibertError(
            f"a picture has room for {LARGEST} tokens, got {num_tokens}; shorten the text, or write a page (.html)"
        )
    side = panels * _side(num_tokens)
    return Figure(figsize=(side, side), dpi=DPI, layout="constrained")


def _side(num_tokens: int) -> float:
    """Inches of a panel."""
    return max(SMALLEST, PITCH * num_tokens + 1.5)


def _title_size(num_tokens: int) -> float:
    """Points: a large picture is seen from further away."""
    return max(11.0, 0.9 * _side(num_tokens))


def _head_name(layer: int, head: int | None) -> str:
    return f"layer {layer}, {'average of the heads' if head is None else f'head {head}'}"


def _rollout_name(layer: int) -> str:
    return f"rollout of layers 1 to {layer}" if layer > 1 else "rollout of layer 1"


def _draw_overview(axes: Any, attention: Attention) -> None:
    """All matrices as tiles of one image: hundreds of axes would take matplotlib minutes."""
    matrices = np.concatenate(
        [attention.weights, attention.weights.mean(1, keepdims=True), attention.rollout()[:, None]], axis=1
    )
    rows, columns, size, _ = matrices.shape
    gap = max(1, size // 16)
    step = size + gap
    image = np.full((rows * step - gap, columns * step - gap), np.nan, dtype=np.float32)
    for row, column in np.ndindex(rows, columns):
        tile = matrices[row, column]
        image[row * step : row * step + size, column * step : column * step + size] = tile / tile.max()
    axes.imshow(image, cmap=COLOURS, vmin=0, vmax=1)
    names = [*map(str, range(1, attention.num_heads + 1)), "average", "rollout"]
    middle = (size - 1) / 2
    axes.xaxis.set_ticks([column * step + middle for column in range(columns)], names)
    axes.yaxis.set_ticks([row * step + middle for row in range(rows)], [str(row + 1) for row in range(rows)])
    font_size = _title_size(size)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=font_size)
    for label in axes.get_xticklabels()[-2:]:
        label.set_rotation(90)
    axes.set_xlabel("head", fontsize=font_size)
    axes.xaxis.set_label_position("top")
    axes.set_ylabel("layer", fontsize=font_size)
    axes.set_frame_on(False)
    axes.set_title("every layer and head, each to its own largest weight", fontsize=font_size)


def _draw_matrix(axes: Any, matrix: Floats, labels: Sequence[str], fonts: Fonts, name: str) -> None:
    image = axes.imshow(matrix, cmap=COLOURS, vmin=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(range(len(labels)), [fonts.label(label) for label in labels])
    axes.xaxis.tick_top()
    pitch = 72 * _side(len(labels)) / (len(labels) + 10)  # points, about
    axes.tick_params(length=0, labelsize=float(np.clip(0.6 * pitch, *FONT_SIZES)))
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_fontfamily(fonts.families)
        label.set_parse_math(False)  # a "$" is a token like any other
    for label in axes.get_xticklabels():
        label.set_rotation(0 if len(label.get_text()) == 1 else 90)
    font_size = _title_size(len(labels))
    axes.set_xlabel("looked at", fontsize=font_size)
    axes.xaxis.set_label_position("top")
    axes.set_ylabel("looking", fontsize=font_size)
    axes.set_title(name, fontsize=font_size)
    axes.figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01)
