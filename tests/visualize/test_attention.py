"""The weights that pictures show are the model's own, and averages and rollout are what their definitions say."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import minibert
from minibert import BertForTokenClassification, CheckpointError, DataError, MinibertError
from minibert.hub import DEFAULT_MODEL
from minibert.model.attention import ATTENTION_FUNCTIONS
from minibert.text.tokenizer import load_tokenizer
from minibert.visualize import Attention, read_attention
from tagger import write_checkpoint

TEXT = "我住在北京 𠮷 iphone16"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "tagger")
    return tmp_path / "tagger"


def random_attention(layers: int, heads: int, size: int) -> Attention:
    weights = torch.randn(layers, heads, size, size).softmax(-1).numpy()
    return Attention([str(place) for place in range(size)], weights)


def test_weights_are_those_of_transformers(directory: Path) -> None:
    found = read_attention(directory, TEXT)
    reference = transformers.BertModel.from_pretrained(directory, attn_implementation="eager")
    ids = transformers.BertTokenizer.from_pretrained(directory)(TEXT, return_tensors="pt").input_ids
    expected = reference(ids, output_attentions=True).attentions
    assert found.weights.shape == (2, 4, 10, 10)
    assert found.weights.dtype == np.float32
    np.testing.assert_allclose(found.weights, torch.cat(expected).detach().numpy(), atol=1e-6)


def test_weights_are_computed_and_not_none_while_the_model_uses_sdpa(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case A12."""
    model = BertForTokenClassification.from_pretrained(directory)
    called = []
    for name, function in ATTENTION_FUNCTIONS.items():
        spy = lambda *a, name=name, function=function: called.append(name) or function(*a)  # noqa: E731
        monkeypatch.setitem(ATTENTION_FUNCTIONS, name, spy)
    found = read_attention(model, TEXT, load_tokenizer(directory))
    assert called == ["eager", "eager"]
    np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(found.weights, read_attention(directory, TEXT).weights, atol=1e-6)
    ids = torch.tensor([[2, 5, 6, 3]])
    with_weights = model(ids, output_attentions=True)
    assert [w.shape for w in with_weights.attentions] == [(1, 4, 4, 4)] * 2
    assert (with_weights.logits - model(ids).logits).abs().max() < 1e-5


def test_the_model_is_left_as_it_was(directory: Path) -> None:
    model = BertForTokenClassification.from_pretrained(directory).train()
    first = read_attention(model, TEXT, load_tokenizer(directory))
    again = read_attention(model, TEXT, load_tokenizer(directory))
    assert model.training
    assert model.bert.training
    assert np.array_equal(first.weights, again.weights)  # no dropout


def test_tokens_are_the_models_and_unknown_ones_show_their_text(directory: Path) -> None:
    found = read_attention(directory, TEXT)
    assert found.tokens == ["[CLS]", *"我住在北京", "𠮷 [UNK]", "iphone", "##16", "[SEP]"]
    assert found.title == "Attention of tagger"


def test_a_model_trained_on_characters_is_shown_characters() -> None:
    found = read_attention(None, "2024年")
    assert found.tokens == ["[CLS]", *"2024年", "[SEP]"]
    assert found.weights.shape[:2] == (4, 6)
    assert (found.num_layers, found.num_heads) == (4, 6)
    assert len(read_attention(DEFAULT_MODEL, "").tokens) == 2


def test_no_notice_of_a_head_or_a_crf_that_no_picture_needs(caplog: pytest.LogCaptureFixture) -> None:
    read_attention(None, "好")
    assert caplog.text == ""


def test_a_text_of_the_models_length_is_the_longest(directory: Path) -> None:
    assert len(read_attention(directory, "好" * 62).tokens) == 64
    with pytest.raises(DataError, match="65 tokens is longer than max_position_embeddings 64"):
        read_attention(directory, "好" * 63)


def test_a_model_needs_its_tokenizer_and_text_has_to_be_text(directory: Path) -> None:
    with pytest.raises(MinibertError, match="tokenizer: expected the model's tokeniser"):
        read_attention(BertForTokenClassification.from_pretrained(directory), TEXT)
    with pytest.raises(DataError, match="half of a surrogate pair"):
        read_attention(directory, "a\ud800")


def test_heads_are_counted_from_one_and_averaged_without_a_number() -> None:
    attention = random_attention(3, 4, 5)
    assert np.array_equal(attention.head(1, 1), attention.weights[0, 0])
    assert np.array_equal(attention.head(3, 4), attention.weights[2, 3])
    np.testing.assert_allclose(attention.head(2), sum(attention.weights[1]) / 4, atol=1e-7)
    for layer, head, message in ((0, 1, "layer: expected 1 to 3, got 0"), (1, 5, "head: expected 1 to 4, got 5")):
        with pytest.raises(MinibertError, match=message):
            attention.head(layer, head)
    with pytest.raises(MinibertError, match="layer: expected 1 to 3, got 4"):
        attention.head(4)


def test_rollout_is_the_sum_over_all_paths() -> None:
    attention = random_attention(3, 2, 4)
    step = [(attention.head(layer) + np.eye(4)) / 2 for layer in (1, 2, 3)]
    for end, start in itertools.product(range(4), repeat=2):
        paths = itertools.product(range(4), repeat=2)
        expected = sum(step[2][end, b] * step[1][b, a] * step[0][a, start] for a, b in paths)
        assert attention.rollout()[2, end, start] == pytest.approx(expected, abs=1e-6)
    np.testing.assert_allclose(attention.rollout()[0], step[0], atol=1e-6)
    np.testing.assert_allclose(attention.rollout().sum(-1), 1, atol=1e-5)


def test_rollout_of_an_example_by_hand() -> None:
    looks_at_first = np.array([[[[1, 0], [1, 0]]]], dtype=np.float32)
    attention = Attention(["a", "b"], np.repeat(looks_at_first, 2, axis=0))
    np.testing.assert_allclose(attention.rollout(), [[[1, 0], [0.5, 0.5]], [[1, 0], [0.75, 0.25]]])


def test_saving_by_suffix(tmp_path: Path) -> None:
    attention = random_attention(2, 3, 4)
    attention.save(tmp_path / "a.html", 2, 3)
    attention.save(str(tmp_path / "a.png"), 2, 3)
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == attention.to_html(2, 3)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.png"]
    with pytest.raises(MinibertError, match=r"a.pdf: expected a name that ends in .html or .png"):
        attention.save(tmp_path / "a.pdf")
    with pytest.raises(MinibertError, match="layer: expected 1 to 2, got 3"):
        attention.save(tmp_path / "b.html", layer=3)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written to"):
        attention.save(tmp_path / "file" / "a.html")
    assert not (tmp_path / "b.html").exists()


def test_a_notebook_shows_the_page_in_a_frame() -> None:
    attention = random_attention(1, 1, 2)
    shown = attention._repr_html_()
    assert shown.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert shown.count('"') == 4  # nothing of the page ends the attribute


def test_importing_pictures_imports_no_matplotlib_and_no_transformers() -> None:
    code = "import sys, minibert.visualize; print({'matplotlib', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_any_head_can_be_looked_into(directory: Path) -> None:
    tokenizer: Any = load_tokenizer(directory)
    for head in ("BertModel", "BertForMaskedLM", "BertForQuestionAnswering"):
        config = minibert.BertConfig(
            vocab_size=300, hidden_size=20, num_hidden_layers=1, num_attention_heads=4, intermediate_size=33
        )
        model = getattr(minibert, head)(config)
        assert read_attention(model, "好", tokenizer).weights.shape == (1, 4, 3, 3)
