"""Time an epoch of training beside two ways of doing the same with transformers' own model.

python scripts/benchmark_training.py TRAIN_FILE TOKENIZER [--rounds 3] [--texts 1000] [--json]

A 4-layer BERT (hidden 256, as configs/tiny-4-layer.json) from scratch, characters, batches of 32 texts:

  minibert      this package's model, rows and collator in a plain `transformers.Trainer`, texts grouped by length
  sorted loop   transformers' model in a plain PyTorch loop, texts sorted by length with noise, padded
  Trainer       transformers' model in `transformers.Trainer` with its default sampler and collator

The three take turns, so that what else the machine does hits them alike. Let nothing else run.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from minibert import BertConfig, BertForTokenClassification
from minibert.text.labels import LabelSet
from minibert.text.tokenizer import load_tokenizer
from minibert.train.data import read_examples
from minibert.train.features import Collator, as_dataset, features

CONFIG = Path(__file__).parent.parent / "configs" / "tiny-4-layer.json"
BATCH = 32
RATE = 5e-4


def arguments(folder: str, **options: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        output_dir=folder,
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        warmup_steps=100,
        use_cpu=not torch.accelerator.is_available(),
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )


def ours(rows: Any, names: dict[int, str], folder: str) -> float:
    model = BertForTokenClassification(BertConfig.from_pretrained(CONFIG, id2label=names))
    settings = arguments(folder, train_sampling_strategy="group_by_length", dataloader_pin_memory=False)
    trainer = transformers.Trainer(model, settings, train_dataset=rows, data_collator=Collator())
    trainer.remove_callback(transformers.PrinterCallback)
    start = time.perf_counter()
    trainer.train()
    return time.perf_counter() - start


def theirs(names: dict[int, str]) -> Any:
    config = transformers.BertConfig.from_pretrained(CONFIG, id2label=names)
    return transformers.BertForTokenClassification(config)


def default_trainer(rows: Any, names: dict[int, str], folder: str, tokenizer: Any) -> float:
    collator = transformers.DataCollatorForTokenClassification(tokenizer)
    settings = arguments(folder, dataloader_pin_memory=False)
    trainer = transformers.Trainer(theirs(names), settings, train_dataset=rows, data_collator=collator)
    trainer.remove_callback(transformers.PrinterCallback)
    start = time.perf_counter()
    trainer.train()
    return time.perf_counter() - start


def sorted_loop(rows: Any, names: dict[int, str]) -> float:
    model = theirs(names).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    steps = -(-len(rows) // BATCH)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 100, steps)
    items = [dict(row) for row in rows]
    start = time.perf_counter()
    order = sorted(range(len(items)), key=lambda n: len(items[n]["input_ids"]) * random.uniform(0.9, 1.1))  # noqa: S311
    batches = [order[n : n + BATCH] for n in range(0, len(order), BATCH)]
    random.shuffle(batches)
    collate = Collator()
    for batch in batches:
        loss = model(**collate([items[n] for n in batch])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train_file", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, help="only so many of them")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    examples = read_examples(options.train_file)[: options.texts]
    types = sorted({span.label for example in examples for span in example.entities})
    labels = LabelSet(["O", *(f"{letter}-{name}" for name in types for letter in "BI")])
    names = dict(enumerate(labels.names))
    rows = features(as_dataset(examples), load_tokenizer(options.tokenizer), labels, 180, "characters")
    rows = rows.select_columns(["input_ids", "labels", "length"])
    tokenizer = transformers.BertTokenizer.from_pretrained(options.tokenizer)
    seconds: dict[str, list[float]] = {"minibert": [], "sorted loop": [], "Trainer": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.rounds):
            transformers.set_seed(seed)
            seconds["minibert"].append(ours(rows, names, folder))
            seconds["sorted loop"].append(sorted_loop(rows, names))
            seconds["Trainer"].append(default_trainer(rows.remove_columns("length"), names, folder, tokenizer))
    medians = {name: statistics.median(of) for name, of in seconds.items()}
    pairs = {name: zip(seconds["minibert"], of, strict=True) for name, of in seconds.items()}
    ratios = {name: statistics.median(mine / other for mine, other in pair) for name, pair in pairs.items()}
    if options.json:
        print(json.dumps({"seconds": seconds, "ratios": ratios, "threads": torch.get_num_threads()}))
        return
    processor = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    print(f"{len(rows)} texts, {sum(rows['length']):,} tokens; {processor}")
    for name, of in seconds.items():
        times = f"median {medians[name]:7.2f} s  minimum {min(of):7.2f} s"
        print(f"{name:12} {times}  minibert takes {ratios[name]:.2f} of it")


if __name__ == "__main__":
    main()
