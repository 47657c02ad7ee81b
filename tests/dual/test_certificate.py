"""The certificate says how far a weight is from its dual form, and where it cannot say, why."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dualform
import plain
from dualform.errors import NotExact, NotKept
from small import batch, network, run


@pytest.mark.parametrize("kind", plain.FINITE)
def test_residual_and_rounding_are_those_of_the_definition(kind: str) -> None:
    """‖W − (c_0 W0 + Σ e_t ⊗ x_t)‖ / ‖W − c_0 W0‖ and eps √steps ‖W‖ / ‖W − c_0 W0‖, over weight and biases."""
    history = plain.history(kind)
    end = history.steps
    keys, gradients = (
        torch.tensor([getattr(event, field) for event in history.events], dtype=torch.float64)
        for field in ("key", "gradient")
    )
    of = torch.tensor([history.coefficient(event, end) for event in history.events], dtype=torch.float64)
    made = {"fc.weight": (gradients * of[:, None]).T @ keys}
    for use, name in enumerate(("fc.bias", "twin.bias")):
        of = torch.tensor([history.bias_coefficient(event, end, use) for event in history.events], dtype=torch.float64)
        made[name] = of @ gradients
    size = moved = distance = 0.0
    for name, part in made.items():
        options = plain.OF_WEIGHTS if name == "fc.weight" else plain.OF_BIASES
        final = dict(history.model.named_parameters())[name].detach().double()
        change = final - plain.response(options, end, 0, 1.0) * history.initial[name].double()
        size += float(final.square().sum())
        moved += float(change.square().sum())
        distance += float((change - part).square().sum())
    (row,) = history.memory.certificate()
    eps = torch.finfo(plain.dtype_of(kind)).eps
    assert row.rounding == pytest.approx(eps * math.sqrt(end) * math.sqrt(size / moved), rel=1e-6)
    assert row.residual == pytest.approx(math.sqrt(distance / moved), rel=1e-3, abs=1e-15)
    assert row.exact and row.residual <= 10 * row.rounding and row.reason == ""
    assert (row.weight, row.step, row.events) == ("fc.weight", 6, 81)


def test_a_certificate_is_a_row_for_every_weight(tmp_path: Path) -> None:
    _, memory = run(tmp_path / "run")
    certificate = memory.certificate()
    assert certificate.exact and len(certificate) == 2
    assert [row.weight for row in certificate] == ["0.weight", "2.weight"]
    assert certificate[-1] is list(certificate)[1] and certificate is memory.certificate()
    for row in certificate:
        assert (row.exact, row.reason, row.step, row.events) == (True, "", 6, 30)
        assert 0 <= row.residual < 1e-14 and 1e-17 < row.rounding < 1e-14
        assert str(row) == f"the weight of {row.weight} is rebuilt from 30 events to {row.residual:.1e}: exact"
    lines = repr(certificate).splitlines()
    assert lines[0].split() == ["weight", "residual", "rounding", "exact"]
    assert [line.split()[0] for line in lines[1:]] == ["0.weight", "2.weight"]
    assert all(line.endswith("yes") for line in lines[1:])
    assert "exact, residual at most" in repr(memory)
    with pytest.raises(AttributeError):
        certificate[0].exact = False


def test_a_broken_premise_is_in_the_repr(tmp_path: Path) -> None:
    def noise(model: nn.Module, step: int) -> None:
        if step >= 4:
            model[2].weight.grad += 0.1 * torch.randn_like(model[2].weight)

    _, memory = run(tmp_path / "run", before_step=noise)
    certificate = memory.certificate()
    first, second = certificate
    assert not certificate.exact and first.exact and not second.exact
    assert (second.step, second.residual > 1e-3) == (4, True)
    assert "was not made by the recorded events" in second.reason and "3 such findings" in second.reason
    assert f"no: {second.reason}" in repr(certificate)
    assert second.reason in str(second) and f"{second.residual:.1e}" in str(second)
    assert "not certified exact" in str(second) and "not certified exact" in repr(memory)


@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_what_no_step_moved_has_residual_zero(tmp_path: Path, lr: float) -> None:
    """0/0 is 0: with a learning rate of 0, and for a layer that never got a gradient."""
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    _, memory = run(tmp_path / "run", model=model, optimizer=optimizer)
    frozen, other = memory.certificate()
    assert (frozen.residual, frozen.exact, frozen.events) == (0.0, True, 0)
    assert other.exact and other.events == 30
    assert (other.residual == 0.0) is (lr == 0.0)


def test_a_weight_whose_gradient_is_always_zero_is_exact(tmp_path: Path) -> None:
    model = network()
    with torch.no_grad():
        model[2].weight.zero_()  # nothing flows back through it, so layer 0 gets gradients that are zero
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1, "momentum": 0.9}, {"params": model[2].bias}], lr=0.1
    )
    _, memory = run(tmp_path / "run", model=model, optimizer=optimizer)
    assert memory.certificate()[0].residual == 0.0 and memory.certificate()[0].exact


def copied_while_recording(path: Path, steps_after: int, dtype: torch.dtype) -> dualform.Memory:
    """What a machine that died would leave: the directory after a commit and some steps more."""
    model = network(dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    with dualform.record(model, optimizer, path / "run", on_error="raise") as recorder:
        for step in range(1, 6 + steps_after):
            ids, x, y = batch(step, dtype=dtype)
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (2, 5):
                recorder.commit()
        shutil.copytree(path / "run", path / "copy")
    return dualform.open(path / "copy")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("steps_after", [0, 3])
def test_a_run_that_was_killed_is_certified_up_to_its_last_commit(
    tmp_path: Path, steps_after: int, dtype: torch.dtype
) -> None:
    memory = copied_while_recording(tmp_path, steps_after, dtype)
    assert memory.manifest.final is None and memory.steps == 5 and "not closed" in repr(memory)
    certificate = memory.certificate()
    assert certificate.exact and [row.step for row in certificate] == [5, 5]
    whole = dualform.open(tmp_path / "run")
    assert all(memory.weights()[name].equal(tensor) for name, tensor in whole.weights(until=5).items())
    for row in certificate:
        assert 0 < row.residual <= 10 * row.rounding


def test_the_certificate_of_a_killed_run_can_fail(tmp_path: Path) -> None:
    """Against the sketches, too: a memory that lost one number of one event is found out."""
    memory = copied_while_recording(tmp_path, 0, torch.float64)
    read = type(memory).blocks

    def bent(self: Any, weight: int, until: int, rows: int = 1000, since: int = 0, gather: Any = None) -> Any:
        for block in read(self, weight, until, rows, since, gather):
            if weight == 1:
                block.gradients[0, 0] += 0.01
            yield block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(memory), "blocks", bent)
        first, second = memory.certificate()
    assert first.exact and not second.exact
    assert "more than 10 times the rounding floor" in second.reason and second.residual > 1e-6


def test_a_memory_of_keys_has_no_residual_and_says_why(tmp_path: Path) -> None:
    _, memory = run(tmp_path / "run", keep="keys")
    for row in memory.certificate():
        assert row.residual is None and not row.exact
        assert row.reason == "keep='keys' holds no gradients; record with keep='all' for values"
        assert "not certified exact: keep='keys'" in str(row)
    assert "none" in repr(memory.certificate())


class OwnStep(torch.optim.SGD):
    """A subclass that steps by the sign."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(group["lr"] * parameter.grad.sign())


