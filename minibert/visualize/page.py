"""Attention as a page: every layer and head at a glance, any of them in detail, nothing fetched from anywhere.

L layers, K columns (the heads, their average, rollout), S tokens.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from minibert.errors import printable
from minibert.text.labels import Floats

TEMPLATE = Path(__file__).with_name("attention.html")


def attention_page(title: str, tokens: Sequence[str], matrices: Floats, chosen: tuple[int, int]) -> str:
    """The page for matrices (L, K, S, S) whose last two columns are the heads' average and rollout.

    A weight is kept as a byte, in steps of a 255th of the largest in its row, so it is right within a 510th of that.

    Args:
        chosen: layer and column, counted from 1, that are shown in detail at first.
    """
    scales = matrices.max(-1)  # (L, K, S)
    steps = np.rint(matrices / np.maximum(scales, np.finfo(np.float32).tiny)[..., None] * 255).astype(np.uint8)
    data = {
        "tokens": [printable(token) for token in tokens],
        "layers": matrices.shape[0],
        "columns": matrices.shape[1],
        "layer": chosen[0],
        "column": chosen[1],
        "scales": _packed(scales.astype("<f4").tobytes()),
        "steps": _packed(steps.tobytes()),
    }
    parts = {"title": escape(printable(title)), "data": _json(data)}
    # In one pass, so that a title cannot ask for more.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], TEMPLATE.read_text(encoding="utf-8"))


def _packed(content: bytes) -> str:
    """Bytes as a page can hold them; browsers have had `DecompressionStream` for zlib's format since 2023."""
    return base64.b64encode(zlib.compress(content, 9)).decode()


def _json(data: dict[str, object]) -> str:
    """JSON that no token can break out of: within a script element only "<" could."""
    return json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
