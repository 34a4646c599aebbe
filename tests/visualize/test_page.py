"""The attention page: whole by itself, safe, true to the weights, and alive in a browser if there is one."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minibert.visualize import Attention

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def attention_of(tokens: list[str], layers: int = 2, heads: int = 3, title: str = "T") -> Attention:
    weights = (2 * torch.randn(layers, heads, len(tokens), len(tokens))).softmax(-1).numpy()
    return Attention(tokens, weights, title)


class Page(HTMLParser):
    """The elements of a page, and the data within."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = [("", {})]
        self.texts: dict[str, str] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.elements[-1]
        self.texts.setdefault(attributes.get("id") or tag, data)

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.texts["data"])
        return found


def unpacked(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype)


def test_the_page_holds_every_weight_average_and_rollout() -> None:
    attention = attention_of(list("今天天气很好"), layers=3, heads=4)
    data = Page(attention.to_html(2, 3)).data
    assert data["tokens"] == list("今天天气很好")
    assert (data["layers"], data["columns"], data["layer"], data["column"]) == (3, 6, 2, 3)
    scales = unpacked(data["scales"], "<f4").reshape(3, 6, 6)
    steps = unpacked(data["steps"], "u1").reshape(3, 6, 6, 6)
    shown = scales[..., None] * steps / 255
    for column in range(4):
        assert (np.abs(shown[:, column] - attention.weights[:, column]) <= scales[:, column, :, None] / 509).all()
    for layer in range(3):
        assert np.abs(shown[layer, 4] - attention.head(layer + 1)).max() <= scales[layer, 4].max() / 509
        assert np.abs(shown[layer, 5] - attention.rollout()[layer]).max() <= scales[layer, 5].max() / 509


def test_the_page_fetches_nothing() -> None:
    page = attention_of(["a", "b"]).to_html()
    assert "http" not in page
    tags = [tag for tag, _ in Page(page).elements]
    assert {"link", "img", "iframe", "base"}.isdisjoint(tags)
    assert not any({"src", "href"} & attributes.keys() for _, attributes in Page(page).elements)
    assert tags.count("script") == 2
    assert "url(" not in page
    assert "import" not in page


def test_no_token_and_no_title_can_break_out() -> None:
    evil = ["</script><script>alert(1)</script>", "<!--", "a\u2028b\x07", '"', "\\", "{{title}}"]
    page = attention_of(evil, title="</title><b>{{data}}&amp;").to_html()
    parsed = Page(page)
    assert [tag for tag, _ in parsed.elements].count("script") == 2
    assert "b" not in [tag for tag, _ in parsed.elements]
    assert parsed.data["tokens"] == [evil[0], evil[1], r"a\u2028b\x07", *evil[3:]]
    assert parsed.texts["title"] == parsed.texts["h1"] == "</title><b>{{data}}&amp;"


def test_a_page_of_12_layers_12_heads_and_128_tokens_has_at_most_4_mb() -> None:
    weights = np.random.default_rng(0).random((12, 12, 128, 128), dtype=np.float32)  # noise is what packs worst
    page = Attention([str(n) for n in range(128)], weights / weights.sum(-1, keepdims=True)).to_html()
    assert 3_000_000 < len(page) < 4_000_000


def rendered(page: str, folder: Path) -> str:
    """The page's elements after its script has run."""
    assert BROWSER is not None
    (folder / "page.html").write_text(page, encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", f"file://{folder / 'page.html'}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    attention = attention_of(["[CLS]", *"abc", "</p>", "[SEP]"], layers=3, heads=2)
    shown = rendered(attention.to_html(3, 2), tmp_path)
    assert shown.count('<button title="layer ') == 3 * 4
    largest = attention.head(3, 2).max()
    assert f"Layer 3, head 2: largest weight {largest:.4f}" in shown
    assert f'title="layer 1, rollout up to here, largest weight {attention.rollout()[0].max():.3f}"' in shown
    first = re.search(r'title="\[CLS\] → a: ([\d.]+)"', shown)
    assert first is not None
    assert float(first[1]) == pytest.approx(attention.head(3, 2)[0, 1], abs=float(largest) / 509 + 5e-5)
    canvas = re.search(r'<canvas id="detail" width="(\d+)" height="(\d+)"', shown)
    assert canvas is not None
    assert int(canvas[1]) > 6 * 30
    assert '<p class="note" id="notice" hidden' in shown


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_browser_without_a_font_for_a_character_says_so(tmp_path: Path) -> None:
    shown = rendered(attention_of(["a", "\U0003fffd"]).to_html(), tmp_path)  # no font can have it
    assert "This browser has no font for 1 of the characters (U+3FFFD)" in shown
