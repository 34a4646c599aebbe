"""Fonts that have the characters of a picture, Chinese ones above all. Needs matplotlib."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from matplotlib import font_manager
from matplotlib.font_manager import fontManager

from minibert.errors import MinibertError, first_line

logger = logging.getLogger("minibert")

DEFAULT = "DejaVu Sans"  # comes with matplotlib, and has no Chinese
# Sans-serif fonts with simplified Chinese, as Linux, Windows and macOS name them; the last have Japanese forms.
CHINESE = (
    "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN", "Microsoft YaHei", "PingFang SC",
    "Hiragino Sans GB", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "LXGW WenKai", "SimHei", "Heiti SC", "Heiti TC",
    "STHeiti", "SimSun", "Arial Unicode MS", "Droid Sans Fallback", "Noto Sans CJK JP",
)  # fmt: skip
REGULAR = 400  # weight
NO_TEXT = ("Last Resort", "LastResort", ".LastResort", "STIXNonUnicode", "cm")  # boxes, or mathematics by other numbers
PACKAGED = ("mplfonts", "fonts/NotoSansCJKsc-Regular.otf")  # a package from the index that carries a font
ADVICE = "install one, such as Noto Sans CJK (Debian: fonts-noto-cjk; pip install mplfonts), or name its file as font"


@dataclass(frozen=True)
class Fonts:
    """Families that matplotlib tries one after another for each character, and the characters that none of them has."""

    families: tuple[str, ...]
    missing: frozenset[str] = frozenset()

    def label(self, text: str) -> str:
        """The text as it can be drawn: no boxes, but the code points of what has no glyph."""
        return "".join(f"U+{ord(c):04X}" if c in self.missing else c for c in text)

    @property
    def notice(self) -> str:
        """What to say of the missing characters; empty if there are none."""
        if not self.missing:
            return ""
        shown = " ".join(f"U+{ord(c):04X}" for c in sorted(self.missing)[:5])
        more = " ..." if len(self.missing) > 5 else ""
        return f"no font here has {len(self.missing)} of the characters, shown by their code points ({shown}{more})"


def fonts_for(text: str, wanted: str | None = None) -> Fonts:
    """Fonts for the characters of a text, found among those that matplotlib knows or the system has.

    Args:
        wanted: a font file or the name of a family to take first.

    Raises:
        MinibertError: there is no such font.
    """
    needed = {c for c in text if not c.isspace()}
    families: list[str] = []
    for family in _candidates(wanted):
        found = needed & _characters(family)
        if found:
            families.append(family)
            needed -= found
        if not needed:
            break
    fonts = Fonts(tuple(dict.fromkeys((*families, DEFAULT))), frozenset(needed))
    if needed:
        logger.warning("%s; %s", fonts.notice, ADVICE)
    return fonts


def _candidates(wanted: str | None) -> Iterator[str]:
    """Families, the likeliest first; looks further only while characters are missing."""
    if wanted is not None:
        yield _named(wanted)
    yield DEFAULT
    before = _families()
    yield from (family for family in CHINESE if family in before)
    for file in _new_files():
        try:
            fontManager.addfont(file)
        except (OSError, RuntimeError) as error:  # a damaged file, or one without outlines
            logger.debug("%s: not a font for pictures (%s)", file, error)
    yield from (family for family in CHINESE if family in _families() - before)
    yield from sorted(family for family in _families() - set(CHINESE) if not family.startswith(NO_TEXT))


def _new_files() -> Iterator[str]:
    """Files that matplotlib's list, which it keeps from one process to the next, does not have."""
    package = importlib.util.find_spec(PACKAGED[0])  # found, not imported: only its file is of interest
    if package is not None and package.origin is not None:
        yield str(Path(package.origin).parent / PACKAGED[1])
    listed = {str(entry.fname) for entry in fontManager.ttflist}
    yield from sorted(set(font_manager.findSystemFonts()) - listed)


def _families() -> set[str]:
    return {entry.name for entry in fontManager.ttflist}


def _named(wanted: str) -> str:
    """The family of a font file, or the family itself if there is one."""
    if not Path(wanted).is_file():
        if wanted in _families():
            return wanted
        raise MinibertError(f"font: expected a font file or the name of an installed family, got {wanted!r}")
    before = len(fontManager.ttflist)
    try:
        fontManager.addfont(wanted)
    except (OSError, RuntimeError) as error:
        raise MinibertError(f"font: {wanted} is not a font file ({first_line(error)})") from None
    names = [entry.name for entry in fontManager.ttflist[before:]]
    return next((family for family in CHINESE if family in names), names[0])


def _characters(family: str) -> set[str]:
    """What the regular font of a family has glyphs for."""
    entries = [entry for entry in fontManager.ttflist if entry.name == family and entry.style == "normal"]
    regular = sorted(entries, key=lambda entry: abs(entry.weight - REGULAR) if isinstance(entry.weight, int) else 0)
    for entry in regular:
        try:
            return set(map(chr, font_manager.get_font(entry.fname).get_charmap()))
        except (OSError, RuntimeError) as error:  # on the list, but gone or damaged since
            logger.debug("%s: cannot be read (%s)", entry.fname, error)
    return set()
