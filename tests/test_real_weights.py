"""A real pretrained BERT, all-MiniLM-L6-v2: the numbers of transformers, and similarities that make sense."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from minibert import BertModel
from minibert.parity import compare
from minibert.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.real_weights

SENTENCES = (
    "Hi.",
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A man is riding a horse.",
    "A woman is playing the violin.",
    "Two men pushed carts through the woods.",
    "A man is riding a white horse on an enclosed ground.",
    "A monkey is playing drums.",
    "A cheetah is running behind its prey.",
    "How do I reset the password of my account?",
    "I forgot my login credentials, how can I get access to my account again?",
    "The stock market fell sharply today after the central bank raised interest rates.",
    "Shares dropped as the Fed increased its benchmark rate.",
    "Photosynthesis converts light energy into chemical energy in the leaves of plants.",
    "E = mc² — naïve café, 北京 2024!",
    "one two three " * 20,
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.",
    "word " * 150,
    "No",
)


@pytest.fixture(scope="module")
def inputs(minilm_dir: Path) -> dict[str, Tensor]:
    tokenizer = load_tokenizer(minilm_dir)
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch(list(SENTENCES))
    return {
        "input_ids": torch.tensor([encoding.ids for encoding in encodings]),
        "attention_mask": torch.tensor([encoding.attention_mask for encoding in encodings]),
    }


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_last_hidden_state_is_that_of_transformers(
    implementation: str, minilm_dir: Path, inputs: dict[str, Tensor]
) -> None:
    ours = BertModel.from_pretrained(minilm_dir, attn_implementation=implementation)
    theirs = transformers.BertModel.from_pretrained(
        minilm_dir, dtype=torch.float32, attn_implementation=implementation
    ).eval()
    lengths = inputs["attention_mask"].sum(1)
    assert len(lengths) == 20
    assert (lengths.min(), lengths.max()) == (3, 152)
    with torch.no_grad():
        difference = (ours(**inputs).last_hidden_state - theirs(**inputs).last_hidden_state).abs()
    assert difference[inputs["attention_mask"].bool()].max() < 2e-5


def test_similar_sentences_are_close_and_others_are_not(minilm_dir: Path, inputs: dict[str, Tensor]) -> None:
    model = BertModel.from_pretrained(minilm_dir)
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    means = hidden.sum(1) / inputs["attention_mask"].sum(1, keepdim=True)  # padding is 0 already
    similarity = torch.nn.functional.cosine_similarity(means[:, None], means[None], dim=-1)
    position = {sentence: index for index, sentence in enumerate(SENTENCES)}

    def between(start: str, other: str) -> float:
        first, second = (next(i for s, i in position.items() if s.startswith(x)) for x in (start, other))
        return similarity[first, second].item()

    related = [
        ("A man is eating food", "A man is eating a piece"),
        ("A man is riding a horse", "A man is riding a white horse"),
        ("How do I reset", "I forgot my login"),
        ("The stock market", "Shares dropped"),
    ]
    unrelated = [
        ("A man is eating food", "The stock market"),
        ("How do I reset", "A cheetah"),
        ("Photosynthesis", "I forgot my login"),
        ("A woman is playing the violin", "Shares dropped"),
    ]
    assert min(between(*sentences) for sentences in related) > 0.5
    assert max(between(*sentences) for sentences in unrelated) < 0.2


def test_parity_holds_at_every_module_of_it(minilm_dir: Path) -> None:
    report = compare(minilm_dir, texts=SENTENCES)
    assert report.is_within, report.first
    assert report.num_texts == 21  # and a pair
    assert [row.name for row in report.rows][-4:] == [
        "encoder.layer.5.output",
        "pooler",
        "last_hidden_state",
        "pooler_output",
    ]
    assert max(row.largest / max(1, row.scale) for row in report.rows) < 2e-5
    assert all(0 <= row.mean <= row.largest for row in report.rows)
    assert any(row.mean > 0 for row in report.rows)  # two programs, not one compared with itself
