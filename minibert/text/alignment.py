"""Text to tokens and back: where every token stands, and which label a token, a character or a word has.

Offsets are code points of the caller's own string, ends exclusive. T tokens, W words, K labels.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Encoding, Tokenizer

from minibert.errors import DataError
from minibert.text.labels import BEGIN, END, INSIDE, SINGLE, Bools, Ints, LabelSet, Span
from minibert.text.tokenizer import splits_han

IGNORED = -100  # the label of a token that counts in no loss
PART = 4000  # characters that are tokenised at a time; the library's time grows faster than the text
SPLIT_MODES = ("text", "characters")
LABEL_PIECES = ("first", "all")  # of a word


@dataclass(frozen=True)
class Tokens:
    """A tokenised text, special tokens left out. All arrays are (T,) int64.

    ids are the vocabulary's; a token is `text[start:end]`; words number the words that tokens belong to, in order:
    the tokeniser's own, or those (or the characters) that the text was split into, some of which have no token.
    """

    ids: Ints
    starts: Ints
    ends: Ints
    words: Ints

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def begins_word(self) -> Bools:
        """(T,) bool: the first token of its word."""
        begins: Bools = np.diff(self.words, prepend=-1) != 0
        return begins

    def by_word(self) -> Tokens:
        """One token a word, from where the word's first token starts to where its last ends, with the first's id."""
        first = np.flatnonzero(self.begins_word)
        last = np.append(first[1:], len(self)) - 1 if len(first) else first
        return Tokens(self.ids[first], self.starts[first], self.ends[last], self.words[first])


def tokenize(tokenizer: Tokenizer, texts: Sequence[str], split_mode: str = "text") -> list[Tokens]:
    """Tokens of each text, by the tokeniser's own rules ("text") or of each character by itself ("characters").

    Raises:
        DataError: a text holds half of a surrogate pair, which is no character.
    """
    if split_mode not in SPLIT_MODES:
        raise DataError(f"split_mode: expected {' or '.join(SPLIT_MODES)}, got {split_mode!r}")
    for text in texts:
        refuse_surrogates(text)
    if split_mode == "characters":
        return [_of_characters(tokenizer, text) for text in texts]
    # A token that a user added may hold a space, so a text is cut only where there are none.
    whole = any(not token.special for token in tokenizer.get_added_tokens_decoder().values())
    han = splits_han(tokenizer)
    parts = [[(0, text)] if whole else list(_parts(text, han=han)) for text in texts]
    flat = [part for _, part in (pair for pairs in parts for pair in pairs)]
    encodings = iter(tokenizer.encode_batch(flat, add_special_tokens=False))
    joined = [_joined([(start, next(encodings)) for start, _ in pairs]) for pairs in parts]
    for text, tokens in zip(texts, joined, strict=True):
        _take_in_marks(text, tokens)
    return joined


def tokenize_words(tokenizer: Tokenizer, sentences: Sequence[Sequence[str]]) -> list[Tokens]:
    """Tokens of each sentence that is given in words; offsets are those in the word.

    Raises:
        DataError: a word holds half of a surrogate pair.
    """
    for sentence in sentences:
        for word in sentence:
            refuse_surrogates(word)
    words = [list(sentence) for sentence in sentences]
    encodings = tokenizer.encode_batch(words, is_pretokenized=True, add_special_tokens=False)
    return [_joined([(0, encoding)]) for encoding in encodings]


def refuse_surrogates(text: str) -> None:
    """Raises DataError for half of a surrogate pair, which is no character and cannot be written as UTF-8."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise DataError(f"expected Unicode text, got half of a surrogate pair in {shown!r}")


def _take_in_marks(text: str, tokens: Tokens) -> None:
    """Ends a token behind the accents that were stripped from it, so that no entity cuts a letter from its accent."""
    if text.isascii():
        return
    following = np.append(tokens.starts[1:], len(text))
    for place in np.flatnonzero(tokens.ends < following).tolist():
        end, limit = int(tokens.ends[place]), int(following[place])
        while end < limit and unicodedata.category(text[end]) in ("Mn", "Me"):
            end += 1
        tokens.ends[place] = end


def _of_characters(tokenizer: Tokenizer, text: str) -> Tokens:
    parts = [text[start : start + PART] for start in range(0, len(text), PART)]
    encodings = tokenizer.encode_batch([list(part) for part in parts], is_pretokenized=True, add_special_tokens=False)
    ids = [number for encoding in encodings for number in encoding.ids]
    places = [PART * i + word for i, encoding in enumerate(encodings) for word in _words(encoding)]
    characters = np.array(places, dtype=np.int64)
    return Tokens(np.array(ids, dtype=np.int64), characters, characters + 1, characters)


