"""Figures as a person sees them: right numbers, nothing cut, labels that can be read, no boxes."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from minibert import MinibertError
from minibert.visualize import Attention, attention_figure, head_figure, overview_figure, rollout_figure
from minibert.visualize.figures import png
from minibert.visualize.fonts import DEFAULT, fonts_for


def attention_of(tokens: list[str], layers: int = 2, heads: int = 3, title: str = "T") -> Attention:
    weights = (2 * torch.randn(layers, heads, len(tokens), len(tokens))).softmax(-1).numpy()
    return Attention(tokens, weights, title)


def drawn(figure: Figure) -> Any:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas.get_renderer()


def write_font(path: Path, characters: str, family: str = "Test Han") -> str:
    """A font with a square for each character."""
    names = [f"u{ord(c):X}" for c in characters]
    pen = TTGlyphPen(None)
    for place, draw in enumerate(((100, 0), (900, 0), (900, 800), (100, 800))):
        (pen.lineTo if place else pen.moveTo)(draw)
    pen.closePath()
    square = pen.glyph()
    builder = FontBuilder(1000)
    builder.setupGlyphOrder([".notdef", *names])
    builder.setupCharacterMap({ord(c): name for c, name in zip(characters, names, strict=True)})
    builder.setupGlyf(dict.fromkeys([".notdef", *names], square))
    builder.setupHorizontalMetrics(dict.fromkeys([".notdef", *names], (1000, 100)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": family, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)
    return str(path)


@pytest.fixture
def no_fonts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A machine with matplotlib's own fonts only; what is put into the list are files that its system has, too."""
    own = Path(font_manager.__file__).parent / "mpl-data"
    entries = [entry for entry in font_manager.fontManager.ttflist if Path(entry.fname).is_relative_to(own)]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", entries)
    files: list[str] = []
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: files)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    font_manager.fontManager._findfont_cached.cache_clear()
    yield files
    font_manager.fontManager._findfont_cached.cache_clear()


HAN = "今天气很好北京上海医院"


def texts_of(figure: Figure) -> list[Any]:
    labels = [label for axes in figure.axes for label in (*axes.get_xticklabels(), *axes.get_yticklabels())]
    titles = [part for axes in figure.axes for part in (axes.title, axes.xaxis.label, axes.yaxis.label)]
    return [text for text in (*labels, *titles, *figure.texts) if text.get_text()]


@pytest.mark.parametrize("size", [3, 40, 128])
def test_nothing_is_cut_at_12_layers_and_12_heads(size: int, tmp_path: Path) -> None:
    tokens = [f"一二三四五六 [UNK] {n}" if n % 10 == 5 else HAN[n % len(HAN)] for n in range(size)]
    font = write_font(tmp_path / "font.ttf", "".join(sorted({*HAN, *"一二三四五六"})))
    figure = attention_figure(attention_of(tokens, 12, 12, "北京"), 12, 12, font=font)
    renderer = drawn(figure)
    whole = figure.bbox
    texts = texts_of(figure)
    assert len(texts) >= 6 * size + 26
    for text in texts:
        box = text.get_window_extent(renderer)
        assert box.x0 >= whole.x0 - 1, text
        assert box.x1 <= whole.x1 + 1, text
        assert box.y0 >= whole.y0 - 1, text
        assert box.y1 <= whole.y1 + 1, text
    panels = [axes.get_tightbbox(renderer) for axes in figure.axes]  # and the colour scales
    heading = figure.texts[0].get_window_extent(renderer)
    for one, other in itertools.combinations([*panels, heading], 2):
        assert not one.padded(-1).overlaps(other)


@pytest.mark.parametrize("size", [3, 40, 128, 256])
def test_labels_can_be_read_and_do_not_touch(size: int, tmp_path: Path) -> None:
    font = write_font(tmp_path / "font.ttf", HAN)
    figure = head_figure(attention_of([HAN[n % len(HAN)] for n in range(size)], 1, 1), 1, 1, font=font)
    renderer = drawn(figure)
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [HAN[n % len(HAN)] for n in range(size)]
    for labels, low, high in ((axes.get_xticklabels(), "x0", "x1"), (axes.get_yticklabels()[::-1], "y0", "y1")):
        assert all(label.get_fontsize() >= 8 for label in labels)
        boxes = [label.get_window_extent(renderer) for label in labels]
        for one, other in itertools.pairwise(boxes):
            assert getattr(one, high) <= getattr(other, low) + 0.5


def test_single_characters_stand_upright_and_longer_tokens_on_end() -> None:
    figure = head_figure(attention_of(["[CLS]", "a", "##b"], 1, 1))
    assert [label.get_rotation() for label in figure.axes[0].get_xticklabels()] == [90, 0, 90]


