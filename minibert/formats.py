"""Entities for people and programs: for a terminal, as JSON lines, as CoNLL columns, and as an HTML page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from wcwidth import wcswidth

from minibert.errors import printable
from minibert.text.decoding import Entity
from minibert.text.labels import Span, tags_from_spans

COLOURS = ("#ffd6a5", "#a0c4ff", "#caffbf", "#ffadad", "#bdb2ff", "#fdffb6", "#9bf6ff", "#ffc6ff", "#d0d0d0")
ANSI = (33, 34, 32, 31, 35, 36)
MARK_STYLE = """\
mark { padding: .1rem .2rem; border-radius: .2rem; color: #222; -webkit-box-decoration-break: clone; \
box-decoration-break: clone; }
mark small { font-size: .7em; margin-left: .3em; opacity: .75; white-space: nowrap; }
"""
STYLE = f"""\
body {{ font: 16px/2 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff; }}
p {{ white-space: pre-wrap; margin: .5rem 0; overflow-wrap: anywhere; }}
{MARK_STYLE}.note {{ color: #b00; font-size: .8em; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; padding: 0 1rem 0 0; border-bottom: 1px solid #ddd; }}
pre {{ font-size: .8em; line-height: 1.4; overflow-x: auto; }}
img {{ max-width: 100%; }}
"""


class Palette:
    """A colour for each type, in the order in which types are met."""

    def __init__(self, types: Iterable[str] = ()) -> None:
        self.numbers: dict[str, int] = {}
        for label in types:
            self.number(label)

    def number(self, label: str) -> int:
        """The type's number."""
        return self.numbers.setdefault(label, len(self.numbers))


def terminal_lines(text: str, entities: Sequence[Entity], palette: Palette, *, colour: bool) -> list[str]:
    """A text, and a line for each entity: its text, type, place and score, in columns of a terminal's cells."""
    pieces = []
    last = 0
    for entity in entities:
        pieces += [
            printable(text[last : entity.start]),
            _painted(printable(entity.text), entity.label, palette, colour),
        ]
        last = entity.end
    shown = [printable(entity.text) for entity in entities]
    width = max((cells(piece) for piece in shown), default=0)
    labels = [printable(entity.label) for entity in entities]
    label_width = max((cells(label) for label in labels), default=0)
    rows = [
        f"  {_painted(piece, entity.label, palette, colour)}{' ' * (width - cells(piece))}"
        f"  {label}{' ' * (label_width - cells(label))}"
        f"  {entity.start:>6}-{entity.end:<6}  {entity.score:.3f}"
        for piece, label, entity in zip(shown, labels, entities, strict=True)
    ]
    return ["".join(pieces) + printable(text[last:]), *rows]


def json_line(text: str, entities: Sequence[Entity], **more: Any) -> str:
    """One JSON object: text, entities, and whatever else is given."""
    return json.dumps({"text": text, "entities": [entity.to_dict() for entity in entities], **more}, ensure_ascii=False)


def conll_lines(text: str, entities: Sequence[Entity], scheme: str) -> list[str]:
    """A character and its tag a line, a tab between them. A line break in the text is an empty line."""
    tags = tags_from_spans([Span(entity.label, entity.start, entity.end) for entity in entities], len(text), scheme)
    return ["" if character in "\r\n" else f"{character}\t{tag}" for character, tag in zip(text, tags, strict=True)]


def html_head(title: str) -> str:
    """The beginning of a page that needs nothing but itself."""
    return (
        f'<!DOCTYPE html>\n<html lang="zh">\n<head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>\n{STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n"
    )


def html_paragraph(
    text: str, entities: Sequence[Entity], palette: Palette, note: str = "", *, scores: bool = False
) -> str:
    """A text with its entities marked; score and place appear where the pointer rests. One line.

    With `scores` they stand beside the types, too. A score that is NaN is none.
    """
    pieces = []
    last = 0
    for entity in entities:
        colour = COLOURS[palette.number(entity.label) % len(COLOURS)]
        label = _html(entity.label)
        score = "" if math.isnan(entity.score) else f" {entity.score:.3f}"
        pieces.append(
            f'{_html(text[last : entity.start])}<mark style="background:{colour}" title="{label}{score}, '
            f'{entity.start}-{entity.end}">{_html(entity.text)}<small>{label}{score * scores}</small></mark>'
        )
        last = entity.end
    said = f' <span class="note">{escape(note)}</span>' if note else ""
    return f"<p>{''.join(pieces)}{_html(text[last:])}{said}</p>"


def html_legend(palette: Palette) -> str:
    """The types in their colours."""
    marks = (
        f'<mark style="background:{COLOURS[number % len(COLOURS)]}">{_html(label)}</mark>'
        for label, number in palette.numbers.items()
    )
    return f"<p>{' '.join(marks)}</p>"


def html_tail(palette: Palette) -> str:
    """The legend and the end of the page."""
    return f"<hr>\n{html_legend(palette)}\n</body>\n</html>"


def _html(text: str) -> str:
    """Text in one line of HTML; characters that HTML cannot hold are shown by their number."""
    return "".join(
        f"&#{ord(c)};" if c in "\n\r\t" else c if c.isprintable() or c == "\u3000" or ord(c) > 159 else "&#xFFFD;"
        for c in escape(text)
    )


def cells(text: str) -> int:
    """How many cells of a terminal a printable text takes; a Chinese character takes two."""
    width = wcswidth(text)
    return len(text) if width < 0 else width


def _painted(text: str, label: str, palette: Palette, colour: bool) -> str:
    code = ANSI[palette.number(label) % len(ANSI)]
    return f"\x1b[1;{code}m{text}\x1b[0m" if colour else text
