"""A broken premise is told, not hidden: the certificate is not exact, and says why and since when."""

import copy
import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
from small import batch, network, run


def only_finding(memory: dualform.Memory, weight: str) -> str:
    """The reason of a weight that is not exact, while every other weight is."""
    rows = {row.weight: row for row in memory.certificate()}
    row = rows.pop(weight)
    assert not row.exact
    assert all(other.exact for other in rows.values())
    return row.reason


def test_a_plain_run_is_exact(tmp_path: Path) -> None:
    _, memory = run(tmp_path / "run")
    assert memory.certificate().exact
    assert memory.manifest.findings == ()


def test_a_weight_edited_in_place_is_told_with_its_step(tmp_path: Path) -> None:
    def edit(model: nn.Module, step: int) -> None:
        if step == 3:
            with torch.no_grad():
                model[0].weight[2, 3] += 0.01

    _, memory = run(tmp_path / "run", after_step=edit)
    reason = only_finding(memory, "0.weight")
    assert "changed outside the optimiser between step 3 and step 4" in reason
    assert memory.certificate()[0].step == 4
    assert memory.certificate()[0].residual > 1e-4


def test_a_weight_edited_through_data_is_told_within_a_stretch(tmp_path: Path) -> None:
    def edit(model: nn.Module, step: int) -> None:
        if step == 40:
            model[0].weight.data[0, 0] += 0.1

    _, memory = run(tmp_path / "run", steps=110, after_step=edit)
    finding = memory.manifest.findings[0]
    assert (finding.since, finding.step) == (32, 96)
    assert "between step 32 and step 96" in only_finding(memory, "0.weight")


def test_a_weight_edited_after_the_last_step_is_told(tmp_path: Path) -> None:
    def edit(model: nn.Module, step: int) -> None:
        if step == 6:
            model[0].weight.data += 0.1

    _, memory = run(tmp_path / "run", after_step=edit)
    assert "changed outside the optimiser" in only_finding(memory, "0.weight")


