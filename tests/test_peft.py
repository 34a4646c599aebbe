"""LoRA by PEFT, with its own defaults for BERT: trained, saved, loaded on the base model, merged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, TaskType, get_peft_model

from minibert import BertForTokenClassification, TokenClassifier
from minibert.train.features import Collator
from minibert.train.optimizer import parameter_groups
from tagger import write_checkpoint

ROWS = [{"input_ids": [2, 9, 7 + n, 8, 3], "labels": [-100, 1, n % 3, 0, -100]} for n in range(8)]
IDS = torch.tensor([[2, 9, 7, 8, 3], [2, 10, 11, 3, 0]])
REAL = (IDS > 0)[:, :, None]  # at padding transformers has some numbers, we have 0


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "base", initializer_range=0.1)
    return tmp_path / "base"


def adapted(model: BertForTokenClassification) -> PeftModel:
    return get_peft_model(model, LoraConfig(task_type=TaskType.TOKEN_CLS, r=4))


def trained(base: Path, folder: Path) -> PeftModel:
    model = adapted(BertForTokenClassification.from_pretrained(base))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "run"), max_steps=5, learning_rate=1e-2, use_cpu=True, report_to=[], save_steps=5
    )
    transformers.Trainer(model=model, args=arguments, train_dataset=ROWS, data_collator=Collator()).train()
    return model.eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=(IDS > 0).long()).logits  # type: ignore[no-any-return]


def test_default_targets_are_query_and_value_and_the_classifier_is_kept(base: Path) -> None:
    model = adapted(BertForTokenClassification.from_pretrained(base))
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[-4] for name in trainable if "lora" in name} == {"query", "value"}
    assert {name for name in trainable if "lora" not in name} == {
        f"base_model.model.classifier.modules_to_save.default.{part}" for part in ("weight", "bias")
    }
    assert {group["lr"] for group in parameter_groups(model, 1.0, 0.0, head_learning_rate=5.0)} == {1.0, 5.0}


def test_saved_and_loaded_on_the_base_it_says_the_same(base: Path, tmp_path: Path) -> None:  # H03
    files = {path.name: path.read_bytes() for path in base.iterdir()}
    model = trained(base, tmp_path)
    expected = logits(model)
    assert not torch.allclose(expected, logits(BertForTokenClassification.from_pretrained(base)), atol=1e-2)
    model.save_pretrained(str(tmp_path / "adapter"))
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    for folder in (tmp_path / "adapter", tmp_path / "run" / "checkpoint-5"):
        again = PeftModel.from_pretrained(BertForTokenClassification.from_pretrained(base), str(folder)).eval()
        torch.testing.assert_close(logits(again), expected, atol=1e-6, rtol=0)
    assert {path.name: path.read_bytes() for path in base.iterdir()} == files
    theirs = transformers.BertForTokenClassification.from_pretrained(base, dtype=torch.float32)
    with_theirs = PeftModel.from_pretrained(theirs, str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(logits(with_theirs) * REAL, expected, atol=1e-5, rtol=0)


def test_merged_it_is_a_checkpoint_like_any_other(base: Path, tmp_path: Path) -> None:
    model = trained(base, tmp_path)
    expected = logits(model)
    merged = model.merge_and_unload()
    assert isinstance(merged, BertForTokenClassification)
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=0)
    merged.save_pretrained(tmp_path / "merged")
    again = TokenClassifier.from_pretrained(tmp_path / "merged").model
    torch.testing.assert_close(logits(again), expected, atol=1e-5, rtol=0)
    theirs = transformers.BertForTokenClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    torch.testing.assert_close(logits(theirs) * REAL, expected, atol=1e-5, rtol=0)
