"""Labelled sentences from templates and lists, for the default model. The same seed gives the same sentences.

A template is a sentence with slots: `{NAME}现任{ORG:company}{TITLE:company}。` Those in capitals are entities. What
fills them is put together from the lists, so that few names are met twice; now and then parts are drawn from all
characters in use, because no list has every name there is.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tomllib

from minibert.text.labels import Span

HERE = Path(__file__).parent
SLOT = re.compile(r"\{([A-Za-z]+)(?::([a-z]+))?\}")
DIGITS = "〇一二三四五六七八九"
SHORT_TITLES = [
    "总",
    "老师",
    "医生",
    "局长",
    "经理",
    "主任",
    "教授",
    "师傅",
    "校长",
    "律师",
    "警官",
    "教练",
]  # behind a surname


def common_characters() -> list[str]:
    """The 6,763 characters of GB 2312, the most frequent 3,755 first."""
    rows = [bytes((0xA0 + row, 0xA0 + cell)) for row in range(16, 88) for cell in range(1, 95)]
    return [character for code in rows if (character := code.decode("gb2312", "ignore"))]


@dataclass(frozen=True)
class Text:
    """A sentence and the entities among its characters."""

    text: str
    spans: tuple[Span, ...]

    def __add__(self, other: Text) -> Text:
        shift = len(self.text)
        moved = (Span(label, start + shift, end + shift) for label, start, end in other.spans)
        return Text(self.text + other.text, (*self.spans, *moved))


class Generator:
    """Fills templates.

    Args:
        lists: a TOML file of lists.
        templates: a file with a style, a tab and a template a line.
        seed: of all that is drawn.
        novelty: how often a part of a name is drawn from all characters instead of the lists.
    """

    def __init__(self, lists: Path, templates: Path, seed: int, novelty: float) -> None:
        self.lists: dict[str, list[str]] = tomllib.loads(lists.read_text(encoding="utf-8"))
        lines = templates.read_text(encoding="utf-8").splitlines()
        pairs = [line.split("\t", 1) for line in lines if line.strip() and not line.startswith("#")]
        self.templates: dict[str, list[str]] = {}
        for style, template in pairs:
            self.templates.setdefault(style, []).append(template)
        self.random = random.Random(seed)  # noqa: S311
        self.novelty = novelty
        self.characters = common_characters()

    def sentences(self, number: int) -> Iterator[Text]:
        """So many texts of one to four sentences, of all styles."""
        styles = {"cv": 40, "news": 20, "notice": 8, "chat": 10, "everyday": 16, "list": 6}
        for _ in range(number):
            (style,) = self.random.choices(list(styles), list(styles.values()))
            (parts,) = self.random.choices((1, 2, 3, 4), (70, 18, 8, 4) if style != "cv" else (45, 25, 18, 12))
            text = self.fill(self.random.choice(self.templates[style]))
            for _ in range(parts - 1):
                if text.text[-1] not in "。！？!?；;.…":
                    text += Text(self.random.choice("。。，； \n"), ())
                text += self.fill(self.random.choice(self.templates[style]))
            yield self._typed(text)

    def fill(self, template: str) -> Text:
        """A template with its slots filled."""
        result, last = Text("", ()), 0
        for slot in SLOT.finditer(template):
            result += Text(template[last : slot.start()], ())
            name, kind = slot[1], slot[2] or ""
            filled = self._entity(name, kind) if name.isupper() else self._plain(name)
            result += Text(filled, (Span(name, 0, len(filled)),) if name.isupper() else ())
            last = slot.end()
        return result + Text(template[last:], ())

    # Words.

    def _any(self, *keys: str) -> str:
        return self.random.choice(self.lists[self.random.choice(keys)])

    def _maybe(self, share: float) -> bool:
        return self.random.random() < share

    def _novel(self, low: int, high: int) -> str:
        """Some characters in use, the frequent ones more often."""
        size = self.random.randint(low, high)
        limit = 3755 if self._maybe(0.8) else len(self.characters)
        return "".join(self.random.choice(self.characters[:limit]) for _ in range(size))

    def _entity(self, name: str, kind: str) -> str:
        makers: dict[str, Callable[[str], str]] = {
            "NAME": self._name,
            "ORG": self._organisation,
            "LOC": self._location,
            "TITLE": self._title,
            "EDU": lambda _: self._any("degrees"),
            "CONT": lambda _: self._any("nationalities"),
            "PRO": lambda _: self._any("majors"),
            "RACE": lambda _: "汉族" if self._maybe(0.3) else self._any("races"),
        }
        return makers[name](kind)

    def _surname(self) -> str:
        if self._maybe(0.06):
            return self._any("double_surnames")
        return self._any("surnames")

    def _name(self, kind: str) -> str:
        if not kind:
            kind = "foreign" if self._maybe(0.06) else "nick" if self._maybe(0.03) else "full"
        if kind == "surname":
            return self._surname()
        if kind == "nick":
            return self._any("nickname_prefixes") + self._any("surnames")
        if kind == "foreign":
            return "·".join((self._any("foreign_given"), self._any("foreign_surnames")))
        if kind == "english":
            return f"{self._any('english_given')} {self._any('english_surnames')}"
        if self._maybe(self.novelty):
            return self._surname() + self._novel(1, 2)
        if self._maybe(0.35):
            return self._surname() + self._any("given_names")
        return self._surname() + "".join(self._any("given_characters") for _ in range(self.random.choice((1, 2, 2))))

    def _place(self) -> str:
        if self._maybe(self.novelty * 0.5):
            return self._novel(1, 2) + self.random.choice(("市", "县", "区", "镇", "省", "州", ""))
        return self._any("provinces", "cities", "cities", "districts")

    def _stem(self) -> str:
        return self._novel(2, 3) if self._maybe(self.novelty) else self._any("company_stems")

    def _company(self) -> str:
        where = self._place() if self._maybe(0.55) else ""
        bracket = f"（{self._any('cities', 'provinces')}）" if self._maybe(0.08) else ""
        industry = self._any("company_industries") if self._maybe(0.85) else ""
        return where + self._stem() + bracket + industry + self._any("company_suffixes")

    def _organisation(self, kind: str) -> str:
        place = self._place() if self._maybe(0.7) else ""
        if not kind:
            kinds = ("company", "short", "school", "government", "association", "hospital", "media")
            kind = self.random.choice(kinds)
        match kind:
            case "company":
                return self._company()
            case "companydept":
                first = (
                    self._company() if self._maybe(0.6) else self._any("company_short", "generic_orgs", "government")
                )
                return first + self._any("departments")
            case "short":
                stem = self._stem()
                return self._any("company_short") if self._maybe(0.7) else stem + self._any("company_industries")
            case "school":
                stem = self._novel(2, 2) if self._maybe(self.novelty * 0.4) else self._any("school_stems", "cities")
                return stem + self._any("school_suffixes")
            case "government" | "association" | "institute":
                key = {"government": "government", "association": "parties_groups", "institute": "institutes"}[kind]
                return place + self._any(key)
            case "hospital":
                return place + self._any("hospitals")
            case _:
                keys = {"generic": "generic_orgs", "department": "departments", "schoolshort": "school_short"}
                keys |= {
                    "media": "media",
                    "bank": "banks_funds",
                    "team": "military_police_sport",
                    "foreign": "foreign_orgs",
                }
                return self._any(keys[kind])

    def _location(self, kind: str) -> str:
        if not kind:
            kind = self.random.choice(
                ("city", "city", "province", "district", "country", "scenic", "foreigncity", "address")
            )
        if kind == "address":
            parts = [
                self._any("provinces"),
                self._any("cities"),
                self._any("districts"),
                self._any("towns"),
                self._road(),
            ]
            start = self.random.choice((0, 0, 1, 2))
            return "".join(parts[start : start + self.random.choice((2, 2, 3))])
        if kind == "road":
            return self._road()
        if kind in ("city", "district", "town") and self._maybe(self.novelty * 0.4):
            return self._novel(2, 2) + {"city": "市", "district": "区", "town": "镇"}[kind]
        keys = {"province": "provinces", "city": "cities", "district": "districts", "town": "towns"}
        keys |= {"country": "countries", "foreigncity": "foreign_cities", "scenic": "scenic", "region": "regions"}
        return self._any(keys[kind])

    def _road(self) -> str:
        return self._any("roads") + (f"{self.random.randint(1, 999)}号" if self._maybe(0.7) else "")

    def _title(self, kind: str) -> str:
        if kind == "short":
            return self.random.choice(
                ("总", "老师", "医生", "局长", "经理", "主任", "教授", "师傅", "校长", "律师", "警官", "教练")
            )
        if not kind:
            kind = self.random.choice(("company", "academic", "rank", "government", "everyday"))
        return self._any(f"titles_{kind}")

    def _plain(self, name: str) -> str:
        draw = self.random
        year, month, day = draw.randint(1940, 2026), draw.randint(1, 12), draw.randint(1, 28)
        match name:
            case "year":
                return str(year)
            case "yearmonth":
                return f"{year}年{month}月"
            case "date":
                return draw.choice(
                    (f"{year}年{month}月{day}日", f"{month}月{day}日", f"{month}月{day}号", "昨天", "下周三")
                )
            case "dateslash":
                return draw.choice((f"{year}/{month:02}", f"{year}.{month}", f"{year}-{month:02}-{day:02}"))
            case "time":
                return draw.choice(
                    (
                        f"{draw.randint(0, 23)}:{draw.randint(0, 59):02}",
                        f"{draw.choice('上下')}午{DIGITS[draw.randint(1, 9)]}点",
                    )
                )
            case "age":
                return str(draw.randint(1, 99))
            case "number":
                return str(draw.choice((draw.randint(1, 12), draw.randint(1, 60), draw.randint(1, 5000))))
            case "money":
                return draw.choice(
                    (
                        f"{draw.randint(1, 9000)}元",
                        f"{draw.randint(1, 900)}万元",
                        f"{draw.randint(1, 99)}.{draw.randint(0, 9)}亿元",
                    )
                )
            case "percent":
                return f"{draw.randint(0, 99)}.{draw.randint(0, 9)}%"
            case "phone":
                return f"1{draw.randint(3, 9)}{draw.randint(0, 10**9 - 1):09}"
            case "email":
                letters = "".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(draw.randint(3, 9)))
                return f"{letters}@example.com"
            case "id":
                return f"{draw.choice('ABCDGKXZ')}{draw.randint(10, 99999)}"
            case "gender":
                return draw.choice("男女")
            case "season":
                return draw.choice("春夏秋冬") + draw.choice(("天", "季"))
            case _:
                keys = {"product": "products", "book": "books_films", "event": "events", "food": "foods"}
                keys |= {"activity": "activities", "thing": "things", "feeling": "feelings", "nearmiss": "near_misses"}
                return self._any(keys[name])

    # Typing.

    def _typed(self, text: Text) -> Text:
        """As people type it: half-width punctuation, other quotes, no full stop, a character that no vocabulary has."""
        characters = list(text.text)
        if self._maybe(0.12):
            widths = dict(zip("，。：；（）？！", ",.:;()?!", strict=True))
            characters = [widths.get(c, c) for c in characters]
        if self._maybe(0.3):
            quotes = {"“": '"', "”": '"'}
            characters = [quotes.get(c, c) for c in characters]
        if self._maybe(0.05):
            wide = {chr(code): chr(code + 0xFEE0) for code in (*range(48, 58), *range(65, 91), *range(97, 123))}
            characters = [wide.get(c, c) for c in characters]
        inside = {place for span in text.spans for place in range(span.start, span.end)}
        if self._maybe(0.1):
            place = self.random.randrange(len(characters))
            if place not in inside or self._maybe(0.5):
                characters[place] = "\U00020000"  # a rare one, which no small vocabulary has
        if self._maybe(0.25) and characters[-1] in "。." and len(characters) - 1 not in inside:
            characters.pop()
        return Text("".join(characters), text.spans)
