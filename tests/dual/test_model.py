"""The model in dual form: a copy that computes what the trained model computes, at any step, from any events."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dualform
import plain
from dualform.errors import BadCall, BadQuery, ModelMismatch
from small import batch, network, run

TOLERANCE = {"rtol": 0.0, "atol": 1e-12}


def at_every_step(path: Path, **options: Any) -> tuple[list[nn.Module], dualform.Memory]:
    """The model as it was after every step, and its memory."""
    history = [network()]
    _, memory = run(path, after_step=lambda model, step: history.append(copy.deepcopy(model)), **options)
    return history, memory


@pytest.mark.parametrize("fold", [True, False])
def test_the_dual_model_computes_what_the_model_computes(tmp_path: Path, fold: bool) -> None:
    model, memory = run(tmp_path / "run")
    dual = memory.dual(model, fold=fold)
    x = torch.randn(9, 6, dtype=torch.float64)
    assert torch.allclose(dual(x), model(x), **TOLERANCE)
    assert dual(x).dtype == x.dtype
    assert torch.allclose(dual(x[0]), model(x[0]), **TOLERANCE)
    assert torch.allclose(dual(x.reshape(3, 3, 6)), model(x.reshape(3, 3, 6)), **TOLERANCE)
    assert dual(x[:0]).shape == (0, 4)


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("until", range(7))
def test_until_is_the_model_of_that_step(tmp_path: Path, fold: bool, until: int) -> None:
    history, memory = at_every_step(tmp_path / "run")
    x = torch.randn(4, 6, dtype=torch.float64)
    dual = memory.dual(history[-1], until=until, fold=fold)
    assert torch.allclose(dual(x), history[until](x), **TOLERANCE)
    for name, tensor in memory.weights(until=until).items():
        assert torch.allclose(tensor, history[until].state_dict()[name], **TOLERANCE)
    if until == 0:
        assert all(memory.weights(until=0)[name].equal(t) for name, t in history[0].state_dict().items())


def test_the_weights_are_named_and_typed_as_in_the_state_dict(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.float64):
        model, memory = run(tmp_path / str(dtype), dtype=dtype)
        rebuilt = memory.weights()
        assert {n: (t.dtype, t.shape) for n, t in rebuilt.items()} == {
            n: (t.dtype, t.shape) for n, t in model.state_dict().items()
        }
        fresh = network(seed=7, dtype=dtype)
        fresh.load_state_dict(rebuilt)
        x = batch(1, dtype=dtype)[1]
        assert torch.allclose(fresh(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("where", [{"example": slice(3, 11)}, {"step": [1, 2]}, {"example": 99}, {"label": "odd"}])
@pytest.mark.parametrize("until", [None, 4])
def test_where_leaves_the_other_events_out(
    tmp_path: Path, fold: bool, where: dict[str, Any], until: int | None
) -> None:
    label = ["odd" if example % 2 else "even" for example in range(20)]
    model, memory = run(tmp_path / "run", examples={"label": label})
    end = until or 6
    options = {"lr": 0.1, "momentum": 0.9}
    expected = {name: tensor.double() for name, tensor in network().state_dict().items()}
    column, value = next(iter(where.items()))
    for at, layer in enumerate(("0", "2")):
        for block in memory.blocks(at, end):
            for row in range(len(block)):
                example, step = int(block.examples[row]), int(block.steps[row])
                truth = {"example": example, "step": step, "label": label[example]}[column]
                wanted = range(value.start, value.stop) if isinstance(value, slice) else value
                if truth == wanted or (not isinstance(wanted, (int, str)) and truth in wanted):
                    e = plain.response(options, end, step) * block.gradients[row]
                    expected[f"{layer}.weight"] = expected[f"{layer}.weight"] + torch.outer(e, block.keys[row])
                    expected[f"{layer}.bias"] = expected[f"{layer}.bias"] + e
    found = memory.weights(where=where, until=until)
    assert all(torch.allclose(found[name], tensor, **TOLERANCE) for name, tensor in expected.items())
    truth = network()
    truth.load_state_dict(expected)
    x = torch.randn(4, 6, dtype=torch.float64)
    dual = memory.dual(model, where=where, until=until, fold=fold)
    assert torch.allclose(dual(x), truth(x), **TOLERANCE)
    assert not torch.allclose(dual(x), memory.dual(model, until=until)(x), **TOLERANCE)


def test_masking_later_events_is_not_the_earlier_model(tmp_path: Path) -> None:
    """With momentum an event's value still grows after its step: until=3 and where(step ≤ 3) differ."""
    _, memory = run(tmp_path / "run")
    earlier, masked = memory.weights(until=3), memory.weights(where={"step": slice(0, 4)})
    moved = (earlier["0.weight"] - network()[0].weight).norm()
    assert (earlier["0.weight"] - masked["0.weight"]).norm() > 0.05 * moved