def test_figures_show_the_numbers() -> None:
    attention = attention_of(list("abcd"), 2, 3)
    for figure, matrix, title in (
        (head_figure(attention, 2, 3), attention.weights[1, 2], "layer 2, head 3"),
        (head_figure(attention, 2), attention.weights[1].mean(0), "layer 2, average of the heads"),
        (rollout_figure(attention), attention.rollout()[1], "rollout of layers 1 to 2"),
        (rollout_figure(attention, 1), attention.rollout()[0], "rollout of layer 1"),
    ):
        assert np.array_equal(figure.axes[0].images[0].get_array(), matrix)
        assert figure.axes[0].get_title() == title


def test_the_overview_has_a_tile_for_every_head_then_average_and_rollout() -> None:
    attention = attention_of(list("abcd"), 2, 3)
    axes = overview_figure(attention).axes[0]
    image = np.asarray(axes.images[0].get_array())
    assert image.shape == (2 * 5 - 1, 5 * 5 - 1)
    for layer in range(2):
        matrices = [*attention.weights[layer], attention.head(layer + 1), attention.rollout()[layer]]
        for column, matrix in enumerate(matrices):
            tile = image[5 * layer : 5 * layer + 4, 5 * column : 5 * column + 4]
            np.testing.assert_allclose(tile, matrix / matrix.max(), rtol=1e-6)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "3", "average", "rollout"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "2"]
    assert axes.get_xticks().tolist() == [1.5, 6.5, 11.5, 16.5, 21.5]


def test_a_dollar_is_a_token_like_any_other() -> None:
    figure = attention_figure(attention_of(["$x$", "$\\frac$", "\x1b[2J"], 1, 1, title="$\\nothing$"))
    assert png(figure).startswith(b"\x89PNG")
    assert [label.get_text() for label in figure.axes[1].get_yticklabels()] == ["$x$", "$\\frac$", "\\x1b[2J"]


def test_too_many_tokens_and_what_is_not_there_are_refused() -> None:
    long = attention_of(["a"] * 257, 1, 1)
    for draw in (overview_figure, head_figure, rollout_figure, attention_figure):
        with pytest.raises(MinibertError, match="room for 256 tokens, got 257; shorten the text, or write a page"):
            draw(long)
    with pytest.raises(MinibertError, match="head: expected 1 to 1, got 2"):
        head_figure(long, 1, 2)
    with pytest.raises(MinibertError, match="layer: expected 1 to 1, got 2"):
        rollout_figure(long, 2)


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MinibertError, match=r"pip install 'minibert\[viz\]'; a page \(.html\) does not"):
        attention_figure(attention_of(["a"], 1, 1))


@pytest.mark.usefixtures("no_fonts")
def test_a_named_font_is_taken(tmp_path: Path) -> None:
    fonts = fonts_for("北a", write_font(tmp_path / "font.ttf", HAN))
    assert fonts.families == ("Test Han", DEFAULT)
    assert (fonts.missing, fonts.notice) == (frozenset(), "")
    assert fonts_for("京", "Test Han").families[0] == "Test Han"
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    for wrong, message in (("No Such Font", "font: expected a font file or the name of an installed family"),
                           (str(tmp_path / "broken.ttf"), "is not a font file")):  # fmt: skip
        with pytest.raises(MinibertError, match=message):
            fonts_for("北", wrong)


def test_a_font_that_came_to_the_system_later_is_found(tmp_path: Path, no_fonts: list[str]) -> None:
    assert fonts_for("北京").missing == {"北", "京"}
    no_fonts.append(str(tmp_path / "broken.ttf"))
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    no_fonts.append(write_font(tmp_path / "odd.ttf", "北", "Odd Font"))
    assert fonts_for("北京").families == ("Odd Font", DEFAULT)
    no_fonts.append(write_font(tmp_path / "font.ttf", HAN, "Noto Sans CJK SC"))
    fonts = fonts_for("北京a")
    assert fonts.families == (DEFAULT, "Noto Sans CJK SC")  # a known one comes before an odd one
    assert not fonts.missing


def test_without_a_font_there_are_code_points_and_a_notice_and_never_boxes(
    no_fonts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert no_fonts == []
    attention = attention_of(["[CLS]", "北", "京a", "\U00020bb7"], 1, 1, title="上")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as matplotlib says of a box that it draws
        figure = attention_figure(attention)
        png(figure)
    assert [label.get_text() for label in figure.axes[1].get_yticklabels()] == ["[CLS]", "U+5317", "U+4EACa", "U+20BB7"]
    said = "no font here has 4 of the characters, shown by their code points (U+4E0A U+4EAC U+5317 U+20BB7)"
    assert figure.get_suptitle() == f"U+4E0A\n{said}"
    assert said in caplog.text
    assert "install one, such as Noto Sans CJK" in caplog.text
    assert "no font here has 3 of the characters" in head_figure(attention).axes[0].get_title()


def test_latin_text_needs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: pytest.fail("looked for fonts"))
    assert fonts_for("[CLS] Ünïcode ##16").families == (DEFAULT,)
