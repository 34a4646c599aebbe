"""Fine-tune a token classifier with the library's parts and a plain `transformers.Trainer`.

python scripts/finetune_ner.py BASE_MODEL TRAIN_FILE DEV_FILE OUTPUT_DIR

The same in one command, with more options: `minibert train RECIPE.toml`.
"""

import sys

import torch
import transformers

from minibert import BertForTokenClassification, TokenClassifier
from minibert.text.labels import LabelSet
from minibert.text.tokenizer import load_tokenizer
from minibert.train.data import read_examples
from minibert.train.evaluate import evaluate
from minibert.train.features import Collator, as_dataset, features
from minibert.train.optimizer import parameter_groups


def main(base: str, train_file: str, dev_file: str, output_dir: str) -> None:
    train, dev = read_examples(train_file), read_examples(dev_file)
    types = sorted({span.label for example in (*train, *dev) for span in example.entities})
    labels = LabelSet(["O", *(f"{prefix}-{name}" for name in types for prefix in "BI")])
    tokenizer = load_tokenizer(base)
    transformers.set_seed(0)
    model = BertForTokenClassification.from_pretrained(
        base, id2label=dict(enumerate(labels.names)), dtype=torch.float32, ignore_mismatched_sizes=True
    )
    model.config.split_mode = "characters"  # every character a token, in training and in use
    rows = features(as_dataset(train), tokenizer, labels, model.config.max_position_embeddings, "characters")
    arguments = transformers.TrainingArguments(
        output_dir=f"{output_dir}/checkpoints",
        num_train_epochs=3,
        per_device_train_batch_size=32,
        lr_scheduler_type="linear",
        warmup_steps=0.1,  # of all steps
        train_sampling_strategy="group_by_length",
        logging_strategy="epoch",
        save_strategy="no",
        report_to=[],
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=Collator(model.config.pad_token_id or 0),
        optimizers=(torch.optim.AdamW(parameter_groups(model, 3e-5, 0.01, head_learning_rate=1e-3)), None),
    )
    trainer.train()
    model.save_pretrained(output_dir)  # the tokeniser's files come along
    for decoder in ("argmax", "viterbi"):
        print(f"== {decoder} ==")
        print(*evaluate(TokenClassifier.from_pretrained(output_dir, decoder=decoder), dev).lines(), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
