"""Entities for people and programs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from minibert import Entity
from minibert.formats import (
    Palette,
    cells,
    conll_lines,
    html_head,
    html_paragraph,
    html_tail,
    json_line,
    terminal_lines,
)


def entity(text: str, label: str, start: int, end: int, score: float = 0.5) -> Entity:
    return Entity(label, start, end, text[start:end], score)


TEXT = "王小明住在New York。"
FOUND = [entity(TEXT, "PER", 0, 3, 0.987654), entity(TEXT, "地点", 5, 13)]


def test_columns_are_aligned_for_wide_characters() -> None:
    lines = terminal_lines(TEXT, FOUND, Palette(), colour=False)
    assert lines[0] == TEXT
    assert lines[1:] == [
        "  王小明    PER        0-3       0.988",
        "  New York  地点       5-13      0.500",
    ]
    assert len({cells(line) for line in lines[1:]}) == 1


def test_colours_are_for_terminals() -> None:
    lines = terminal_lines(TEXT, FOUND, Palette(), colour=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(lines)) == "\n".join(
        terminal_lines(TEXT, FOUND, Palette(), colour=False)
    )
    assert lines[0].startswith("\x1b[1;33m王小明\x1b[0m住在\x1b[1;34mNew York")


def test_a_text_cannot_speak_to_the_terminal() -> None:
    text = "a\x1b[31m\u202e\n\u3000b\x07"
    shown = "\n".join(terminal_lines(text, [entity(text, "X\x1b[2J", 1, 8)], Palette(), colour=False))
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", shown)
    assert r"a\x1b[31m\u202e\n" in shown


def test_a_json_line_is_one_line_of_plain_json() -> None:
    text = '张三\n"\u2028'
    line = json_line(text, [entity(text, "PER", 0, 2)], line=3)
    assert "张三" in line
    assert "\n" not in line
    assert json.loads(line) == {
        "text": text,
        "entities": [{"label": "PER", "start": 0, "end": 2, "text": "张三", "score": 0.5}],
        "line": 3,
    }


@pytest.mark.parametrize(("scheme", "tags"), [("BIO", "B I O B I"), ("BMES", "B E O B E"), ("IO", "I I O I I")])
def test_conll_has_every_character(scheme: str, tags: str) -> None:
    text = "张三 北京"
    lines = conll_lines(text, [entity(text, "P", 0, 2), entity(text, "L", 3, 5)], scheme)
    assert [line[0] for line in lines] == list(text)
    assert [line[2] for line in lines] == tags.split()
    assert conll_lines("a\nb", [], "BIO") == ["a\tO", "", "b\tO"]


class Page(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.marks, self.tags = "", [], []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "mark":
            self.marks.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        if tag == "small":
            self.tags.append("/small")

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] not in (["small"], ["style"]):
            self.text += data


def test_a_page_stands_alone_and_runs_nothing() -> None:
    text = "<script>alert(1)</script>&amp; 张三\n\x00 'x\""
    palette = Palette()
    place = text.index("张")
    body = html_paragraph(text, [entity(text, '"><b>', place, place + 2, 0.75)], palette, "a <note>")
    page = html_head("<T>") + body + html_tail(palette)
    assert "\n" not in body
    parsed = Page(page)
    assert {"script", "b", "link", "img", "note"}.isdisjoint(parsed.tags)
    assert "http" not in page
    assert parsed.marks[0]["title"] == f'"><b> 0.750, {place}-{place + 2}'
    assert "<script>alert(1)</script>&amp; 张三\n" in parsed.text
    assert len(parsed.marks) == 2  # the entity and its legend
