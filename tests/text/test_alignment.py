"""Characters, words and tokens: nothing shifts, nothing is lost without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from minibert import DataError
from minibert.text import alignment
from minibert.text.alignment import (
    IGNORED,
    labels_from_spans,
    labels_from_words,
    labels_of_words,
    spans_from_labels,
    tokenize,
    tokenize_words,
)
from minibert.text.labels import LabelSet, Span, tags_from_spans
from minibert.text.tokenizer import load_tokenizer
from tagger import write_checkpoint

BIO = LabelSet(["O", "B-D", "I-D", "B-P", "I-P"])


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], Tokenizer]:
    """One for each combination of settings."""
    found = {}
    folder = tmp_path_factory.mktemp("tokenizers")
    write_checkpoint(folder)
    for lower in (True, False):
        for strip in (True, False, None):
            for han in (True, False):
                words = {True: "true", False: "false", None: "null"}
                (folder / "tokenizer_config.json").write_text(
                    f'{{"do_lower_case": {words[lower]}, "strip_accents": {words[strip]}, '
                    f'"tokenize_chinese_chars": {words[han]}}}'
                )
                found[lower, strip, han] = load_tokenizer(folder)
    return found


@pytest.fixture(scope="module")
def lower(tokenizers: dict[tuple[Any, ...], Tokenizer]) -> Tokenizer:
    return tokenizers[True, None, True]


def places(tokenizer: Tokenizer, text: str, split_mode: str = "text") -> list[tuple[int, int]]:
    (tokens,) = tokenize(tokenizer, [text], split_mode)
    return list(zip(tokens.starts.tolist(), tokens.ends.tolist(), strict=True))


def test_spaces_shift_nothing(lower: Tokenizer) -> None:  # Z01
    text = "海视通 QX-AV-HDMI16F 混合矩阵"
    expected = [(i, i + 1) for i in (0, 1, 2, *range(4, 13), 13)] + [(14, 16), (16, 17)]
    expected += [(i, i + 1) for i in range(18, 22)]
    assert places(lower, text) == expected
    assert places(lower, " " * 10 + text) == [(start + 10, end + 10) for start, end in expected]


@pytest.mark.parametrize("space", ["\u3000", "\xa0", "\u2028", "\t", "\n", "\r\n"])
@pytest.mark.parametrize("split_mode", ["text", "characters"])
def test_white_space_of_any_kind(space: str, split_mode: str, lower: Tokenizer) -> None:  # Z03
    end = 1 + len(space)
    assert places(lower, f"上{space}海", split_mode) == [(0, 1), (end, end + 1)]


def test_numbers_and_latin_words_merge_characters(lower: Tokenizer) -> None:  # Z05
    text = "住院 2024年"
    (tokens,) = tokenize(lower, [text])
    assert places(lower, text) == [(0, 1), (1, 2), (3, 7), (7, 8)]
    ids, lost = labels_from_spans(tokens, [Span("D", 3, 8)], BIO)
    assert [BIO.names[i] for i in ids] == ["O", "O", "B-D", "I-D"]
    assert lost == []
    assert spans_from_labels(tokens, ids, BIO) == [("D", 3, 8)]
    ids, lost = labels_from_spans(tokens, [Span("D", 4, 8)], BIO)
    assert lost == [("D", 4, 8)]  # its edge falls inside 2024; stretched, and said
    assert spans_from_labels(tokens, ids, BIO) == [("D", 3, 8)]
    assert places(lower, "血压12.5%")[2:] == [(2, 3), (3, 4), (4, 5), (5, 6), (6, 7)]
    assert places(lower, "住院 2024年", "characters") == [(i, i + 1) for i in (0, 1, 3, 4, 5, 6, 7)]


def test_rare_characters_keep_their_place(lower: Tokenizer) -> None:  # Z10
    (tokens,) = tokenize(lower, ["张𠮷三"])
    assert places(lower, "张𠮷三") == [(0, 1), (1, 2), (2, 3)]
    assert tokens.ids[1] == 1
    assert spans_from_labels(tokens, BIO.encode(["B-P", "I-P", "I-P"]), BIO) == [("P", 0, 3)]


def test_an_accent_stays_with_its_letter(tokenizers: dict[tuple[Any, ...], Tokenizer]) -> None:
    text = "cafe\u0301\u0302 上\ufe0f海"
    assert places(tokenizers[True, True, True], text)[-3:] == [(3, 6), (7, 9), (9, 10)]
    for tokenizer in tokenizers.values():
        assert places(tokenizer, text)[-1][1] == len(text)


def test_what_has_no_token_or_shares_one_is_reported(lower: Tokenizer) -> None:
    (tokens,) = tokenize(lower, ["上 \u200b 2024"])
    ids, lost = labels_from_spans(tokens, [Span("D", 2, 3), Span("P", 4, 6), Span("D", 6, 8)], BIO)
    assert lost == [("D", 2, 3), ("P", 4, 6), ("D", 6, 8)]
    assert [BIO.names[i] for i in ids] == ["O", "B-P"]


@pytest.mark.parametrize(
    ("names", "word", "first", "every"),
    [
        ("O B-PROD I-PROD", "B-PROD", ["B-PROD", None], ["B-PROD", "I-PROD"]),  # Z14
        ("O B-PROD I-PROD", "I-PROD", ["I-PROD", None], ["I-PROD", "I-PROD"]),
        ("O B-PROD I-PROD", "O", ["O", None], ["O", "O"]),
        ("O B-PROD I-PROD E-PROD S-PROD", "S-PROD", ["S-PROD", None], ["B-PROD", "E-PROD"]),
        ("O B-PROD I-PROD E-PROD S-PROD", "E-PROD", ["E-PROD", None], ["I-PROD", "E-PROD"]),
        ("O I-PROD", "I-PROD", ["I-PROD", None], ["I-PROD", "I-PROD"]),
    ],
)
def test_pieces_of_a_labelled_word(
    names: str, word: str, first: list[str | None], every: list[str], lower: Tokenizer
) -> None:
    labels = LabelSet(names.split())
    (tokens,) = tokenize_words(lower, [["iphone16"]])
    assert len(tokens) == 2
    expected = [IGNORED if name is None else labels.ids[name] for name in first]
    assert labels_from_words(tokens, labels.encode([word]), labels).tolist() == expected
    spread = labels_from_words(tokens, labels.encode([word]), labels, label_all=True)
    assert [labels.names[i] for i in spread] == every


def test_a_label_that_the_set_lacks_is_refused(lower: Tokenizer) -> None:
    labels = LabelSet(["O", "B-A", "I-A", "E-A", "S-B"])
    (tokens,) = tokenize_words(lower, [["iphone16"]])
    with pytest.raises(DataError, match="B-B is not one of O, B-A"):
        labels_from_words(tokens, labels.encode(["S-B"]), labels, label_all=True)


def test_words_without_a_token_go_on_with_what_stands_on_both_sides(lower: Tokenizer) -> None:
    words = [" ", "张", "\u200b", "三", " ", "北", " "]
    (tokens,) = tokenize_words(lower, [words])
    assert tokens.words.tolist() == [1, 3, 5]
    ids = labels_of_words(tokens, BIO.encode(["B-P", "I-P", "B-D"]), len(words), BIO)
    assert [BIO.names[i] for i in ids] == ["O", "B-P", "I-P", "I-P", "O", "B-D", "O"]


def test_labels_without_one_for_outside_will_do_where_every_word_has_a_token(lower: Tokenizer) -> None:
    segments = LabelSet(["B", "M", "E", "S"])
    (tokens,) = tokenize_words(lower, [["上", "海", " "]])
    assert labels_of_words(tokens, segments.encode(["B", "E"]), 2, segments).tolist() == [0, 2]
    with pytest.raises(DataError, match="none of B, M, E, S means outside"):
        labels_of_words(tokens, segments.encode(["B", "E"]), 3, segments)


def test_long_texts_are_tokenised_in_parts_that_change_nothing(
    tokenizers: dict[tuple[Any, ...], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["北京wifi iphone16 上海。" * 40, "a" * 500, "今天 " * 200, "x y\t\u0301z\n" * 100, "上\u0301海" * 150, ""]
    for settings_, tokenizer in tokenizers.items():
        for split_mode in ("text", "characters"):
            monkeypatch.setattr(alignment, "PART", 10**9)
            whole = tokenize(tokenizer, texts, split_mode)
            monkeypatch.setattr(alignment, "PART", 7)
            parts = tokenize(tokenizer, texts, split_mode)
            for one, other in zip(whole, parts, strict=True):
                for name in ("ids", "starts", "ends", "begins_word"):
                    assert np.array_equal(getattr(one, name), getattr(other, name)), (settings_, split_mode, name)


def test_half_a_surrogate_pair_is_refused(lower: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"half of a surrogate pair in '北\\ud83d'"):
        tokenize(lower, ["北\ud83d"])
    with pytest.raises(DataError, match="half of a surrogate pair"):
        tokenize_words(lower, [["\ud83d"]])
    with pytest.raises(DataError, match="split_mode: expected text or characters, got 'words'"):
        tokenize(lower, ["北"], "words")


CHARACTERS = st.one_of(
    st.sampled_from("上海北京医院张三李四abcxyzABC019 \u3000\t\n\r。，-.%/é\u0301\u200b\u200d\ufe0f\ufeff𠮷😀가"),
    st.characters(exclude_categories=["Cs"]),
)


@settings(
    max_examples=10_000,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    text=st.text(CHARACTERS, max_size=40),
    lower_=st.booleans(),
    strip=st.sampled_from([True, False, None]),
    han=st.booleans(),
    split_mode=st.sampled_from(["text", "characters"]),
    cuts=st.lists(st.integers(0, 40), max_size=6),
)
def test_any_text_under_any_settings(
    text: str,
    lower_: bool,
    strip: bool | None,
    han: bool,
    split_mode: str,
    cuts: list[int],
    tokenizers: dict[tuple[Any, ...], Tokenizer],
) -> None:
    tokenizer = tokenizers[lower_, strip, han]
    (tokens,) = tokenize(tokenizer, [text], split_mode)
    starts, ends = tokens.starts, tokens.ends
    assert ((starts >= 0) & (starts < ends) & (ends <= len(text))).all()
    assert (np.diff(starts) >= 0).all()
    assert (np.diff(ends) >= 0).all()
    assert (np.diff(tokens.words) >= 0).all()
    begins = np.flatnonzero(tokens.begins_word)
    assert (starts[begins][1:] >= ends[begins[1:] - 1]).all()  # words share no character
    for number, start, end in zip(tokens.ids.tolist(), starts.tolist(), ends.tolist(), strict=True):
        token = tokenizer.id_to_token(number).removeprefix("##")
        assert number == 1 or token in tokenizer.normalizer.normalize_str(text[start:end])
    # Any entities survive the way to the tokens and back, or are reported.
    edges = sorted({min(cut, len(text)) for cut in cuts})
    spans = [Span("D", *pair) for pair in zip(edges[::2], edges[1::2], strict=False)]
    ids, lost = labels_from_spans(tokens, spans, BIO)
    assert set(spans) - set(lost) <= set(spans_from_labels(tokens, ids, BIO))
    assert len(tags_from_spans(spans, len(text))) == len(text)


def test_a_folder_without_a_tokeniser_setting_is_lower_case(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    assert places(load_tokenizer(tmp_path), "Q") == [(0, 1)]
