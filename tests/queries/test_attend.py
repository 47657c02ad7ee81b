"""`attend` runs the user's model once and leaves it exactly as it was."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dualform
from dualform.errors import BadCall, BadQuery, ModelMismatch
from small import batch, network, run


class Net(nn.Module):
    """Normalisation, dropout, two tensors as arguments, a branch that is not always taken, and a tied layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)
        self.branch = nn.Linear(4, 2)

    def forward(self, x: Tensor, shift: Tensor | None = None, branch: bool = False) -> Tensor:
        x = self.norm(self.inner(x if shift is None else x + shift))
        x = self.fc(self.drop(torch.relu(x)))
        x = self.other(x).add_(self.fc(input=x))
        return self.branch(x) if branch else x


LAYERS = ["inner", "fc", "other"]


def trained(path: Path, **options: Any) -> tuple[Net, dualform.Memory]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with dualform.record(model, optimizer, path, **options) as recorder:
        for step in range(4):
            x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))
            with recorder.batch(torch.arange(6)):
                model(x, branch=step == 2).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, dualform.open(path)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> tuple[Net, dualform.Memory]:
    return trained(tmp_path_factory.mktemp("attend") / "run")


INPUTS = torch.randn(7, 3, generator=torch.Generator().manual_seed(9))