class DoubledStep(torch.optim.SGD):
    """A subclass that does something more around the parent's step."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(parameter.grad.sign())
        super().step(closure)


class Renamed(torch.optim.SGD):
    """A subclass that leaves the step as it is."""


OTHERS = [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam]
OTHERS += [OwnStep, DoubledStep]


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.__name__)
def test_an_optimiser_outside_the_family_has_scores_but_no_values(tmp_path: Path, kind: Any) -> None:
    torch.optim.SGD(network().parameters(), lr=0.1)  # torch hooks SGD.step itself when the first one is made
    model = network()
    _, memory = run(tmp_path / "run", model=model, optimizer=kind(model.parameters(), lr=0.01))
    for row in memory.certificate():
        assert row.residual is None and not row.exact
        assert row.reason.startswith(f"{kind.__name__} has no scalar dual form")
    x = batch(1)[1]
    attention = memory.attend(model, x)["2"]
    keys = torch.cat([block.keys for block in memory.blocks(1, memory.steps)])
    assert torch.allclose(attention.scores().double(), torch.relu(model[0](x)) @ keys.T, rtol=1e-6, atol=1e-6)
    asks = [
        lambda: attention.contributions(unit=0),
        lambda: attention.contributions(),
        lambda: attention.output(),
        lambda: attention.output(kernel="softmax"),
        lambda: attention.initial(),
        lambda: memory.weights(),
        lambda: memory.dual(model),
        lambda: memory.dual(model, fold=False),
        lambda: memory.attend(model, x, until=2),
        lambda: memory.compact("2"),
    ]
    for ask in asks:
        with pytest.raises(NotExact, match=kind.__name__):
            ask()


@pytest.mark.parametrize("kind", [OwnStep, DoubledStep, Renamed], ids=lambda kind: kind.__name__)
def test_a_step_of_a_subclass_is_counted_once(tmp_path: Path, kind: Any) -> None:
    torch.optim.SGD(network().parameters(), lr=0.1)
    model = network()
    _, memory = run(tmp_path / "run", model=model, optimizer=kind(model.parameters(), lr=0.01), steps=4)
    assert memory.steps == 4
    (block,) = memory.blocks(0, memory.steps)
    assert block.steps.tolist() == [step for step in range(1, 5) for _ in range(5)]


def test_a_subclass_with_the_parents_step_is_believed(tmp_path: Path) -> None:
    model = network()
    _, memory = run(tmp_path / "run", model=model, optimizer=Renamed(model.parameters(), lr=0.1, momentum=0.9))
    assert memory.certificate().exact


def test_what_is_not_linear_may_stand_beside_what_is(tmp_path: Path) -> None:
    model = network()
    optimizers = [torch.optim.Adam(model[0].parameters(), lr=0.01), torch.optim.SGD(model[2].parameters(), lr=0.1)]
    with dualform.record(model, optimizers, tmp_path / "run", on_error="raise") as recorder:
        for step in range(1, 5):
            ids, x, y = batch(step)
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    first, second = memory.certificate()
    assert first.residual is None and "Adam has no scalar dual form" in first.reason
    assert second.exact and second.residual < 1e-14
    x = batch(1)[1]
    spotlight = memory.attend(model, x)
    assert torch.allclose(spotlight["2"].output(), model(x), rtol=0, atol=1e-12)
    with pytest.raises(NotExact, match="Adam"):
        spotlight["0"].output()
    with pytest.raises(NotExact, match="Adam"):
        memory.weights()


def test_a_bias_with_another_optimiser_makes_its_weight_inexact(tmp_path: Path) -> None:
    model = network()
    biases = [model[0].bias, model[2].bias]
    optimizers = [torch.optim.SGD([model[0].weight, model[2].weight], lr=0.1), torch.optim.Adam(biases, lr=0.01)]
    with dualform.record(model, optimizers, tmp_path / "run", on_error="raise") as recorder:
        ids, x, y = batch(1)
        with recorder.batch(ids):
            F.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    rows = dualform.open(tmp_path / "run").certificate()
    assert all(row.residual is None and "Adam" in row.reason for row in rows)


def test_half_precision_is_not_exact_and_says_why(tmp_path: Path) -> None:
    model = network(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(1, 6):
            ids, x, y = batch(step, dtype=torch.float32)
            with recorder.batch(ids), torch.autocast("cpu", torch.bfloat16):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    for row in memory.certificate():
        assert not row.exact and "bfloat16" in row.reason
        assert row.residual < 2e-2, "the values are there, as precise as the training itself"
    (block,) = memory.blocks(0, 5)
    assert block.keys.dtype == block.gradients.dtype == torch.bfloat16
    assert torch.allclose(memory.weights()["0.weight"], model[0].weight, rtol=0, atol=1e-2)


class Tied(nn.Module):
    """One weight behind two modules, one bias behind two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6, dtype=torch.float64)
        self.b = nn.Linear(6, 6, dtype=torch.float64)
        self.c = nn.Linear(6, 6, dtype=torch.float64)
        self.b.weight = self.a.weight
        self.c.bias = self.b.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))[:, :4]