def test_a_weight_swapped_out_and_back_is_no_edit(tmp_path: Path) -> None:
    def swap(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            kept = model[0].weight.clone()
            model[0].weight.zero_()
            model[0].weight.copy_(kept)

    _, memory = run(tmp_path / "run", after_step=swap)
    assert memory.certificate().exact


def test_a_velocity_edited_by_hand_is_told(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def edit(model: nn.Module, step: int) -> None:
        if step == 3:
            optimizer.state[model[0].weight]["momentum_buffer"].mul_(0.5)

    _, memory = run(tmp_path / "run", model, optimizer, after_step=edit)
    assert "changed outside the optimiser between step 0 and step 6" in only_finding(memory, "0.weight")


def test_a_velocity_that_is_dropped_is_followed_exactly(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def drop(model: nn.Module, step: int) -> None:
        if step == 3:
            optimizer.state.clear()

    _, memory = run(tmp_path / "run", model, optimizer, after_step=drop)
    assert memory.certificate().exact


@pytest.mark.parametrize("size", [1e-6, 1e-2, 1.0])
def test_a_noised_gradient_is_told_with_its_step(tmp_path: Path, size: float) -> None:
    def noise(model: nn.Module, step: int) -> None:
        if step in (4, 5):
            grad = model[2].weight.grad
            grad += size * grad.norm() * torch.randn(grad.shape, generator=torch.Generator().manual_seed(step))

    _, memory = run(tmp_path / "run", before_step=noise)
    reason = only_finding(memory, "2.weight")
    assert "of the gradient at step 4 was not made by the recorded events" in reason
    assert "2 such findings" in reason
    assert memory.certificate()[1].step == 4


def test_a_noised_bias_gradient_is_told(tmp_path: Path) -> None:
    def noise(model: nn.Module, step: int) -> None:
        if step == 2:
            model[2].bias.grad[0] += 0.1

    _, memory = run(tmp_path / "run", before_step=noise)
    assert "(2.bias)" in only_finding(memory, "2.weight")


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_adam_and_its_like_have_no_residual_and_say_why(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    model = network()
    _, memory = run(tmp_path / "run", model, kind(model.parameters(), lr=1e-3))
    for row in memory.certificate():
        assert row.residual is None
        assert not row.exact
        assert f"{kind.__name__} has no scalar dual form" in row.reason
    attention = memory.attend(model, batch(0)[1])["0"]
    assert attention.top(3).scores.shape == (5, 3)
    with pytest.raises(dualform.errors.NotExact, match=f"{kind.__name__} has no scalar dual form"):
        attention.contributions(unit=0)


def test_an_optimiser_with_a_step_of_its_own_is_not_believed(tmp_path: Path) -> None:
    class SignSGD(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter -= group["lr"] * parameter.grad.sign()

    model = network()
    _, memory = run(tmp_path / "run", model, SignSGD(model.parameters(), lr=0.01))
    assert all("SignSGD has no scalar dual form" in row.reason for row in memory.certificate())


def test_an_untracked_second_use_of_a_weight_is_told(tmp_path: Path) -> None:
    class Sneaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6, dtype=torch.float64)
            self.b = nn.Linear(6, 4, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(F.linear(self.a(x), self.a.weight)))

    torch.manual_seed(0)
    _, memory = run(tmp_path / "run", Sneaky())
    assert "of the gradient at step 1 was not made by the recorded events" in only_finding(memory, "a.weight")


def test_a_weight_used_only_past_its_module_is_told(tmp_path: Path) -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6, dtype=torch.float64)
            self.b = nn.Linear(6, 4, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(F.linear(x, self.a.weight, self.a.bias)))

    torch.manual_seed(0)
    model, memory = run(tmp_path / "run", Functional())
    assert "there was a gradient at step 1, but no event" in only_finding(memory, "a.weight")
    x = batch(9)[1]
    dual = memory.dual(model)
    assert any("a.weight is not exact" in note for note in dual.dualform_notes)
    assert (memory.dual(model)(x) - model(x)).abs().max() < 1e-12


def test_attention_layers_are_left_as_they_are(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True, dtype=torch.float64)
    model = nn.Sequential(encoder, nn.Linear(6, 4, dtype=torch.float64))
    saved = {}

    def save(model: nn.Module, step: int) -> None:
        saved[step] = copy.deepcopy(model)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(1, 5):
            ids, x, y = batch(step)
            with recorder.batch(ids):
                F.cross_entropy(model(x[:, None])[:, 0], y).backward()
            optimizer.step()
            optimizer.zero_grad()
            save(model, step)
    memory = dualform.open(tmp_path / "run")
    assert [weight.name for weight in memory.manifest.weights] == ["0.linear1.weight", "0.linear2.weight", "1.weight"]
    assert memory.certificate().exact
    x = batch(9)[1][:, None]
    for step in (2, 4):
        for fold in (True, False):
            dual = memory.dual(model, until=step, fold=fold)
            assert (dual(x) - saved[step].eval()(x)).abs().max() < 1e-10
    assert set(memory.attend(model, x)) == {"0.linear1", "0.linear2", "1"}


def test_gradients_carried_over_a_step_are_told(tmp_path: Path) -> None:
    _, memory = run(tmp_path / "run", steps=3, zero=False)
    for row in memory.certificate():
        assert not row.exact
        assert "the gradient of the step before was still there at step 2 (no zero_grad in between)" in row.reason
        assert row.step == 2


def test_clip_grad_value_is_told(tmp_path: Path) -> None:
    def clip(model: nn.Module, step: int) -> None:
        if step == 3:
            nn.utils.clip_grad_value_(model[0].weight, 0.005)

    _, memory = run(tmp_path / "run", before_step=clip)
    reason = only_finding(memory, "0.weight")
    assert "of the gradient at step 3" in reason
    assert "clip_grad_value_" in reason
    assert memory.certificate()[0].step == 3


def test_a_gradient_penalty_is_told(tmp_path: Path) -> None:
    model = network()
    model[1] = nn.Tanh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        ids, x, y = batch(1)
        x.requires_grad_()
        with recorder.batch(ids):
            loss = F.cross_entropy(model(x), y)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()
        optimizer.step()
    assert not dualform.open(tmp_path / "run").certificate().exact


def test_a_replaced_parameter_is_told(tmp_path: Path) -> None:
    def replace(model: nn.Module, step: int) -> None:
        if step == 2:
            model[0].weight = nn.Parameter(model[0].weight.detach().clone())

    _, memory = run(tmp_path / "run", after_step=replace)
    assert "was replaced by another one" in only_finding(memory, "0.weight")


def test_half_precision_is_not_called_exact(tmp_path: Path) -> None:
    model = network(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(4):
            ids, x, y = batch(step, dtype=torch.float32)
            with recorder.batch(ids), torch.autocast("cpu", torch.bfloat16):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    for row in memory.certificate():
        assert not row.exact
        assert "bfloat16" in row.reason
        assert row.residual < 1e-2


def test_a_broken_premise_is_told_once_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "dualform")
    run(tmp_path / "run", steps=5, zero=False)
    told = [record.message for record in caplog.records if "0.weight" in record.message]
    assert len(told) == 1
    assert "its certificate will not be exact" in told[0]
    assert "not exact" in repr(dualform.open(tmp_path / "run"))
