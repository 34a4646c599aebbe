"""Entities for a notebook and for a page."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from minibert import DataError, Entity, TokenClassifier
from minibert.visualize import Html, entities_html, entities_page

TEXT = "王小明住在<b>北京"
FOUND = [Entity("PER", 0, 3, "王小明", 0.9876), Entity("LOC", 8, 10, "北京", 0.5)]


class Parsed(HTMLParser):
    """The marks of a piece of HTML with their text, and its elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.titles: list[str | None] = []
        self.marks: list[str] = []
        self.smalls: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "hr"):
            self.open.append(tag)
        if tag == "mark":
            self.titles.append(dict(attrs).get("title"))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["mark"]:
            self.marks.append(data)
        if self.open[-1:] == ["small"]:
            self.smalls.append(data)
        elif self.open[-1:] in (["mark"], ["p"]):
            self.text += data


def test_entities_are_marked_with_type_score_and_place() -> None:
    html = entities_html(TEXT, FOUND)
    parsed = Parsed(html)
    assert parsed.marks == ["王小明", "北京", "PER", "LOC"]  # and the legend
    assert parsed.smalls == ["PER 0.988", "LOC 0.500"]
    assert parsed.titles == ["PER 0.988, 0-3", "LOC 0.500, 8-10", None, None]
    assert parsed.text == TEXT + "PER LOC"
    assert parsed.open == []
    assert "b" not in parsed.tags


def test_neither_an_entity_nor_its_type_can_break_out() -> None:
    html = entities_html(TEXT, [Entity('"><i>', 5, 8, "<b>", 0.5)])
    parsed = Parsed(html)
    assert parsed.marks == ["<b>", '"><i>']
    assert parsed.titles[0] == '"><i> 0.500, 5-8'
    assert {"b", "i"}.isdisjoint(parsed.tags)


def test_a_notebook_shows_it_and_a_string_is_a_string() -> None:
    html = entities_html(TEXT, FOUND)
    assert isinstance(html, Html)
    assert html._repr_html_() == str(html)
    assert type(html._repr_html_()) is str
    assert html.startswith('<div class="minibert" lang="zh">')
    assert ".minibert p {" in html  # its style reaches nothing but itself and marks
    assert "body {" not in html


def test_scores_can_be_left_out_and_are_not_invented() -> None:
    assert Parsed(entities_html(TEXT, FOUND, scores=False)).smalls == ["PER", "LOC"]
    parsed = Parsed(entities_html(TEXT, [{"label": "PER", "start": 0, "end": 3}, FOUND[1].to_dict()]))
    assert parsed.smalls == ["PER", "LOC 0.500"]
    assert parsed.titles[0] == "PER, 0-3"


def test_several_texts_share_their_colours_and_order_does_not_matter() -> None:
    html = entities_html([TEXT, "", "北京"], [FOUND[::-1], [], [Entity("LOC", 0, 2, "北京", 1.0)]])
    parsed = Parsed(html)
    assert parsed.marks == ["王小明", "北京", "北京", "PER", "LOC"]
    colours = [part.split('"')[0] for part in html.split('<mark style="background:')[1:]]
    assert colours[1] == colours[2] == colours[4] != colours[0]


def test_a_page_stands_alone() -> None:
    page = entities_page(TEXT, FOUND, title="<T>")
    assert page.startswith("<!DOCTYPE html>")
    assert page.endswith("</html>\n")
    assert "<title>&lt;T&gt;</title>" in page
    assert "http" not in page
    assert Parsed(page).smalls == ["PER 0.988", "LOC 0.500"]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([FOUND[0], Entity("LOC", 2, 4, "明住", 1.0)], "entity LOC at 2-4 overlaps another"),
        ([Entity("LOC", 8, 11, "北京", 1.0)], "entity LOC at 8-11 lies outside a text of 10"),
        ([Entity("LOC", 3, 3, "", 1.0)], "entity LOC at 3-3 lies outside"),
        ([{"label": "LOC", "start": -2, "end": 1}], "entity LOC at -2-1 lies outside"),
        ([Entity("LOC", 8, 10, "上海", 1.0)], "entity '上海' at 8-10 is not of the text"),
        ([{"label": "LOC", "start": 8}], "expected an entity with label, start and end, got"),
        (["LOC"], "expected an entity with label, start and end, got 'LOC'"),
    ],
)
def test_what_does_not_fit_the_text_is_an_error(found: list[Entity], message: str) -> None:
    with pytest.raises(DataError, match=message):
        entities_html(TEXT, found)


def test_as_many_lists_as_texts() -> None:
    with pytest.raises(DataError, match="a list for each of the 2 texts, got 1"):
        entities_html(["a", "b"], [[]])


def test_what_a_classifier_gives_can_be_shown() -> None:
    classifier = TokenClassifier.from_pretrained()
    text = "王小明毕业于江州大学计算机系。"
    found = classifier(text)
    parsed = Parsed(entities_html(text, found))
    assert parsed.marks[: len(found)] == [entity.text for entity in found]
    assert len(found) >= 2