def test_tied_weights_and_shared_biases_are_exact(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, memory = run(tmp_path / "run", model=Tied())
    certificate = memory.certificate()
    assert certificate.exact
    assert [(row.weight, row.events) for row in certificate] == [("a.weight", 60), ("c.weight", 30)]
    rebuilt = memory.weights()
    assert all(torch.allclose(rebuilt[n], t, rtol=0, atol=1e-13) for n, t in model.state_dict().items())


def test_a_question_without_values_says_which_level_has_them(tmp_path: Path) -> None:
    model, memory = run(tmp_path / "run", keep="keys")
    with pytest.raises(NotKept, match="output\\(\\) needs the gradients of 2.weight.*keep='all'"):
        memory.attend(model, batch(1)[1])["2"].output()


def test_a_gradient_that_is_not_a_number_is_not_exact(tmp_path: Path) -> None:
    def spoil(model: nn.Module, step: int) -> None:
        if step == 3:
            model[0].weight.grad[0, 0] = math.nan

    _, memory = run(tmp_path / "run", before_step=spoil, steps=4)
    row = memory.certificate()[0]
    assert not row.exact and row.step == 3 and "NaN or infinity" in row.reason
    assert row.residual is None or not math.isfinite(row.residual)


def test_a_gradient_that_is_not_a_number_is_not_told_as_an_edit(tmp_path: Path) -> None:
    """The optimiser made the weight NaN; nobody changed it outside."""

    def spoil(model: nn.Module, step: int) -> None:
        if step == 3:
            model[0].weight.grad[0, 0] = math.nan

    _, memory = run(tmp_path / "run", before_step=spoil, steps=4)
    assert [f.reason for f in memory.manifest.findings if "outside the optimiser" in f.reason] == []