def _parts(text: str, *, han: bool) -> Iterator[tuple[int, str]]:
    """Cuts a long text between words: behind white space, or between two Chinese characters if these are words."""
    start = 0
    while len(text) - start > PART:
        cut = start + PART
        while cut < len(text) and not _can_cut(text[cut - 1], text[cut], han=han):
            cut += 1
        yield start, text[start:cut]
        start = cut
    yield start, text[start:]


def _can_cut(before: str, after: str, *, han: bool) -> bool:
    between_han = han and "\u4e00" <= before <= "\u9fff" and "\u4e00" <= after <= "\u9fff"
    return between_han or (before in " \n\t" and after.isalnum())


def _joined(parts: list[tuple[int, Encoding]]) -> Tokens:
    """One text's tokens from the encodings of its parts, each with the place of its first character."""
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    words: list[int] = []
    first_word = 0
    for start, encoding in parts:
        ids += encoding.ids
        offsets += [(start + first, start + last) for first, last in encoding.offsets] if start else encoding.offsets
        words += [first_word + word for word in _words(encoding)]
        first_word = words[-1] + 1 if words else 0
    places = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    return Tokens(np.array(ids, dtype=np.int64), places[:, 0], places[:, 1], np.array(words, dtype=np.int64))


def _words(encoding: Encoding) -> list[int]:
    return [word for word in encoding.word_ids if word is not None]  # only special tokens have none


# Labels of tokens, for training and for reading gold data.


def labels_from_spans(tokens: Tokens, spans: Iterable[Span], labels: LabelSet) -> tuple[Ints, list[Span]]:
    """Token labels (T,) for entities among the characters, and those entities that the tokens cannot spell.

    An entity whose edge falls inside a token is stretched to the token's edge, and is among the second; so is one
    that has no token, and one whose first token belongs to the entity before.

    Raises:
        DataError: the label set has no tag for such an entity.
    """
    spelled: list[tuple[str, int, int]] = []
    lost: list[Span] = []
    taken = 0
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        first = max(int(np.searchsorted(tokens.ends, span.start, side="right")), taken)
        last = int(np.searchsorted(tokens.starts, span.end, side="left"))
        if first >= last:
            lost.append(span)
            continue
        if tokens.starts[first] != span.start or tokens.ends[last - 1] != span.end:
            lost.append(span)
        spelled.append((span.label, first, last))
        taken = last
    return labels.ids_of_spans(spelled, len(tokens)), lost


def spans_from_labels(tokens: Tokens, ids: Ints, labels: LabelSet, mode: str = "lenient") -> list[Span]:
    """The entities among the characters that token labels (T,) spell."""
    found = labels.spans(ids, mode)
    return [Span(label, int(tokens.starts[start]), int(tokens.ends[end - 1])) for label, start, end in found]


def labels_from_words(tokens: Tokens, word_ids: Ints, labels: LabelSet, *, label_all: bool = False) -> Ints:
    """Token labels (T,) from those of the words (W,): a word's first token has its label, the others `IGNORED`.

    With `label_all` the others go on with the entity: B-X I-X, and B-X E-X for a word that was S-X; never B-X twice.

    Raises:
        DataError: the label set lacks a tag that this takes.
    """
    of_tokens: Ints = np.asarray(word_ids, dtype=np.int64)[tokens.words]
    first = tokens.begins_word
    if not label_all:
        of_tokens[~first] = IGNORED
        return of_tokens
    last = np.diff(tokens.words, append=-1) != 0
    roles = labels.roles[of_tokens]
    wanted = roles.copy()
    wanted[(roles == BEGIN) & ~first] = INSIDE
    wanted[(roles == END) & ~last] = INSIDE
    single = (roles == SINGLE) & ~(first & last)
    wanted[single] = np.where(first, BEGIN, np.where(last, END, INSIDE))[single]
    for place in np.flatnonzero(wanted != roles):
        of_tokens[place] = labels.id_of(int(wanted[place]), labels.types[of_tokens[place]])
    return of_tokens


def labels_of_words(tokens: Tokens, token_labels: Ints, num_words: int, labels: LabelSet) -> Ints:
    """Word labels (W,) from one label for each word that has a token (in their order).

    A word without a token goes on with the entity that stands on both sides of it; else it is outside.

    Raises:
        DataError: there is such a word, and the model has no label for it.
    """
    present = tokens.words[tokens.begins_word]
    result = np.full(num_words, -1, dtype=np.int64)
    result[present] = token_labels
    for before, after in itertools.pairwise(present):
        if after - before > 1 and labels.continues[result[before], result[after]]:
            result[before + 1 : after] = labels.id_of(INSIDE, labels.types[result[after]])
    if (result < 0).any():
        result[result < 0] = labels.outside_id
    return result
