"""The checkpoint's own tokeniser, read by the `tokenizers` library."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tokenizers import BertWordPieceTokenizer, Tokenizer

from minibert.errors import CheckpointError
from minibert.hub import Source, damage, read_json


def load_tokenizer(name_or_path: str | os.PathLike[str] | Source) -> Tokenizer:
    """Reads `tokenizer.json`, or else `vocab.txt` with the settings of `tokenizer_config.json`.

    Truncation and padding that the file asks for are switched off: text is never cut here, and a batch is padded
    where it is made. Offsets are code points of the text given.

    Raises:
        CheckpointError: neither file is there, or one cannot be read.
    """
    source = name_or_path if isinstance(name_or_path, Source) else Source(os.fspath(name_or_path))
    whole = source.fetch("tokenizer.json")
    vocabulary = None if whole is not None else source.fetch("vocab.txt")
    if whole is not None:
        try:
            tokenizer = Tokenizer.from_file(str(whole))
        except Exception as error:  # noqa: BLE001  # the library raises no narrower class
            raise CheckpointError(f"{whole}: not a tokenizer file, {damage(whole, error)}") from None
    elif vocabulary is not None:
        described = source.fetch("tokenizer_config.json")
        settings = {} if described is None else read_json(described)
        tokenizer = _from_vocabulary(vocabulary, settings)
    else:
        raise CheckpointError(f"{source}: expected tokenizer.json or vocab.txt beside the weights: {source.absence}")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _from_vocabulary(path: Path, settings: dict[str, Any]) -> Tokenizer:
    """BERT's basic tokenisation and WordPiece, set as the slow tokenisers of google-research/bert are."""
    try:
        tokenizer = BertWordPieceTokenizer(
            str(path),
            lowercase=settings.get("do_lower_case", True),
            strip_accents=settings.get("strip_accents"),
            handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        )
    except Exception as error:  # noqa: BLE001  # the library raises no narrower class
        raise CheckpointError(f"{path}: not a BERT vocabulary, {damage(path, error)}") from None
    inner: Tokenizer = tokenizer._tokenizer
    return inner
