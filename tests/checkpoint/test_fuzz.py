"""Damaged files by the thousand: an error that is ours, or exactly the weights that the file holds."""

from __future__ import annotations

import json
import random
import struct
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import integers

from minibert import BertConfig, BertForTokenClassification, MinibertError

HEADERS, CONFIGS = 20_000, 2_000
SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 6,
    "max_position_embeddings": 5,
    "num_labels": 3,
}
TOKENS = (b'"', b"{", b"}", b"[", b"]", b",", b"-", b"e", b"\\", b"\xff", b"null")
LONGEST = 2.0  # seconds for one file, on a machine that others use too


def mutated(content: bytes, rng: random.Random) -> bytes:
    """One to three changes of the kinds that broken transfers, editors and attackers make."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data)) if data else 0
        length = rng.choice((1, 1, 2, 8, 40))
        match rng.randrange(8):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : at + length]
            case 2:
                data[at:at] = rng.randbytes(length)
            case 3:
                data[at:at] = data[at : at + length]
            case 4:
                other = rng.randrange(len(data)) if data else 0
                data[at : at + length], data[other : other + length] = (
                    data[other : other + length],
                    data[at : at + length],
                )
            case 5:
                digits = [index for index, byte in enumerate(data) if 48 <= byte <= 57]
                if digits:
                    data[rng.choice(digits)] = rng.choice(b"0123456789")
            case 6:
                data[at : at + 1] = rng.choice(
                    (b'"', b"{", b"}", b"[", b"]", b",", b"-", b"e", b"\\", b"\xff", b"null")
                )
            case _:
                del data[at:]
    return bytes(data)


def tensors_of(content: bytes) -> dict[str, tuple[list[int], bytes]]:
    """Shape and bytes of every tensor in a safetensors file, read by hand."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    data = content[8 + length :]
    return {
        name: (entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def by_the_thousand(examples: int) -> Callable[..., Any]:
    """The same seeds in every run; one that fails is named, and a hang is a failure too."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=timedelta(seconds=LONGEST),
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def test_mutated_headers(tmp_path: Path) -> None:
    BertForTokenClassification(BertConfig(**SIZES)).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    seen: Counter[str] = Counter()

    @by_the_thousand(HEADERS)
    @given(integers(0, 2**64 - 1))
    def check(seed: int) -> None:
        rng = random.Random(seed)
        if rng.random() < 0.9:  # the header, with a length that tells the truth or does not
            header = mutated(whole[8 : 8 + length], rng)
            stated = (
                len(header) if rng.random() < 0.8 else rng.choice((0, 7, length, 2**31, 2**63, rng.randrange(2**64)))
            )
            content = struct.pack("<Q", stated) + header + whole[8 + length :]
        else:
            content = mutated(whole, rng)
        path.unlink()  # never written over: a mapped file that shrinks would end the process
        path.write_bytes(content)
        try:
            model = BertForTokenClassification.from_pretrained(tmp_path, dtype=torch.float32)
        except MinibertError as error:
            seen["refused"] += str(tmp_path) in str(error)
            return
        seen["loaded"] += 1
        stored = tensors_of(content)
        for name, tensor in model.state_dict().items():
            if name in stored:
                assert stored[name] == (list(tensor.shape), as_bytes(tensor)), name
            else:
                assert name.startswith("classifier."), name  # a head that is not there starts anew

    check()
    assert seen["refused"] > HEADERS // 2
    assert seen["loaded"] > 0
    assert seen.total() >= HEADERS


def test_mutated_configs(tmp_path: Path) -> None:
    BertForTokenClassification(BertConfig(**SIZES)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    whole = path.read_bytes()
    values: list[Any] = [None, True, False, 0, -1, 1, 3, 10**30, 0.5, float("nan"), "", "3", "gelu", []]
    values += [{}, [1], {"a": 1}, {"0": "x"}]
    seen: Counter[str] = Counter()

    @by_the_thousand(CONFIGS)
    @given(integers(0, 2**64 - 1))
    def check(seed: int) -> None:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            content = mutated(whole, rng)
        else:
            data = json.loads(whole)
            for _ in range(rng.randint(1, 3)):
                data[rng.choice([*data, "is_decoder", "torch_dtype", "extra"])] = rng.choice(values)
            content = json.dumps(data).encode()
        path.write_bytes(content)
        try:
            model = BertForTokenClassification.from_pretrained(tmp_path)
        except MinibertError:
            seen["refused"] += 1
            return
        seen["loaded"] += 1
        assert model.config.hidden_size == SIZES["hidden_size"]
        assert model.classifier.weight.shape == (model.config.num_labels, 4)

    check()
    assert seen["refused"] > CONFIGS // 4
    assert seen["loaded"] > CONFIGS // 20
    assert seen.total() >= CONFIGS
