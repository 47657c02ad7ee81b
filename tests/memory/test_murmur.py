"""Hashes of keys by a compiled loop: those of MurmurHash3, and a ledger that finds the same repeated keys by them."""

import numpy as np
import pytest
import torch

from dualform.memory import ledger
from dualform.memory.ledger import Ledger

murmur = pytest.importorskip("dualform.memory.murmur")
WORD = (1 << 64) - 1


def turned(value: int, by: int) -> int:
    return (value << by | value >> 64 - by) & WORD


def mixed(value: int) -> int:
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD & WORD
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 & WORD
    return value ^ value >> 33


def plainly(words: list[int]) -> tuple[int, int]:
    """MurmurHash3, x64, 128 bits, seed 0, in whole numbers without end."""
    a = b = 0
    for k, m in zip(words[::2], words[1::2], strict=True):
        a ^= turned(k * 0x87C37B91114253D5 & WORD, 31) * 0x4CF5AD432745937F & WORD
        a = ((turned(a, 27) + b & WORD) * 5 + 0x52DCE729) & WORD
        b ^= turned(m * 0x4CF5AD432745937F & WORD, 33) * 0x87C37B91114253D5 & WORD
        b = ((turned(b, 31) + a & WORD) * 5 + 0x38495AB5) & WORD
    a, b = a ^ 8 * len(words), b ^ 8 * len(words)
    a = a + b & WORD
    b = b + a & WORD
    a, b = mixed(a), mixed(b)
    a = a + b & WORD
    return a, b + a & WORD


@pytest.mark.parametrize("width", [2, 4, 10, 392])
def test_a_hash_is_that_of_the_algorithm(width: int) -> None:
    rows = np.random.default_rng(width).integers(0, 1 << 64, (20, width), dtype=np.uint64)
    rows[0], rows[1] = 0, WORD
    result = np.empty((20, 2), dtype=np.uint64)
    murmur.hash_rows(rows, result)
    assert [tuple(map(int, one)) for one in result] == [plainly(list(map(int, row))) for row in rows]


@pytest.mark.parametrize(
    "width, dtype", [(1, torch.float32), (5, torch.float32), (8, torch.float64), (3, torch.bfloat16)]
)
def test_a_ledger_finds_the_same_repeated_keys(width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    found = []
    examples = torch.randint(30, (6, 40), generator=generator).numpy()
    keys = torch.randn(30, width, generator=generator).to(dtype)
    for many in (0, 1 << 60):
        monkeypatch.setattr(ledger, "MANY", many)
        book, answers = Ledger(), []
        for number, ids in enumerate(examples):
            rows = keys[torch.from_numpy(ids)].clone()
            if number == 3:
                rows[::4] += 1  # changed: new keys for these examples
            new, numbers = book.enter([rows[:10], rows[10:]], ids, np.zeros_like(ids))
            answers.append((new.tolist(), numbers.tolist()))
        assert (book._loop is not None) == (many == 0)
        found.append(answers)
    assert found[0] == found[1]
    assert not all(found[0][1][0]), "some keys came again"
