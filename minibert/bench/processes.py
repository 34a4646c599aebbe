"""From nothing to a first answer: whole processes, their time and the most memory they held."""

from __future__ import annotations

import os
import subprocess
import sys

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
LOADED = """
import sys, torch
from minibert import BertForTokenClassification
model = BertForTokenClassification.from_pretrained(sys.argv[1], dtype=torch.float32)
print(sum(parameter.sum().item() for parameter in model.parameters()))
"""
LOADED_BY_TRANSFORMERS = LOADED.replace("from minibert", "from transformers")
LAUNCHER = """
import os, subprocess, sys, time
start = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(os.waitstatus_to_exitcode(status), time.perf_counter() - start, usage.ru_maxrss)
"""


def predict_command(folder: str, *options: str) -> list[str]:
    """`minibert predict` of one sentence by the model of a folder."""
    return [sys.executable, "-m", "minibert.cli", "predict", "--model", folder, *options, TEXT]


def first_answers(setting: Setting) -> dict[str, list[str]]:
    """Commands by name; the floor imports torch and reads the weights, and answers nothing."""
    folder = str(setting.checkpoint)
    python = [sys.executable, "-c"]
    return {
        "floor": [*python, FLOOR, folder],
        "minibert fp32": predict_command(folder),
        "minibert int8": predict_command(folder, "--precision", "int8"),
        "pipeline": [*python, PIPELINE, folder, TEXT],
    }


def loadings(setting: Setting) -> dict[str, list[str]]:
    """Commands by name; each reads every weight, which a mapped file else puts off."""
    command = [sys.executable, "-c"]
    folder = str(setting.checkpoint)
    return {"minibert": [*command, LOADED, folder], "transformers": [*command, LOADED_BY_TRANSFORMERS, folder]}


def timed(command: list[str], threads: int) -> tuple[float, float]:
    """Seconds and megabytes of a command.

    A small process in between starts it, because a new process counts the memory of the one that it was forked from.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    launcher = [sys.executable, "-S", "-c", LAUNCHER, *command]
    told = subprocess.run(launcher, env=environment, capture_output=True, text=True, check=True).stdout  # noqa: S603
    status, seconds, peak = told.split()
    if int(status):
        raise subprocess.CalledProcessError(int(status), command)
    return float(seconds), megabytes(int(peak))


def megabytes(peak: int) -> float:
    """What `ru_maxrss` is in: kilobytes, and on a Mac bytes."""
    return peak / (1e6 if sys.platform == "darwin" else 1e3)
