"""The errors minibert raises on bad input. All derive from `MinibertError`, itself a `ValueError`."""

import re


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