@pytest.mark.parametrize("fold", [True, False])
def test_the_dual_model_is_a_copy_for_inference(tmp_path: Path, fold: bool) -> None:
    model, memory = run(tmp_path / "run")
    model.train()
    before = copy.deepcopy(model.state_dict())
    dual = memory.dual(model, fold=fold)
    assert dual is not model and type(dual) is type(model)
    assert not any(parameter.requires_grad for parameter in dual.parameters())
    assert not any(module.training for module in dual.modules())
    assert all(parameter.requires_grad for parameter in model.parameters()) and model.training
    assert list(dual.state_dict()) == list(model.state_dict())
    assert [type(module) for module in dual.modules()] == [type(module) for module in model.modules()]
    with torch.no_grad():
        for parameter in dual.parameters():
            parameter.zero_()
    assert all(model.state_dict()[name].equal(tensor) for name, tensor in before.items())
    assert all("forward" not in vars(module) for module in model.modules())
    x = batch(1)[1]
    assert not dual(x).requires_grad


def test_an_attending_model_really_attends(tmp_path: Path) -> None:
    """fold=False must not use the copied weights: zeroing them changes nothing, and a copy of it still attends."""
    model, memory = run(tmp_path / "run")
    dual = memory.dual(model, fold=False)
    with torch.no_grad():
        for parameter in dual.parameters():
            parameter.fill_(torch.nan)
    x = batch(1)[1]
    assert torch.allclose(dual(x), model(x), **TOLERANCE)
    assert torch.allclose(copy.deepcopy(dual)(x), model(x), **TOLERANCE)
    assert torch.allclose(dual(x.requires_grad_()), model(x), **TOLERANCE)


