"""Entities marked in their text, for a notebook or a page of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from minibert.errors import DataError
from minibert.formats import MARK_STYLE, Palette, html_head, html_legend, html_paragraph, html_tail
from minibert.text.decoding import Entity

Found = Sequence[Entity | Mapping[str, Any]]


class Html(str):
    """HTML that a notebook shows; everywhere else it is a string."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(self)


def entities_html(texts: str | Sequence[str], entities: Found | Sequence[Found], *, scores: bool = True) -> Html:
    """A text, or several, with the entities marked, each with its type and score, and a legend.

    Args:
        texts: a text or a list of them.
        entities: what a `TokenClassifier` gave for it or them, in any order; or mappings with `label`, `start`, `end`
            and perhaps `score`, as from `Entity.to_dict` or an annotator's file.
        scores: whether to show the scores. They are always in the title that appears where the pointer rests.

    Raises:
        DataError: an entity lies outside its text or overlaps another; or there are not as many lists as texts.
    """
    palette = Palette()
    body = "\n".join(_paragraphs(texts, entities, palette, scores))
    style = f"<style>\n.minibert p {{ white-space: pre-wrap; line-height: 2; }}\n{MARK_STYLE}</style>"
    return Html(f'<div class="minibert" lang="zh">\n{style}\n{body}\n{html_legend(palette)}\n</div>')


def entities_page(
    texts: str | Sequence[str], entities: Found | Sequence[Found], *, title: str = "Entities", scores: bool = True
) -> str:
    """The same as a page that needs nothing but itself; `minibert predict --format html` writes such a page."""
    palette = Palette()
    return "\n".join([html_head(title), *_paragraphs(texts, entities, palette, scores), html_tail(palette)]) + "\n"


def _paragraphs(
    texts: str | Sequence[str], entities: Found | Sequence[Found], palette: Palette, scores: bool
) -> Iterator[str]:
    pairs: Any = [(texts, entities)] if isinstance(texts, str) else None
    if pairs is None:
        if len(texts) != len(entities):
            raise DataError(f"entities: expected a list for each of the {len(texts)} texts, got {len(entities)}")
        pairs = zip(texts, entities, strict=True)
    for text, found in pairs:
        yield html_paragraph(text, _checked(text, found), palette, scores=scores)


def _checked(text: str, found: Found) -> list[Entity]:
    """Entities of the text, in its order."""
    entities = sorted((_entity(text, one) for one in found), key=lambda entity: (entity.start, entity.end))
    last = 0
    for entity in entities:
        if not last <= entity.start < entity.end <= len(text):
            problem = "overlaps another" if 0 <= entity.start < last else f"lies outside a text of {len(text)}"
            raise DataError(f"entity {entity.label} at {entity.start}-{entity.end} {problem}")
        if entity.text != text[entity.start : entity.end]:
            raise DataError(f"entity {entity.text!r} at {entity.start}-{entity.end} is not of the text {text[:60]!r}")
        last = entity.end
    return entities


def _entity(text: str, one: Entity | Mapping[str, Any]) -> Entity:
    if isinstance(one, Entity):
        return one
    try:
        start, end = int(one["start"]), int(one["end"])
        return Entity(str(one["label"]), start, end, text[start:end], float(one.get("score", math.nan)))
    except (KeyError, TypeError, ValueError):
        raise DataError(f"expected an entity with label, start and end, got {one!r}") from None
