#!/usr/bin/env bash
# The main job, from nothing: writes a small checkpoint, finds entities in Chinese sentences with it, and compares its
# numbers with those of transformers.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
install -e . transformers

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

.venv/bin/python scripts/write_demo_checkpoint.py "$work/checkpoint"
echo
echo "== minibert predict: text in, entities out =="
.venv/bin/minibert predict --model "$work/checkpoint" 王小明住在北京。 上海第一人民医院2024年成立
echo
echo "The entities above are those of an UNTRAINED head: they mean nothing yet. What is real is the way to them:"
echo "config, checkpoint, tokeniser, encoder, 18-label head, and places in the text that are exact."
echo
echo "== minibert parity: the same checkpoint in transformers =="
.venv/bin/minibert parity "$work/checkpoint"