def test_an_attending_layer_takes_its_input_by_name(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(input=x)

    model, memory = run(tmp_path / "run", model=Named())
    x = batch(1)[1]
    assert torch.allclose(memory.dual(model, fold=False)(x), model(x), **TOLERANCE)


def test_a_dual_model_made_while_recording_records_nothing(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(1, 4):
            ids, x, y = batch(step)
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.commit()
            dual = dualform.open(tmp_path / "run").dual(model).requires_grad_(True)
            F.cross_entropy(dual(x), y).backward()
    memory = dualform.open(tmp_path / "run")
    assert memory.manifest.events(0) == 15 and memory.certificate().exact


class Normalised(nn.Module):
    """Batch statistics and gains that no event makes, around recorded layers."""

    def __init__(self, vocabulary: int = 20) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 6)
        self.fc1 = nn.Linear(6, 8)
        self.batch_norm = nn.BatchNorm1d(8)
        self.layer_norm = nn.LayerNorm(8)
        self.fc2 = nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.batch_norm(self.fc1(self.embedding(ids)))
        return self.fc2(torch.relu(self.layer_norm(hidden)))


def normalised(path: Path, vocabulary: int, commits: tuple[int, ...]) -> tuple[list[Normalised], dualform.Memory]:
    torch.manual_seed(0)
    model = Normalised(vocabulary).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history = [copy.deepcopy(model)]
    with dualform.record(model, optimizer, path, on_error="raise") as recorder:
        for step in range(1, 6):
            ids, _, y = batch(step, size=6)
            with recorder.batch(ids):
                F.cross_entropy(model(ids), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append(copy.deepcopy(model))
            if step in commits:
                recorder.commit()
    return history, dualform.open(path)


@pytest.mark.parametrize("commits", [(), (1, 2, 4)])
@pytest.mark.parametrize("fold", [True, False])
def test_what_no_event_makes_is_that_of_the_step_too(tmp_path: Path, commits: tuple[int, ...], fold: bool) -> None:
    history, memory = normalised(tmp_path / "run", 20, commits)
    ids = torch.arange(20)
    given = Normalised(20).double()
    for until, then in enumerate(history):
        dual = memory.dual(given, until=until, fold=fold)
        assert torch.allclose(dual(ids), then.eval()(ids), rtol=0, atol=1e-10)
        assert dual.dualform_notes == ()
        for name, tensor in then.state_dict().items():
            if not name.startswith("fc"):
                assert dual.state_dict()[name].equal(tensor), (until, name)
    assert int(memory.dual(given, until=3).batch_norm.num_batches_tracked) == 3


def test_a_large_parameter_is_that_of_the_last_commit_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history, memory = normalised(tmp_path / "run", 1500, (2, 4))
    given = Normalised(1500).double()
    for until, stored in enumerate([0, 0, 2, 2, 4, 5]):
        with caplog.at_level(logging.INFO, "dualform"):
            caplog.clear()
            dual = memory.dual(given, until=until)
        assert dual.embedding.weight.equal(history[stored].embedding.weight)
        assert dual.layer_norm.weight.equal(history[until].layer_norm.weight)
        exact = until == stored
        note = f"embedding.weight is approximate: stored at step {stored}, not {until}"
        assert dual.dualform_notes == (() if exact else (note,))
        assert caplog.messages == ([] if exact else [note])
        if exact:
            ids = torch.arange(20)
            assert torch.allclose(dual(ids), history[until].eval()(ids), rtol=0, atol=1e-10)


def test_what_the_memory_never_saw_is_taken_from_the_given_model_and_named(tmp_path: Path) -> None:
    _, memory = run(tmp_path / "run")
    given = network()
    given.register_buffer("temperature", torch.tensor(2.0))
    given.append(nn.Linear(4, 4, dtype=torch.float64))
    dual = memory.dual(given)
    names = ["temperature", "3.weight", "3.bias"]
    assert sorted(dual.dualform_notes) == sorted(f"{n} is taken from the given model: it is not stored" for n in names)


def test_only_chosen_layers_are_in_dual_form(tmp_path: Path) -> None:
    history, memory = at_every_step(tmp_path / "run", layers="2")
    x = batch(1)[1]
    for fold in (True, False):
        dual = memory.dual(network(seed=4), fold=fold, until=3)
        assert torch.allclose(dual(x), history[3](x), **TOLERANCE)
    assert set(memory.weights()) == {"2.weight", "2.bias"}


def test_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    _, memory = run(tmp_path / "run")
    for fold in (True, False):
        for wrong in (nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)), nn.Sequential(), nn.Linear(6, 8)):
            with pytest.raises(ModelMismatch):
                memory.dual(wrong.double(), fold=fold)


def plain_kernel_output(memory: dualform.Memory, model: nn.Sequential, x: Tensor, kernel: Any) -> Tensor:
    """W0 q + V k(Kᵀ q) + b, layer by layer, with the values of plain SGD."""
    for at, layer in ((0, "0"), (1, "2")):
        (block,) = memory.blocks(at, memory.steps)
        values = torch.stack([-0.1 * gradient for gradient in block.gradients])
        bias = memory.weights()[f"{layer}.bias"]
        x = x @ memory.initial(f"{layer}.weight").T + kernel(x @ block.keys.T) @ values + bias
        x = torch.relu(x) if at == 0 else x
    return x


