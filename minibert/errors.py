"""The errors minibert raises on bad input. All derive from `MinibertError`, itself a `ValueError`."""

import re
import unicodedata


class MinibertError(ValueError):
    """Input that cannot be used: the message says what was expected, what came and what to do."""


class ConfigError(MinibertError):
    """A model configuration with unusable fields; every problem is listed, with field and value."""


class CheckpointError(MinibertError):
    """A checkpoint that cannot be loaded whole; names the file, the keys and their shapes."""


class DataError(MinibertError):
    """Text or labels that cannot be read; names the file, the line and what was expected."""


def first_line(error: BaseException) -> str:
    """What another library's error says, for use in one of ours: its first line, without colours, or its class."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def printable(text: str) -> str:
    """Text without what would move a terminal's cursor or change its state: such characters are spelled out."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or unicodedata.category(c) in ("Zs", "Co", "Cn") else c.encode("unicode_escape").decode()
        for c in text
    )
