"""The checkpoint's own tokeniser, read by the `tokenizers` library."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from minibert.errors import CheckpointError
from minibert.hub import Source, damage, read_json

SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}


def load_tokenizer(name_or_path: str | os.PathLike[str] | Source, *, lower_case: bool = False) -> Tokenizer:
    """Reads `tokenizer.json`, or else `vocab.txt` with the settings of `tokenizer_config.json`.

    Its ids are those of `BertTokenizer` in `transformers`, but for two things. Special tokens that somebody typed are
    ordinary text: `[SEP]` in a text is three pieces and not the end of it. Truncation and padding that the file asks
    for are switched off: text is never cut here, and a batch is padded where it is made. Offsets are code points of
    the text given. A tokeniser is not changed after this, and can be used from many threads.

    Args:
        lower_case: lower-case the text, whatever the checkpoint says.

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
        described = [source.fetch(name) for name in ("special_tokens_map.json", "tokenizer_config.json")]
        settings: dict[str, Any] = {}
        for path in described:  # the second wins; the first is how the names were kept before
            settings |= {} if path is None else read_json(path)
        tokenizer = _from_vocabulary(vocabulary, settings)
    else:
        raise CheckpointError(f"{source}: expected tokenizer.json or vocab.txt beside the weights: {source.absence}")
    if lower_case:
        tokenizer.normalizer = _lower_casing(tokenizer)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def lower_cases(tokenizer: Tokenizer) -> bool:
    """Whether any step of the normaliser lower-cases."""
    return any(step.get("lowercase") or step.get("type") == "Lowercase" for step in _steps(tokenizer))


def splits_han(tokenizer: Tokenizer) -> bool:
    """Whether every Chinese character is a word of its own."""
    return any(step.get("handle_chinese_chars") for step in _steps(tokenizer))


def cannot_spell_capitals(tokenizer: Tokenizer) -> bool:
    """Whether capital Latin letters become the unknown token: they are kept, but the vocabulary has none."""
    words = (token for token in tokenizer.get_vocab() if token[:1] not in "[<")
    return not lower_cases(tokenizer) and not any("A" <= character <= "Z" for word in words for character in word)


def _steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    normalizer = json.loads(tokenizer.normalizer.__getstate__()) if tokenizer.normalizer is not None else {}
    steps: list[dict[str, Any]] = normalizer.get("normalizers", [normalizer])
    return steps


def _lower_casing(tokenizer: Tokenizer) -> BertNormalizer:
    (step, *others) = _steps(tokenizer)
    if others or step.get("type", "BertNormalizer") != "BertNormalizer":
        raise CheckpointError(f"lower_case: expected a BertNormalizer in the tokenizer, got {step.get('type')}")
    return BertNormalizer(
        clean_text=step.get("clean_text", True),
        handle_chinese_chars=step.get("handle_chinese_chars", True),
        strip_accents=step.get("strip_accents"),
        lowercase=True,
    )


def _from_vocabulary(path: Path, settings: dict[str, Any]) -> Tokenizer:
    """BERT's basic tokenisation and WordPiece, as transformers' BertTokenizer builds them from the same files."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        lines = lines[:-1] if lines[-1] == "" else lines
        names = {key: _content(settings.get(key) or default) for key, default in SPECIAL.items()}
        tokenizer = Tokenizer(WordPiece({token: i for i, token in enumerate(lines)}, unk_token=names["unk_token"]))
        tokenizer.normalizer = BertNormalizer(
            clean_text=True,
            handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
            strip_accents=settings.get("strip_accents"),
            lowercase=settings.get("do_lower_case", True),
        )
    except Exception as error:  # noqa: BLE001  # the library raises no narrower class
        raise CheckpointError(f"{path}: not a BERT vocabulary, {damage(path, error)}") from None
    tokenizer.pre_tokenizer = BertPreTokenizer()
    missing = [name for name in names.values() if tokenizer.token_to_id(name) is None]
    if names["cls_token"] in missing or names["sep_token"] in missing or names["unk_token"] in missing:
        raise CheckpointError(
            f"{path}: not a BERT vocabulary, {', '.join(missing)} is not in it; "
            "name the special tokens in tokenizer_config.json"
        )
    added = settings.get("added_tokens_decoder") or {}
    for number in sorted(added, key=int):
        tokenizer.add_tokens([_added(added[number], special=bool(added[number].get("special")))])
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    specials = [*names.values(), *(_content(token) for token in (extra if isinstance(extra, list) else extra.values()))]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    first, last = names["cls_token"], names["sep_token"]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in (first, last)],
    )
    return tokenizer


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _added(entry: dict[str, Any], *, special: bool) -> AddedToken:
    options = {name: bool(entry[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in entry}
    return AddedToken(_content(entry), special=special, **options)
