"""Write a small checkpoint with the 18-label config: random weights, and a vocabulary for a few Chinese sentences.

python scripts/write_demo_checkpoint.py DIRECTORY
"""

import sys
from pathlib import Path

import torch

from minibert import BertConfig, BertForTokenClassification

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "bert-base-chinese-18.json"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
HAN = "一三上下东中之乐了二五京人今他们公内北医十华南友口司名后商国在城大天女好学家小居山川工市平年广建开张志我战放政方日明是月有本李来村杭林武民水江河法海清港湖湾父王生男的真社科第米红美老自英行西议让记许诗语谢路车边过这连里重金长门院陈青音高"
OTHER = "，。！？：；、（）0123456789abcdefghijklmnopqrstuvwxyz住成立天气很暴明爱喜欢"


def main(directory: str) -> None:
    characters = list(dict.fromkeys(HAN + OTHER))  # each once, in order
    vocabulary = [*SPECIAL, *characters, *(f"##{c}" for c in characters if c.isascii())]
    config = BertConfig.from_pretrained(CONFIG).replace(
        vocab_size=len(vocabulary),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    model = BertForTokenClassification(config)
    model.save_pretrained(directory)
    (Path(directory) / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    print(f"{directory}: {model.num_parameters():,} random parameters, {len(vocabulary)} tokens, 18 labels")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