def everything(model: nn.Module) -> dict[str, Any]:
    """All that a user could see of a model, by value."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grads = {f"grad of {n}": None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    asks = {f"asks of {n}": p.requires_grad for n, p in model.named_parameters()}
    modes = {f"mode of {n}": m.training for n, m in model.named_modules()}
    hooks = {
        f"hooks of {n}": (len(m._forward_pre_hooks), len(m._forward_hooks), len(m._backward_hooks), m.forward.__func__)
        for n, m in model.named_modules()
    }
    return {**state, **grads, **asks, **modes, **hooks}


def assert_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        same = value.equal(after[name]) if isinstance(value, Tensor) else value == after[name]
        assert same, name


def plain_queries(model: Net, x: Tensor) -> dict[str, Tensor]:
    """What flows into every layer, in eval mode, written out."""
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        hidden = torch.relu(model.norm(model.inner(x)))
        middle = model.fc(hidden)
    return {"inner": x, "fc": torch.stack([hidden, middle]), "other": middle}


def test_the_queries_are_what_flows_into_each_layer_in_eval_mode(net: tuple[Net, dualform.Memory]) -> None:
    model, memory = net
    model.train()
    spotlight = memory.attend(model, INPUTS)
    for layer, truth in plain_queries(model, INPUTS).items():
        assert spotlight[layer].queries.equal(truth.reshape(-1, truth.shape[-1]))
        assert spotlight[layer].query_shape == tuple(truth.shape[:-1])
    assert list(spotlight) == LAYERS and len(spotlight) == 3


@pytest.mark.parametrize("inference", [False, True])
def test_the_model_is_left_exactly_as_it_was(net: tuple[Net, dualform.Memory], inference: bool) -> None:
    model, memory = net
    model.train()
    model.norm.eval()
    model.other.weight.requires_grad_(False)
    model.fc.weight.grad = torch.ones_like(model.fc.weight)
    handle = model.fc.register_forward_pre_hook(lambda module, args: None)
    before = everything(model)
    random = torch.random.get_rng_state()
    with torch.inference_mode(inference):
        memory.attend(model, INPUTS)
        memory.attend(model, INPUTS, until=2)
    assert_unchanged(before, everything(model))
    assert torch.random.get_rng_state().equal(random)
    assert torch.is_grad_enabled()
    handle.remove()
    model.other.weight.requires_grad_(True)
    model.fc.weight.grad = None


def test_the_forward_pass_runs_in_eval_mode_and_without_gradients(net: tuple[Net, dualform.Memory]) -> None:
    model, memory = net
    model.train()
    seen: list[tuple[bool, bool]] = []
    handle = model.drop.register_forward_hook(lambda m, _, __: seen.append((torch.is_grad_enabled(), m.training)))
    memory.attend(model, INPUTS, batch_size=4)
    handle.remove()
    assert seen == [(False, False)] * 2


def test_no_gradient_flows_into_the_queries(net: tuple[Net, dualform.Memory]) -> None:
    model, memory = net
    x = INPUTS.clone().requires_grad_()
    spotlight = memory.attend(model, x)
    assert not any(spotlight[layer].queries.requires_grad for layer in spotlight)
    assert not spotlight["inner"].output().requires_grad


@pytest.mark.parametrize("until", [None, 2])
def test_an_error_in_the_model_leaves_nothing_behind(net: tuple[Net, dualform.Memory], until: int | None) -> None:
    model, memory = net
    model.train()
    model.drop.eval()
    before = everything(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        memory.attend(model, torch.ones(2, 5), until=until)
    assert_unchanged(before, everything(model))
    assert memory.attend(model, INPUTS, until=until)["inner"].queries.equal(INPUTS)


def test_an_error_after_some_layers_leaves_nothing_behind(net: tuple[Net, dualform.Memory]) -> None:
    model, memory = net
    model.train()
    before = everything(model)
    with pytest.raises(TypeError):
        memory.attend(model, (INPUTS, "no tensor"))
    assert_unchanged(before, everything(model))


@pytest.mark.parametrize("batch_size", [None, 1, 2, 3, 7, 100])
@pytest.mark.parametrize("until", [None, 3])
def test_the_batch_size_changes_nothing(
    net: tuple[Net, dualform.Memory], batch_size: int | None, until: int | None
) -> None:
    model, memory = net
    whole = memory.attend(model, INPUTS, until=until, batch_size=None)
    split = memory.attend(model, INPUTS, until=until, batch_size=batch_size)
    assert list(split) == list(whole)
    for layer in whole:
        assert split[layer].query_shape == whole[layer].query_shape
        # A product of other rows may round otherwise: the queries may differ in their last bits.
        assert torch.allclose(split[layer].queries, whole[layer].queries, rtol=1e-5, atol=1e-6)
        assert split[layer].top(3).events.equal(whole[layer].top(3).events)
        assert split[layer].totals(by="example").values.numpy() == pytest.approx(
            whole[layer].totals(by="example").values.numpy(), rel=1e-4, abs=1e-5
        )


@pytest.mark.parametrize("size", [1, 2, 5])
def test_calls_of_different_shapes_come_in_the_same_order_whatever_the_batch_size(tmp_path: Path, size: int) -> None:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).sum(dim=1) + self.fc(x[:, 0])

    torch.manual_seed(0)
    model = Ragged()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 2, 3)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        with recorder.batch(torch.arange(5)):
            model(x).sum().backward()
        optimizer.step()
    memory = dualform.open(tmp_path / "run")
    whole = memory.attend(model, x, batch_size=None)["fc"]
    split = memory.attend(model, x, batch_size=size)["fc"]
    assert sorted(map(tuple, split.queries.tolist())) == sorted(map(tuple, whole.queries.tolist()))
    assert split.query_shape == whole.query_shape
    assert split.queries.equal(whole.queries)


@pytest.mark.parametrize("batch_size", [0, -3, True])
def test_a_batch_size_that_makes_no_sense_is_refused(net: tuple[Net, dualform.Memory], batch_size: int) -> None:
    model, memory = net
    with pytest.raises(BadCall, match="batch_size must be a whole number of at least 1"):
        memory.attend(model, INPUTS, batch_size=batch_size)


def test_inputs_are_a_tensor_a_tuple_or_a_dict(net: tuple[Net, dualform.Memory]) -> None:
    model, memory = net
    shift = torch.full((7, 3), 0.5)
    for inputs in [INPUTS + shift, (INPUTS, shift), {"x": INPUTS, "shift": shift}, [INPUTS, shift]]:
        for size in (None, 2):
            assert memory.attend(model, inputs, batch_size=size)["inner"].queries.equal(INPUTS + shift)
    one_shift = torch.full((1, 3), 0.5)
    assert memory.attend(model, (INPUTS, one_shift), batch_size=2)["inner"].queries.equal(INPUTS + shift)
    assert memory.attend(model, (INPUTS, torch.tensor(0.5)), batch_size=2)["inner"].queries.equal(INPUTS + shift)
    assert "branch" in list(memory.attend(model, {"x": INPUTS, "branch": True}))


@pytest.mark.parametrize("inputs", [(), {}, (1, 2), "x", None], ids=repr)
def test_inputs_without_a_tensor_are_refused(net: tuple[Net, dualform.Memory], inputs: Any) -> None:
    model, memory = net
    with pytest.raises(BadCall, match="attend needs inputs"):
        memory.attend(model, inputs)


def test_queries_may_be_given_instead_of_a_model(net: tuple[Net, dualform.Memory]) -> None:
    model, memory = net
    truth = plain_queries(model, INPUTS)
    given = memory.attend(None, {"fc": truth["fc"], "inner": INPUTS.numpy()})
    from_model = memory.attend(model, INPUTS)
    assert list(given) == ["inner", "fc"]
    for layer in given:
        assert given[layer].top(3).events.equal(from_model[layer].top(3).events)
        assert given[layer].output().equal(from_model[layer].output())
    assert given["fc"].query_shape == (2, 7)
    one = memory.attend(None, {"inner": [1.0, 2.0, 3.0]})["inner"]
    assert (one.query_shape, len(one), one.output().shape) == ((), 1, (4,))
    with pytest.raises(BadCall, match="a dict from layer names to queries"):
        memory.attend(None, INPUTS)


def test_queries_may_be_whole_numbers(net: tuple[Net, dualform.Memory]) -> None:
    _, memory = net
    found = memory.attend(None, {"inner": torch.tensor([[1, 2, 3]])})["inner"].scores()
    assert found.equal(memory.attend(None, {"inner": torch.tensor([[1.0, 2.0, 3.0]])})["inner"].scores())


def test_queries_of_the_wrong_width_are_refused(net: tuple[Net, dualform.Memory]) -> None:
    _, memory = net
    for queries in (torch.ones(2, 3), torch.ones(5), np.ones((1, 1, 2))):
        with pytest.raises(BadQuery, match="queries of fc must have width 4"):
            memory.attend(None, {"fc": queries})


def test_an_unknown_layer_is_named_with_those_there_are(net: tuple[Net, dualform.Memory]) -> None:
    model, memory = net
    with pytest.raises(BadQuery, match="'fc9' is not recorded; recorded layers: inner, fc, other, branch"):
        memory.attend(None, {"fc9": torch.ones(1, 4)})
    with pytest.raises(BadQuery, match="'fc9' is not recorded"):
        memory.attend(model, INPUTS)["fc9"]


def test_a_layer_that_the_forward_pass_did_not_call_is_told(net: tuple[Net, dualform.Memory]) -> None:
    model, memory = net
    spotlight = memory.attend(model, INPUTS)
    with pytest.raises(BadQuery, match="'branch' was not called by the model.*called: inner, fc, other"):
        spotlight["branch"]
    assert "branch" not in repr(spotlight) and "7 queries" in repr(spotlight)


def test_a_model_that_is_not_the_memorys_is_refused(tmp_path: Path) -> None:
    model, memory = run(tmp_path / "run")
    x = batch(1)[1]
    memory.attend(model, x)
    memory.attend(copy.deepcopy(model), x)
    other = network(seed=5)
    with pytest.raises(ModelMismatch, match=r"0\.weight differs from its last recorded step 6"):
        memory.attend(other, x)
    assert memory.attend(other, x, check=False)["0"].queries.equal(x)
    for wrong in (nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)), nn.Linear(6, 4), nn.Sequential()):
        with pytest.raises(ModelMismatch, match="should have shape"):
            memory.attend(wrong, x)
        with pytest.raises(ModelMismatch, match="should have shape"):
            memory.attend(wrong, x, until=3)
    with pytest.raises(ModelMismatch, match="no module '0'"):
        memory.attend(nn.Linear(6, 4), x, check=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_model_that_was_trained_further_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    model, memory = run(tmp_path / "run", dtype=dtype)
    ids, x, y = batch(9, dtype=dtype)
    memory.attend(model, x)
    optimizer = torch.optim.SGD([model[2].bias], lr=0.01)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(ModelMismatch, match=r"2\.bias differs"):
        memory.attend(model, x)
    assert memory.attend(model, x, until=6)["2"].query_shape == (len(ids),)


def test_a_model_in_another_precision_is_refused_only_where_it_matters(tmp_path: Path) -> None:
    model, memory = run(tmp_path / "run", dtype=torch.float32)
    wider = copy.deepcopy(model).double()
    assert memory.attend(wider, batch(1)[1])["0"].queries.dtype == torch.float64
    with pytest.raises(ModelMismatch):
        memory.attend(copy.deepcopy(model).bfloat16(), batch(1)[1].bfloat16())


def test_a_dual_model_passes_the_check(tmp_path: Path) -> None:
    model, memory = run(tmp_path / "run")
    x = batch(1)[1]
    masked = memory.dual(model, where={"example": slice(0, 5)})
    assert not torch.allclose(masked[0].weight, model[0].weight)
    hidden = torch.relu(masked[0](x))
    assert memory.attend(masked, x)["2"].queries.equal(hidden)
    for dual in (memory.dual(model), memory.dual(model, fold=False), memory.dual(model, until=2)):
        assert torch.allclose(memory.attend(dual, x)["2"].queries, torch.relu(dual[0](x)), atol=1e-12)
    _, another = run(tmp_path / "another", steps=3)
    with pytest.raises(ModelMismatch):
        another.attend(memory.dual(model), x)


@pytest.mark.parametrize("until", range(7))
def test_until_asks_the_model_of_that_step(tmp_path: Path, until: int) -> None:
    history: list[nn.Module] = [copy.deepcopy(network())]
    model, memory = run(tmp_path / "run", after_step=lambda model, step: history.append(copy.deepcopy(model)))
    x = batch(3)[1]
    then = history[until]
    spotlight = memory.attend(model, x, until=until)
    assert torch.allclose(spotlight["2"].queries, torch.relu(then[0](x)), rtol=0, atol=1e-12)
    assert torch.allclose(spotlight["2"].output(), then(x).detach(), rtol=0, atol=1e-12)
    assert spotlight["0"].scores().shape == (5, 5 * until)


@pytest.mark.parametrize("until", [-1, 7, True])
def test_a_step_that_does_not_exist_is_refused(tmp_path: Path, until: int) -> None:
    model, memory = run(tmp_path / "run")
    for ask in (
        lambda: memory.attend(model, batch(1)[1], until=until),
        lambda: memory.attend(None, {"0": torch.ones(1, 6)}, until=until),
        lambda: memory.weights(until=until),
        lambda: memory.dual(model, until=until),
    ):
        with pytest.raises(BadCall, match="until must be a step from 0 to 6"):
            ask()


def test_a_memory_without_a_step_says_so(tmp_path: Path) -> None:
    model, memory = run(tmp_path / "run", steps=0)
    asks = [
        lambda: memory.attend(model, batch(1)[1]),
        lambda: memory.attend(None, {"0": torch.ones(1, 6)}),
        lambda: memory.certificate(),
        lambda: memory.compact("0"),
    ]
    for ask in asks:
        with pytest.raises(dualform.errors.EmptyMemory, match="holds no step yet"):
            ask()
    assert "0 steps" in repr(memory)


def test_an_empty_batch_of_queries_has_empty_answers(tmp_path: Path) -> None:
    model, memory = run(tmp_path / "run")
    for spotlight in (memory.attend(model, batch(1)[1][:0]), memory.attend(None, {"0": torch.ones(0, 6)})):
        attention = spotlight["0"]
        assert attention.query_shape == (0,)
        assert attention.top(3).events.shape == (0, 3)
        assert attention.scores().shape == (0, 30)
        assert attention.totals(by="example").values.shape == (0, 20)
        assert attention.output().shape == (0, 8)
        assert attention.contributions().totals(by="step").values.shape == (0, 7, 8)
        assert attention.top(3, by="example").scores.shape == (0, 3)
        repr(attention.top(3)), repr(attention.totals(by="example")), attention.top(3)._repr_html_()


def test_a_single_input_without_a_batch_dimension(tmp_path: Path) -> None:
    model, memory = run(tmp_path / "run")
    x = batch(1)[1][0]
    attention = memory.attend(model, x, batch_size=None)["0"]
    assert attention.query_shape == () and attention.queries.equal(x[None])
    assert attention.output().shape == (8,)
    assert memory.attend(model, x)["0"].query_shape == ()


def test_attending_while_the_model_is_recorded_makes_no_events(tmp_path: Path) -> None:
    seen: list[int] = []

    def look(model: nn.Module, step: int) -> None:
        if step == 3:
            recorder_memory = dualform.open(tmp_path / "run")
            seen.append(recorder_memory.steps)
            if recorder_memory.steps:
                recorder_memory.attend(model, batch(1)[1], check=False)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(1, 6):
            ids, x, y = batch(step)
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.commit()
            look(model, step)
    memory = dualform.open(tmp_path / "run")
    assert seen == [3]
    assert memory.manifest.events(0) == 25 and memory.certificate().exact
