"""Sums of events by stored key: also where a segment holds only keys that were new, and so no numbers of keys."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform


@pytest.mark.parametrize("commits", [(), (1,), (1, 5), (2, 3, 9)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_weights_are_rebuilt_whatever_the_segments(commits: tuple[int, ...], sign: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = sign * (1 + torch.rand(8, 6))  # one key an example, in every epoch
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(1, 13):
            ids = torch.arange(4) + 4 * (step % 2)
            with recorder.batch(ids):
                F.cross_entropy(model(inputs[ids]), ids % 3).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in commits:
                recorder.commit()
    memory = dualform.open(tmp_path / "run")
    for name, value in memory.weights().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-5, atol=1e-6)
    assert memory.certificate().exact
