"""Write a small checkpoint with the 18-label config: random weights, and a vocabulary for any Chinese sentence.

python scripts/write_demo_checkpoint.py DIRECTORY
"""

import string
import sys
from pathlib import Path

import torch

from minibert import BertConfig, BertForTokenClassification

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "bert-base-chinese-18.json"
TYPES = ("PER", "LOC", "ORG", "GPE", "TIME", "TITLE", "WORK", "PRODUCT")
LABELS = ("O", *(f"{prefix}-{label}" for label in TYPES for prefix in "BI"), "[PAD]")  # 18
LATIN = string.ascii_lowercase + string.digits


def main(directory: str) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    han = [chr(code) for code in range(0x4E00, 0xA000)]  # the block of CJK Unified Ideographs
    vocabulary = [*special, *han, *"，。！？：；、（）《》", *LATIN, *(f"##{character}" for character in LATIN)]
    config = BertConfig.from_pretrained(CONFIG).replace(
        vocab_size=len(vocabulary),
        id2label=dict(enumerate(LABELS)),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        initializer_range=0.1,  # larger than BERT's, so that even untrained labels differ from token to token
    )
    torch.manual_seed(0)
    model = BertForTokenClassification(config)
    model.save_pretrained(directory)
    (Path(directory) / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    print(f"{directory}: {model.num_parameters():,} random parameters, {len(vocabulary):,} tokens, 18 labels")


if __name__ == "__main__":
    main(*sys.argv[1:])
