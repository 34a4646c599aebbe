"""What the default model is to be trained and judged on: exact, reproducible, and kept apart."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tomllib

SCRIPTS = Path(__file__).parent.parent / "scripts"
FOLDER = SCRIPTS / "default_model"
HAND_WRITTEN = Path(__file__).parent / "default_model_sentences.txt"
TYPES = {"NAME", "ORG", "TITLE", "EDU", "CONT", "LOC", "PRO", "RACE"}
# Lists that are complete by nature, or parts that any name may have: the held-out sentences share them.
CLOSED = {
    *("surnames", "double_surnames", "nickname_prefixes", "kin_suffixes", "provinces", "countries", "nationalities"),
    *("races", "degrees", "company_suffixes", "company_branches", "generic_orgs", "department_kinds"),
    *("school_suffixes", "hospitals", "government_departments", "hospital_departments", "title_ranks"),
    *("title_prefixes", "titles_party", "titles_short", "rank_fields"),
}

sys.path.insert(0, str(SCRIPTS))
from default_model.generate import SLOT, Generator, read_templates  # noqa: E402
from default_model.marks import parse, read_marked  # noqa: E402
from default_model.words import common_characters, read_lists  # noqa: E402


def generator(kind: str, seed: int = 0, novelty: float = 0.25) -> Generator:
    return Generator(kind, seed, novelty)


@pytest.mark.parametrize("kind", ["training", "heldout"])
def test_every_template_can_be_filled_and_its_entities_are_where_they_are_said(kind: str) -> None:
    made = generator(kind)
    found = set()
    for templates in made.templates.values():
        for template in templates:
            text = made.fill(template)
            assert "{" not in text.text
            ends = [0, *(span.end for span in text.spans)]
            assert all(
                end <= span.start < span.end <= len(text.text) for end, span in zip(ends, text.spans, strict=False)
            )
            assert all(text.text[span.start : span.end].strip() for span in text.spans)
            found |= {span.label for span in text.spans}
    assert found == TYPES


def test_a_seed_gives_the_same_sentences_and_another_gives_others() -> None:
    first, again, other = (list(generator("training", seed).sentences(50)) for seed in (1, 1, 2))
    assert first == again != other
    assert len({text.text for text in generator("training").sentences(500)}) > 450


def test_sentences_hold_no_entity_one_time_in_eight_or_more() -> None:
    texts = list(generator("training").sentences(1000))
    assert sum(not text.spans for text in texts) > 125
    assert {span.label for text in texts for span in text.spans} == TYPES


def test_what_is_held_out_is_in_no_training_list_or_template() -> None:
    ours, theirs = (read_lists(FOLDER / kind / "lists") for kind in ("training", "heldout"))
    assert ours.keys() - theirs.keys() == CLOSED
    assert theirs.keys() < ours.keys()
    shared = {key: set(ours[key]) & set(theirs[key]) for key in theirs}
    assert {key: words for key, words in shared.items() if words} == {}
    training, held_out = ({line for of in read_templates(FOLDER / kind).values() for line in of} for kind in ("training", "heldout"))
    assert not training & held_out


@pytest.mark.parametrize("kind", ["training", "heldout"])
def test_templates_hold_no_entity_outside_a_slot(kind: str) -> None:
    unlabelled = set("老师 记者 司机 医生 董事长 总经理 中共党员 本科 硕士 博士 汉族 中国 北京 上海 美国".split())
    for template in (line for of in read_templates(FOLDER / kind).values() for line in of):
        plain = SLOT.sub("|", template)
        assert not [word for word in unlabelled if word in plain], template


def test_hand_written_sentences_are_many_and_of_every_type() -> None:
    texts = read_marked(HAND_WRITTEN)
    assert len(texts) >= 200
    assert {span.label for text in texts for span in text.spans} == TYPES
    assert not any(character in text.text for text in texts for character in "[]")
    assert len({text.text for text in texts}) == len(texts)
    known = {line for kind in ("training", "heldout") for of in read_templates(FOLDER / kind).values() for line in of}
    assert not known & {text.text for text in texts}


def test_marks_are_read_as_spans() -> None:
    text = parse("[NAME 王小明]住在[LOC 北京]。")
    assert text.text == "王小明住在北京。"
    assert text.spans == (("NAME", 0, 3), ("LOC", 5, 7))


def test_common_characters_are_those_of_gb_2312() -> None:
    characters = common_characters()
    assert (len(characters), len(set(characters)), characters[0]) == (6763, 6763, "啊")
