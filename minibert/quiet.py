"""Silence for other libraries' work."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Without what exporters and converters print, from Python or from below it."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [(stream, os.dup(stream)) for stream in (1, 2)]
    hole = os.open(os.devnull, os.O_WRONLY)
    disabled = logging.root.manager.disable
    try:
        for stream, _ in saved:
            os.dup2(hole, stream)
        logging.disable(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, copy in saved:
            os.dup2(copy, stream)
            os.close(copy)
        os.close(hole)
