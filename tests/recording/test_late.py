"""After many everyday steps, steps are judged some at a time: with the same result, whatever happens among them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.recording import stepping
from small import batch, network, run

STEPS = 120  # 32 at once, then 64 and 24 at a time
Edit = Callable[[nn.Module, int], None]


def clip(model: nn.Module, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def noise(model: nn.Module, step: int) -> None:
    if step == 50:
        model[2].weight.grad += 0.01 * torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def decay(model: nn.Module, step: int) -> None:
    """What an L2 term that the user's loss has from step 50 on adds to the gradients."""
    if step >= 50:
        for parameter in model.parameters():
            parameter.grad += 0.03 * parameter.detach()


def skip(model: nn.Module, step: int) -> None:
    if step in (50, 51):
        model[0].weight.grad = None


def double(model: nn.Module, step: int) -> None:
    """Every layer at a scale of its own, for a while."""
    if step in (50, 60):
        model[0].weight.grad *= 0.3


CASES: dict[str, Edit] = {
    "plain": lambda *_: None,
    "clip": clip,
    "noise": noise,
    "decay": decay,
    "skip": skip,
    "double": double,
}


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "CALM", 10**9)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_judged_late_is_judged_as_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, dtype: torch.dtype
) -> None:
    late_model, late = run(tmp_path / "late", steps=STEPS, before_step=CASES[case], dtype=dtype)
    at_once(monkeypatch)
    model, plain = run(tmp_path / "plain", steps=STEPS, before_step=CASES[case], dtype=dtype)
    assert all(a.equal(b) for a, b in zip(late_model.parameters(), model.parameters(), strict=True))
    for name in ("flags", "digests", "optimizers"):
        assert (getattr(late.journal, name) == getattr(plain.journal, name)).all(), name
    (numbers, scales), (other_numbers, other_scales) = late.journal._passes, plain.journal._passes
    assert (numbers == other_numbers).all()
    assert abs(scales - other_scales).max() <= (1e-6 if dtype == torch.float32 else 1e-13)
    assert abs(late.journal.settings - plain.journal.settings).max() <= (1e-5 if dtype == torch.float32 else 1e-11)
    assert [(f.parameter, f.kind, f.since, f.step) for f in late.manifest.findings] == [
        (f.parameter, f.kind, f.since, f.step) for f in plain.manifest.findings
    ]
    for row, other in zip(late.certificate(), plain.certificate(), strict=True):
        assert row.exact == other.exact
        assert row.exact == (case != "noise" or row.weight != "2.weight")
        assert row.exact <= (row.residual <= 10 * row.rounding)


def test_steps_really_wait(tmp_path: Path) -> None:
    """The tests above would prove nothing if no step were judged late."""
    judged: list[tuple[int, int]] = []

    def note(self: Any, step: Any, fits: Any, row: Any = stepping.Stepping._row) -> Any:
        judged.append((step.number, self.steps))
        return row(self, step, fits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stepping.Stepping, "_row", note)
        run(tmp_path / "run", steps=STEPS, dtype=torch.float32)
    assert [number for number, _ in judged] == list(range(1, STEPS + 1))
    assert max(now - number for number, now in judged) == stepping.AT_A_TIME - 1
    assert all(now == number for number, now in judged[: stepping.CALM])


def test_a_step_that_breaks_a_premise_late_is_named(tmp_path: Path) -> None:
    _, memory = run(tmp_path / "run", steps=STEPS, before_step=noise, dtype=torch.float32)
    (finding,) = memory.manifest.findings
    assert (finding.parameter, finding.kind, finding.since, finding.step) == ("2.weight", "unexplained", 49, 50)


def test_an_edit_of_a_weight_among_steps_that_wait_is_found_at_its_step(tmp_path: Path) -> None:
    def edit(model: nn.Module, step: int) -> None:
        if step == 55:
            with torch.no_grad():
                model[0].weight[0, 0] += 0.1

    _, memory = run(tmp_path / "run", steps=STEPS, after_step=edit, dtype=torch.float32)
    (finding,) = memory.manifest.findings
    assert (finding.kind, finding.since, finding.step) == ("edited", 55, 56)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_commit_takes_the_steps_that_wait(tmp_path: Path, dtype: torch.dtype) -> None:
    model = network(dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(1, 76):
            ids, x, y = batch(step, dtype=dtype)
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (40, 75):
                recorder.commit()
                memory = dualform.open(tmp_path / "run")
                assert memory.steps == step
                rebuilt = memory.weights()["0.weight"]
                assert torch.allclose(rebuilt, model[0].weight, rtol=0, atol=1e-5)
    assert dualform.open(tmp_path / "run").certificate().exact


def test_events_that_are_not_finite_are_counted_late_too(tmp_path: Path) -> None:
    def spoil(model: nn.Module, step: int) -> None:
        for parameter in model.parameters():
            parameter.grad.nan_to_num_(0.0)

    model = network(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(1, 61):
            ids, x, y = batch(step, dtype=torch.float32)
            if step == 50:
                x[0, 0] = torch.nan
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            spoil(model, step)
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    assert memory.steps == 60
    assert memory.manifest.nonfinite > 0
    assert all(finding.step == 50 for finding in memory.manifest.findings)


class Alternating(nn.Module):
    """One weight, used by one of two layers at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)
        self.other.weight = self.one.weight
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.one(x) if self.calls % 2 else self.other(x)


def test_a_tied_weight_used_through_one_layer_and_then_another_is_exact(tmp_path: Path) -> None:
    _, memory = run(tmp_path / "run", Alternating(), steps=STEPS, dtype=torch.float32)
    assert memory.certificate().exact
    uses = torch.cat([block.uses for block in memory.blocks(0, STEPS)])
    assert uses.reshape(STEPS, -1)[:, 0].tolist() == [0, 1] * (STEPS // 2)


def test_a_single_number_is_never_taken_for_everyday(tmp_path: Path) -> None:
    """One equation accepts any scale: what noise did to it must not pass for clipping, however calm it was before."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(1, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.pad(self.layer(x[:, :1]), (0, 3))

    def bend(model: nn.Module, step: int) -> None:
        if step == 80:
            model.layer.weight.grad *= 1.37

    _, memory = run(tmp_path / "run", One(), steps=STEPS, before_step=bend, dtype=torch.float32)
    assert [finding.step for finding in memory.manifest.findings] == [80]