@pytest.mark.parametrize("fold", [True, False])
def test_a_kernel_replaces_the_scores_in_every_layer(tmp_path: Path, fold: bool) -> None:
    model = network()
    _, memory = run(tmp_path / "run", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(5, 6, dtype=torch.float64)
    kernels: list[tuple[Any, Any]] = [
        ("softmax", lambda a: a.softmax(dim=1)),
        (torch.relu, torch.relu),
        (lambda a: a, lambda a: a),
        (lambda a: 0 * a, lambda a: 0 * a),
    ]
    for asked, plainly in kernels:
        dual = memory.dual(model, kernel=asked, fold=fold)
        assert torch.allclose(dual(x), plain_kernel_output(memory, model, x, plainly), rtol=0, atol=1e-11)


def test_a_kernel_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    model, memory = run(tmp_path / "run")
    with pytest.raises(BadQuery, match="'softmax' or a function"):
        memory.dual(model, kernel="rbf")(batch(1)[1])
    with pytest.raises(BadQuery, match="must keep the shape"):
        memory.dual(model, kernel=lambda a: a.sum(dim=1))(batch(1)[1])


class Shared(nn.Module):
    """Two weights with one bias, and two modules with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6, dtype=torch.float64)
        self.b = nn.Linear(6, 6, dtype=torch.float64)
        self.c = nn.Linear(6, 6, dtype=torch.float64)
        self.b.bias = self.a.bias
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))[:, :4]


@pytest.mark.parametrize("fold", [True, False])
def test_shared_weights_and_biases(tmp_path: Path, fold: bool) -> None:
    torch.manual_seed(0)
    model, memory = run(tmp_path / "run", model=Shared())
    x = batch(1)[1]
    assert torch.allclose(memory.dual(model, fold=fold)(x), model(x), **TOLERANCE)
    assert set(memory.weights()) == set(model.state_dict())
    spotlight = memory.attend(model, x)
    hidden = torch.tanh(model.a(x))
    for layer, truth in (("a", model.a(x)), ("b", model.b(hidden)), ("c", model.c(torch.tanh(model.b(hidden))))):
        assert torch.allclose(spotlight[layer].output(), truth, **TOLERANCE)
    assert memory.certificate().exact and [row.weight for row in memory.certificate()] == ["a.weight", "b.weight"]


def test_a_masked_shared_bias_leaves_out_the_events_of_every_weight(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, memory = run(tmp_path / "run", model=Shared())
    x = batch(1)[1]
    where = {"example": slice(0, 8)}
    folded, attending = (memory.dual(model, where=where, fold=fold)(x) for fold in (True, False))
    assert torch.allclose(folded, attending, **TOLERANCE)


def test_recording_may_begin_in_the_middle_of_a_training(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(20, 23):
        _, x, y = batch(step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    start = copy.deepcopy(model)
    model, memory = run(tmp_path / "run", model=model, optimizer=optimizer)
    x = batch(1)[1]
    for fold in (True, False):
        assert torch.allclose(memory.dual(model, fold=fold)(x), model(x), **TOLERANCE)
        assert torch.allclose(memory.dual(model, fold=fold, until=0)(x), start(x), **TOLERANCE)
    masked = memory.weights(where={"example": 99})["0.weight"]
    assert not torch.allclose(masked, start[0].weight, atol=1e-6), "the old velocity moved it, not an event"


def test_a_step_or_a_rank_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    model, memory = run(tmp_path / "run")
    with pytest.raises(BadCall, match="until must be a step from 0 to 6"):
        memory.dual(model, until=7)
    with pytest.raises(BadQuery, match="no column 'task'"):
        memory.dual(model, where={"task": "mnist"})
