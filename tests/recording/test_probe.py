"""The probe and the watch: what they must find, and what they must not be misled by."""

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dualform
from small import batch, network, run


def scales(memory: dualform.Memory, parameter: int = 0) -> list[float]:
    numbers, values = memory.journal._passes
    return values[numbers[:, 1] == parameter].tolist()


@pytest.mark.parametrize("shape", [(8, 1), (1, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_noise_on_a_single_number_is_not_taken_for_a_scale(tmp_path: Path, shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(*shape, bias=bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise"):
        for _ in range(3):
            model(torch.randn(4, shape[0])).square().sum().backward()
            (model.bias if bias else model.weight).grad += torch.randn(1)
            optimizer.step()
            optimizer.zero_grad()
    (row,) = dualform.open(tmp_path / "run").certificate()
    assert not row.exact
    assert "was not made by the recorded events" in row.reason


def test_a_bias_of_one_number_shares_the_scale_of_its_weight(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise"):
        for _ in range(3):
            model(torch.randn(4, 8)).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    assert memory.certificate().exact
    assert scales(memory, 0) == scales(memory, 1)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("spike", [1e3, 1e6])
def test_a_large_pass_that_was_dropped_spoils_no_scale(tmp_path: Path, spike: float, set_to_none: bool) -> None:
    model = network(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    true = []
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(5):
            ids, x, y = batch(step, dtype=torch.float32)
            with recorder.batch(ids):
                (
                    spike * F.cross_entropy(model(x), y) if set_to_none else spike * model(x.flip(0)).square().sum()
                ).backward()
                optimizer.zero_grad(set_to_none=set_to_none)
                F.cross_entropy(model(x), y).backward()
            true.append(0.3 / float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    assert memory.certificate().exact
    found = scales(memory)
    assert found[0::2] == [0.0] * 5
    assert found[1::2] == pytest.approx([min(scale, 1.0) for scale in true], rel=1e-5)


def test_noise_beside_a_large_dropped_pass_is_found(tmp_path: Path) -> None:
    model = network(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(1, 5):
            ids, x, y = batch(step, dtype=torch.float32)
            with recorder.batch(ids):
                (1e5 * F.cross_entropy(model(x), y)).backward()
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
            if step == 3:
                grad = model[0].weight.grad
                grad += 1e-3 * grad.norm() * torch.randn(grad.shape) / grad.numel() ** 0.5
            optimizer.step()
            optimizer.zero_grad()
    assert [finding.step for finding in dualform.open(tmp_path / "run").manifest.findings] == [3]


@pytest.mark.parametrize("passes", [3, 100])
def test_many_passes_before_a_step_are_fitted(tmp_path: Path, passes: int) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for at in range(passes):
            if at == passes - 2:
                optimizer.zero_grad()
            ids, x, y = batch(at)
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
        optimizer.step()
    memory = dualform.open(tmp_path / "run")
    assert memory.certificate().exact
    assert scales(memory) == [0.0] * (passes - 2) + [1.0, 1.0]


def test_gradients_combined_by_hand_are_fitted(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        kept = []
        for at in range(3):
            ids, x, y = batch(at)
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            kept.append([p.grad for p in model.parameters()])
            optimizer.zero_grad()
        for parameter, *grads in zip(model.parameters(), *kept, strict=True):
            parameter.grad = 0.3 * grads[0] + 0.7 * grads[2]
        optimizer.step()
    memory = dualform.open(tmp_path / "run")
    assert memory.certificate().exact
    assert scales(memory) == pytest.approx([0.3, 0.0, 0.7], rel=1e-9)


def test_gradients_lost_to_underflow_are_no_finding(tmp_path: Path) -> None:
    model = network(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(3):
            ids, x, y = batch(step, dtype=torch.float32)
            with recorder.batch(ids):
                (1e-40 * F.cross_entropy(model(x), y)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert dualform.open(tmp_path / "run").certificate().exact


def test_an_outer_autocast_does_not_touch_the_probe(tmp_path: Path) -> None:
    model = network(dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        _, memory = run(tmp_path / "run", model)
    assert memory.manifest.findings == ()


def test_weights_that_swing_within_a_stretch_are_no_edit(tmp_path: Path) -> None:
    model = nn.Linear(3, 2, bias=False)
    nn.init.constant_(model.weight, 1e-6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise"):
        for step in range(12):
            ((-1.0) ** step * 1e3 * model(x)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert dualform.open(tmp_path / "run").manifest.findings == ()


@pytest.mark.parametrize(("size", "found"), [(2e-7, False), (1e-3, True)])
def test_the_watch_finds_what_is_more_than_rounding(tmp_path: Path, size: float, found: bool) -> None:
    def edit(model: nn.Module, step: int) -> None:
        if step == 3:
            weight = model[0].weight
            direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
            weight.data += size * weight.norm() * direction / direction.norm()

    _, memory = run(tmp_path / "run", dtype=torch.float32, after_step=edit)
    assert bool(memory.manifest.findings) == found


def test_a_bias_stepped_before_its_weight_is_exact_at_every_step(tmp_path: Path) -> None:
    model = network()
    biases = torch.optim.SGD([p for n, p in model.named_parameters() if "bias" in n], lr=0.1, momentum=0.9)
    weights = torch.optim.SGD([p for n, p in model.named_parameters() if "weight" in n], lr=0.05)
    saved: list[dict[str, Tensor]] = []
    with dualform.record(model, [weights, biases], tmp_path / "run", on_error="raise") as recorder:
        for step in range(3):
            ids, x, y = batch(step)
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            for optimizer in (biases, weights):
                optimizer.step()
                saved.append({n: p.detach().clone() for n, p in model.named_parameters()})
            model.zero_grad()
    memory = dualform.open(tmp_path / "run")
    assert memory.certificate().exact
    for step, truth in enumerate(saved, start=1):
        rebuilt = memory.weights(until=step)
        assert all((rebuilt[name] - tensor).abs().max() < 1e-13 for name, tensor in truth.items())


def test_biases_alone_in_the_optimiser_are_exact(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "bias" in n], lr=0.1)
    _, memory = run(tmp_path / "run", model, optimizer)
    assert memory.certificate().exact
    assert memory.manifest.events(0) == 30


def test_updates_smaller_than_rounding_are_exact(tmp_path: Path) -> None:
    model = network(dtype=torch.float32)
    _, memory = run(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=1e-12), dtype=torch.float32)
    assert memory.certificate().exact
    assert "hardly more than rounding" in str(memory.certificate()[0])


def test_time_travel_to_a_commit_is_checked_against_its_sketch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(1, 5):
            if step in (2, 4):
                model[0].weight.data += 1.0 if step == 2 else -1.0
            model(batch(step)[1]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                recorder.commit()
    memory = dualform.open(tmp_path / "run")
    assert not memory.certificate().exact
    memory.weights(until=3)
    assert "0.weight rebuilt for step 3 is" in caplog.text


def test_a_buffer_that_is_reassigned_is_stored_as_it_is(tmp_path: Path) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 8, dtype=torch.float64)
            self.b = nn.Linear(8, 4, dtype=torch.float64)
            self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x)
            if self.training:
                self.mean = 0.9 * self.mean + hidden.detach().mean(0)
            return self.b(torch.relu(hidden - self.mean))

    torch.manual_seed(0)
    model = Centred()
    means = []
    _, memory = run(tmp_path / "run", model, after_step=lambda model, step: means.append(model.mean))
    for step, mean in enumerate(means, start=1):
        assert memory.dual(model, until=step).mean.equal(mean)
    x = batch(9)[1]
    assert (memory.dual(model)(x) - model.eval()(x)).abs().max() < 1e-12


def test_a_replaced_bias_is_told(tmp_path: Path) -> None:
    def replace(model: nn.Module, step: int) -> None:
        if step == 2:
            model[2].bias = nn.Parameter(model[2].bias.detach().clone())

    _, memory = run(tmp_path / "run", after_step=replace)
    assert not memory.certificate()[1].exact


def test_a_bias_that_is_no_parameter_leaves_its_layer_unrecorded(tmp_path: Path) -> None:
    model = network()
    bias = model[0].bias.detach() + 5
    del model[0].bias
    model[0].register_buffer("bias", bias)
    _, memory = run(tmp_path / "run", model)
    assert [weight.name for weight in memory.manifest.weights] == ["2.weight"]
    assert memory.certificate().exact


def test_a_forward_patched_on_the_instance_leaves_its_layer_unrecorded(tmp_path: Path) -> None:
    model = network()
    original = model[0].forward
    model[0].forward = lambda x: 2 * original(x)
    _, memory = run(tmp_path / "run", model)
    assert [weight.name for weight in memory.manifest.weights] == ["2.weight"]
    assert any("0 has a forward patched" in note for note in memory.dual(model, until=2).dualform_notes)


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        child = os.fork()
        if child == 0:
            try:
                model(batch(1)[1]).sum().backward()
                optimizer.step()
                recorder.commit()
                recorder.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert dualform.open(tmp_path / "run").steps == 0
        assert not (tmp_path / "run/final.safetensors").exists()


def test_a_vectorised_jacobian_does_not_stop_the_recording(tmp_path: Path) -> None:
    model = network()

    def jacobian(model: nn.Module, step: int) -> None:
        torch.autograd.functional.jacobian(model, batch(step)[1], vectorize=True)

    _, memory = run(tmp_path / "run", model, after_step=jacobian)
    assert memory.certificate().exact
    assert memory.manifest.events(0) == 30


def test_the_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def move(model: nn.Module, step: int) -> None:
        os.chdir(tmp_path / "elsewhere")

    with pytest.raises(dualform.errors.BadMemory, match="elsewhere"):
        run(Path("run"), after_step=move)  # whose own open() looks from the new directory
    assert dualform.open(tmp_path / "run").certificate().exact


def test_a_start_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    class Wrapped(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.param_groups, self.state = inner.param_groups, inner.state

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AttributeError):
        dualform.record(model, Wrapped(optimizer), tmp_path / "run").start()
    assert not any(module._forward_hooks for module in model.modules())
    assert run(tmp_path / "run", model, optimizer)[1].certificate().exact


def test_a_dual_model_of_another_step_is_not_taken_for_the_last(tmp_path: Path) -> None:
    model, memory = run(tmp_path / "run")
    x = batch(9)[1]
    for fold in (True, False):
        early = memory.dual(model, until=2, fold=fold)
        queries = memory.attend(early, x, until=6)["2"].queries
        assert (queries - memory.attend(model, x)["2"].queries).abs().max() < 1e-12
        for again in (True, False):
            assert (memory.dual(early, until=6, fold=again)(x) - model(x)).abs().max() < 1e-12
