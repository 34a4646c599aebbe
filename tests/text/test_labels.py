"""Tag schemes: the same reading as seqeval's, in both modes, and back."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval.metrics.sequence_labeling import get_entities
from seqeval.scheme import BILOU, IOB2, IOBES, Entities

from minibert import DataError
from minibert.text.labels import SCHEMES, LabelSet, Span, spans_from_tags, tags_from_spans

PREFIXES = {name: [letter for letter in scheme if letter] for name, scheme in SCHEMES.items()}
# What seqeval calls the roles of a scheme that its default mode, or its strict one, does not know.
AS_BIOES = {"M": "I", "L": "E", "U": "S"}


def names_of(scheme: str, types: tuple[str, ...] = ("PER", "LOC-x")) -> list[str]:
    return ["O", *(f"{letter}-{label}" for label in types for letter in PREFIXES[scheme])]


def random_tags(scheme: str, number: int) -> list[list[str]]:
    rng = random.Random(number)
    names = names_of(scheme)
    return [rng.choices(names, k=rng.randint(1, 12)) for _ in range(number)]


def translated(tags: list[str]) -> list[str]:
    return [AS_BIOES.get(tag[0], tag[0]) + tag[1:] for tag in tags]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_lenient_is_seqevals_default_on_2000_random_sequences(scheme: str) -> None:
    for tags in random_tags(scheme, 2000):
        expected = [Span(label, start, end + 1) for label, start, end in get_entities(translated(tags))]
        assert spans_from_tags(tags, scheme) == expected, tags


@pytest.mark.parametrize(("scheme", "theirs"), [("BIO", IOB2), ("BIOES", IOBES), ("BMES", IOBES), ("BILOU", BILOU)])
def test_strict_is_seqevals_strict_on_2000_random_sequences(scheme: str, theirs: type) -> None:
    found = 0
    for tags in random_tags(scheme, 2000):
        given = tags if scheme == "BILOU" else translated(tags)
        (entities,) = Entities([given], theirs).entities
        expected = [Span(entity.tag, entity.start, entity.end) for entity in entities]
        assert spans_from_tags(tags, scheme, "strict") == expected, tags
        found += len(expected)
    assert found > 500


def test_strict_and_lenient_of_io_are_the_same() -> None:
    for tags in random_tags("IO", 500):
        assert spans_from_tags(tags, "IO", "strict") == spans_from_tags(tags, "IO")


@pytest.mark.parametrize(
    ("tags", "lenient", "strict"),
    [
        ("B-LOC I-LOC B-LOC I-LOC", [(0, 2), (2, 4)], [(0, 2), (2, 4)]),  # D01
        ("B-LOC B-LOC I-LOC O", [(0, 1), (1, 3)], [(0, 1), (1, 3)]),
        ("O I-PER I-PER O", [(1, 3)], []),  # D02
        ("I-PER I-PER O", [(0, 2)], []),
        ("B-PER M-PER E-PER S-LOC S-LOC O", [(0, 3), (3, 4), (4, 5)], [(0, 3), (3, 4), (4, 5)]),  # D05
        ("B-PER I-PER E-PER S-LOC S-LOC O", [(0, 3), (3, 4), (4, 5)], [(0, 3), (3, 4), (4, 5)]),
        ("B-PER I-PER L-PER U-LOC U-LOC O", [(0, 3), (3, 4), (4, 5)], [(0, 3), (3, 4), (4, 5)]),
        ("B-PER I-PER O S-LOC", [(0, 2), (3, 4)], [(3, 4)]),
        ("O O", [], []),
        ("", [], []),
    ],
)
def test_the_cases(tags: str, lenient: list[tuple[int, int]], strict: list[tuple[int, int]]) -> None:
    for mode, expected in (("lenient", lenient), ("strict", strict)):
        assert [(s.start, s.end) for s in spans_from_tags(tags.split(), mode=mode)] == expected


@pytest.mark.parametrize(
    ("names", "scheme", "outside"),
    [
        (["O", "B-A", "I-A"], "BIO", "O"),
        (["OTHER", "B-A", "I-A"], "BIO", "OTHER"),
        (["什么都不是", "B-A", "I-A", "[PAD]", "X"], "BIO", "什么都不是"),
        (["O", "B-A", "I-A", "E-A", "S-A"], "BIOES", "O"),
        (["O", "B-A", "M-A", "E-A", "S-B"], "BMES", "O"),
        (["O", "B-A", "I-A", "L-A", "U-A"], "BILOU", "O"),
        (["O", "I-A", "I-B"], "IO", "O"),
        (["O", "PER", "LOC"], "IO", "O"),
        (["none", "PER", "LOC", "[CLS]"], "IO", "none"),
        (["O", "B_A", "I_A"], "BIO", "O"),
        (["B-A", "I-A"], "BIO", None),
        (["B", "I", "O"], "BIO", "O"),
        (["B", "M", "E", "S"], "BMES", None),
    ],
)
def test_the_scheme_is_found_from_the_labels(names: list[str], scheme: str, outside: str | None) -> None:
    labels = LabelSet(names)
    assert (labels.scheme, labels.outside) == (scheme, outside)
    assert {t for t in labels.types if t} <= {"A", "B", "PER", "LOC", "_"}


@pytest.mark.parametrize(
    ("names", "scheme", "message"),
    [
        (["LABEL_0", "LABEL_1"], "auto", r"still LABEL_0 to LABEL_1.*id2label"),
        (["O", "B-A", "I-A", "M-A"], "auto", "prefixes B, I, M belong to no one scheme"),
        (["O", "B-A", "E-A", "L-A"], "auto", "belong to no one scheme"),
        (["O", "B-A", "I-A", "E-A", "S-A", "B-B", "I-B"], "auto", "B has B- or I- and no E-.*two schemes"),
        (["O", "N", "B-A"], "auto", "O, N have no prefix; expected one name for outside"),
        (["PER", "LOC"], "auto", None),  # without a name for outside everything is an entity
        (["O", "NONE", "PER"], "auto", "which means outside"),
        (["O", "B-A", "E-A"], "BIO", "E-A: not of the scheme BIO"),
        (["O", "B-A"], "IOB1", "scheme: expected auto, BIO"),
    ],
)
def test_labels_that_say_nothing_certain_are_refused(names: list[str], scheme: str, message: str | None) -> None:
    if message is None:
        assert LabelSet(names, scheme).outside is None
        return
    with pytest.raises(DataError, match=message):
        LabelSet(names, scheme)


def test_labels_without_types() -> None:
    for tags in (["B", "I", "O", "B", "B"], ["B", "E", "S", "O"]):
        expected = [Span(label, start, end + 1) for label, start, end in get_entities(tags)]
        assert spans_from_tags(tags) == expected
        assert expected


def test_a_type_may_hold_hyphens() -> None:
    assert spans_from_tags(["B-a-b", "I-a-b", "B-a-c"]) == [("a-b", 0, 2), ("a-c", 2, 3)]


def test_padding_labels_are_never_entities() -> None:
    labels = LabelSet(["[PAD]", "O", "B-A", "I-A", "X"])
    assert labels.spans(np.array([0, 4, 2, 0, 3])) == [("A", 2, 3), ("A", 4, 5)]
    legal = labels.legal_transitions()
    assert not legal[0].any()
    assert not legal[:, 4].any()


def test_tags_of_one_sentence_that_hold_only_inside_are_read_as_bio() -> None:
    assert spans_from_tags(["I-PER"], mode="strict") == []
    assert LabelSet(["O", "I-PER"]).scheme == "IO"  # all labels a model has


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[Span], int]:
    """Entities that do not overlap, in a sequence."""
    gaps = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.sampled_from(["PER", "a-b"])), max_size=6))
    spans, end = [], 0
    for gap, length, label in gaps:
        spans.append(Span(label, end + gap, end + gap + length))
        end += gap + length
    return spans, end + draw(st.integers(0, 3))


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=300, derandomize=True, database=None)
@given(sequences())
def test_spans_to_tags_and_back(scheme: str, case: tuple[list[Span], int]) -> None:
    spans, length = case
    tags = tags_from_spans(spans, length, scheme)
    assert len(tags) == length
    expected = spans
    if scheme == "IO":  # entities of one type that touch become one
        expected = []
        for span in spans:
            if expected and expected[-1].end == span.start and expected[-1].label == span.label:
                span = Span(span.label, expected.pop().start, span.end)
            expected.append(span)
    for mode in ("lenient", "strict"):
        assert spans_from_tags(tags, scheme, mode) == expected
    labels = LabelSet(names_of(scheme, ("PER", "a-b")))
    assert [labels.names[i] for i in labels.ids_of_spans(spans, length)] == tags


@pytest.mark.parametrize("spans", [[("A", 0, 2), ("B", 1, 3)], [("A", 2, 2)], [("A", -1, 1)], [("A", 3, 6)]])
def test_spans_that_tags_cannot_spell_are_refused(spans: list[tuple[str, int, int]]) -> None:
    with pytest.raises(DataError, match="overlaps another or does not lie within 5 tags"):
        tags_from_spans(spans, 5)
    with pytest.raises(DataError, match="scheme: expected BIO"):
        tags_from_spans([], 5, "auto")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_sequence_is_legal_just_when_strict_reading_loses_nothing(scheme: str) -> None:
    labels = LabelSet(names_of(scheme, ("A", "B")))
    transitions, start, end = labels.legal_transitions(), labels.legal_start(), labels.legal_end()
    for length in (1, 2, 3):
        for ids in itertools.product(range(len(labels.names)), repeat=length):
            path = np.array(ids)
            legal = start[path[0]] and end[path[-1]] and transitions[path[:-1], path[1:]].all()
            strict = labels.spans(path, "strict")
            covered = sum(span.end - span.start for span in strict) == (labels.roles[path] != 0).sum()
            assert legal == covered, [labels.names[i] for i in ids]


def test_a_tag_that_is_not_in_the_set_is_named() -> None:
    with pytest.raises(DataError, match="tag 'B-X': not one of O, B-A"):
        LabelSet(["O", "B-A"]).encode(["O", "B-X"])
    with pytest.raises(DataError, match="mode: expected lenient or strict, got 'loose'"):
        spans_from_tags(["O"], mode="loose")
