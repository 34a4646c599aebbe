"""Labelled sentences from templates and lists, for the default model. The same seed gives the same sentences.

A template is a sentence with slots: `{NAME}现任{ORG:company}{TITLE:company}。` Those in capitals are entities;
`words.py` says what fills them. The name of a file of templates is their style.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from default_model.words import Words, read_lists
from minibert.text.labels import Span

HERE = Path(__file__).parent
SLOT = re.compile(r"\{([A-Za-z]+)(?::([a-z]+))?\}")
STYLES = {  # in a hundred and some texts
    "cv": 30, "news": 17, "notice": 9, "chat": 10, "everyday": 13, "list": 5, "plain": 10, "short": 9, "words": 7,
}  # fmt: skip
# Lists of words that are no entities.
COMMON = ("common_nouns", "common_abstract", "common_verbs", "common_adjectives")
COMMON += ("verbs", "objects", "feelings", "near_misses", "things", "activities", "foods", "animals")


@dataclass(frozen=True)
class Text:
    """A sentence and the entities among its characters."""

    text: str
    spans: tuple[Span, ...]

    def __add__(self, other: Text) -> Text:
        shift = len(self.text)
        moved = (Span(label, start + shift, end + shift) for label, start, end in other.spans)
        return Text(self.text + other.text, (*self.spans, *moved))


def read_templates(folder: Path) -> dict[str, list[str]]:
    """The templates of a folder by style: one a line of `style.txt`; a line that begins with # is a comment."""
    styles = {}
    for path in sorted(folder.glob("*.txt")):
        lines = path.read_text(encoding="utf-8").splitlines()
        styles[path.stem] = list(dict.fromkeys(line for line in lines if line.strip() and not line.startswith("#")))
    return styles


class Generator:
    """Fills templates.

    Args:
        kind: "training" or "heldout", the folder of lists and templates. Lists that the held-out folder lacks are of
            the kind that is soon complete (surnames, countries, endings of schools); the training ones serve for them.
        seed: of all that is drawn.
        novelty: how often a part of a name is drawn from all characters instead of the lists; and, less often, a
            sentence gets a word that its template does not have.
    """

    def __init__(self, kind: str, seed: int, novelty: float) -> None:
        self.random = random.Random(seed)  # noqa: S311
        self.templates = read_templates(HERE / kind)
        lists = read_lists(HERE / "training" / "lists") | read_lists(HERE / kind / "lists")
        self.words = Words(lists, self.random, novelty)

    def sentences(self, number: int) -> Iterator[Text]:
        """So many texts of one to four sentences, of all styles."""
        styles = [*self.templates, *(["words"] if self.words.novelty else [])]
        for _ in range(number):
            (style,) = self.random.choices(styles, [STYLES[style] for style in styles])
            (parts,) = self.random.choices((1, 2, 3, 4), (70, 18, 8, 4) if style != "cv" else (50, 25, 15, 10))
            text = self._sentence(style)
            for _ in range(parts - 1):
                if text.text[-1] not in "。！？!?；;.…":
                    text += Text(self.random.choice("。。，； \n"), ())
                text += self._sentence(style)
            yield self._typed(self._loosened(text) if self.words.maybe(self.words.novelty) else text)

    def _sentence(self, style: str) -> Text:
        return self._strung() if style == "words" else self.fill(self.random.choice(self.templates[style]))

    def _strung(self) -> Text:
        """Ordinary words in no order, sometimes with an entity among them: what is no name here is none anywhere."""
        result = Text("", ())
        for _ in range(self.random.randint(3, 9)):
            result += Text(self.words.any(*COMMON), ())
            if self.words.maybe(0.3):
                result += Text(self.random.choice("，，、。的了和在是也 "), ())
            if self.words.maybe(0.15):
                kind = self.random.choice(("NAME", "NAME", "LOC", "ORG", "TITLE"))
                result += self.fill("{" + kind + "}")
        return result

    def fill(self, template: str) -> Text:
        """A template with its slots filled."""
        result, last = Text("", ()), 0
        for slot in SLOT.finditer(template):
            result += Text(template[last : slot.start()], ())
            filled = self.words.slot(slot[1], slot[2] or "")
            result += Text(filled, (Span(slot[1], 0, len(filled)),) if slot[1].isupper() else ())
            last = slot.end()
        return result + Text(template[last:], ())

    def _loosened(self, text: Text) -> Text:
        """With a word before or behind an entity that no template has there, so that its edge is not known by heart."""
        place = self.random.choice([span.start for span in text.spans] + [span.end for span in text.spans] or [0])
        if sum(place in (span.start, span.end) for span in text.spans) > 1:  # between two that touch
            return text
        word = self.words.any(*COMMON)
        before = tuple(span for span in text.spans if span.end <= place)
        behind = tuple(Span(label, start - place, end - place) for label, start, end in text.spans if start >= place)
        return Text(text.text[:place] + word, before) + Text(text.text[place:], behind)

    def _typed(self, text: Text) -> Text:
        """As people type it: half-width punctuation, other quotes, no full stop, a character that no vocabulary has."""
        maybe = self.words.maybe
        characters = list(text.text)
        if maybe(0.12):
            widths = dict(zip("，。：；（）？！", ",.:;()?!", strict=True))
            characters = [widths.get(c, c) for c in characters]
        if maybe(0.3):
            quotes = {"“": '"', "”": '"'}
            characters = [quotes.get(c, c) for c in characters]
        if maybe(0.05):
            wide = {chr(code): chr(code + 0xFEE0) for code in (*range(48, 58), *range(65, 91), *range(97, 123))}
            characters = [wide.get(c, c) for c in characters]
        inside = {place for span in text.spans for place in range(span.start, span.end)}
        if maybe(0.1):
            place = self.random.randrange(len(characters))
            if place not in inside or maybe(0.5):
                characters[place] = "\U00020000"  # a rare one, which no small vocabulary has
        if maybe(0.25) and characters[-1] in "。." and len(characters) - 1 not in inside:
            characters.pop()
        return Text("".join(characters), text.spans)
