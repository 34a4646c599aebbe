"""From nothing to a first answer: whole processes, their time and the most memory they held."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from minibert.bench.peers import Setting

TEXT = "王小明住在北京。"
PIPELINE = """
import sys, torch, transformers
transformers.pipeline("token-classification", model=sys.argv[1], dtype=torch.float32, device="cpu")(sys.argv[2])
"""
FLOOR = """
import sys, torch
open(sys.argv[1] + "/model.safetensors", "rb").read()
"""


def first_answers(setting: Setting) -> dict[str, list[str]]:
    """Commands by name; the floor imports torch and reads the weights, and answers nothing."""
    folder = str(setting.checkpoint)
    python = [sys.executable, "-c"]
    return {
        "floor": [*python, FLOOR, folder],
        "minibert fp32": [sys.executable, "-m", "minibert.cli", "predict", "--model", folder, TEXT],
        "minibert int8": [
            sys.executable,
            "-m",
            "minibert.cli",
            "predict",
            "--precision",
            "int8",
            "--model",
            folder,
            TEXT,
        ],
        "pipeline": [*python, PIPELINE, folder, TEXT],
    }


def timed(command: list[str], threads: int) -> tuple[float, float]:
    """Seconds and megabytes of a command.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    with Path(os.devnull).open("wb") as hole:
        process = subprocess.Popen(command, stdout=hole, stderr=hole, env=environment)  # noqa: S603  # our own command
        _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return seconds, usage.ru_maxrss / 1e3  # which Linux gives in thousands of bytes
