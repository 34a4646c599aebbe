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
# Parts that any name may have, and words that there are few of.
CLOSED = {"surnames", "double_surnames", "nickname_prefixes", "company_suffixes", "generic_orgs", "school_suffixes"}
CLOSED |= {"races", "hospitals"}

sys.path.insert(0, str(SCRIPTS))
from default_model.generate import Generator, common_characters  # noqa: E402
from default_model.marks import parse, read_marked  # noqa: E402


def generator(kind: str, seed: int = 0) -> Generator:
    prefix = "" if kind == "training" else "heldout_"
    return Generator(FOLDER / f"{prefix}lists.toml", FOLDER / f"{prefix}templates.txt", seed, novelty=0.25)


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
    ours, theirs = (tomllib.loads((FOLDER / name).read_text("utf-8")) for name in ("lists.toml", "heldout_lists.toml"))
    assert ours.keys() == theirs.keys()
    shared = {key: set(ours[key]) & set(theirs[key]) for key in ours.keys() - CLOSED}
    assert {key: words for key, words in shared.items() if words} == {}
    training, held_out = (
        {template for of in generator(kind).templates.values() for template in of} for kind in ("training", "heldout")
    )
    assert not training & held_out


def test_hand_written_sentences_are_many_and_of_every_type() -> None:
    texts = read_marked(HAND_WRITTEN)
    assert len(texts) >= 200
    assert {span.label for text in texts for span in text.spans} == TYPES
    assert not any(character in text.text for text in texts for character in "[]")
    assert len({text.text for text in texts}) == len(texts)
    known = {
        template for kind in ("training", "heldout") for of in generator(kind).templates.values() for template in of
    }
    assert not known & {text.text for text in texts}


def test_marks_are_read_as_spans() -> None:
    text = parse("[NAME 王小明]住在[LOC 北京]。")
    assert text.text == "王小明住在北京。"
    assert text.spans == (("NAME", 0, 3), ("LOC", 5, 7))


def test_common_characters_are_those_of_gb_2312() -> None:
    characters = common_characters()
    assert (len(characters), len(set(characters)), characters[0]) == (6763, 6763, "啊")
