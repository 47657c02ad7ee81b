"""Every statement of the paper's sections 2 to 4, on real recorded runs, against the formula as it is printed.

"The Dual Form of Neural Networks Revisited", ICML 2022. K, V, X, E have their vectors as columns, as there.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import dualform
from dualform.blocks import Block
from dualform.memory import StoredMemory

DIM_IN, HIDDEN, DIM_OUT = 6, 5, 4
LR = 0.1
TASKS = ["first"] * 10 + ["second"] * 10

float64 = {"dtype": torch.float64}


class Net(nn.Module):
    """Two linear layers with or without a bias, and a nonlinearity or none between them."""

    def __init__(self, bias: bool = True, relu: bool = True) -> None:
        super().__init__()
        self.fc1 = nn.Linear(DIM_IN, HIDDEN, bias, **float64)
        self.fc2 = nn.Linear(HIDDEN, DIM_OUT, bias, **float64)
        self.act = nn.ReLU() if relu else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


def trained(path: Path, model: nn.Module, inputs: Tensor | None = None, steps: int = 12) -> dualform.Memory:
    """Gradient descent as in footnote 3, e_t = −η (∇_y L)_t: two tasks after each other, one after half the steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(20, DIM_IN, generator=generator, **float64) if inputs is None else inputs
    targets = torch.randn(20, DIM_OUT, generator=generator, **float64)
    with dualform.record(model, optimizer, path, examples={"task": TASKS}, on_error="raise") as recorder:
        for step in range(steps):
            ids = torch.randint(10, (5,), generator=generator) + (10 if step >= steps // 2 else 0)
            with recorder.batch(ids):
                (model(table[ids]) - targets[ids]).square().sum().div(5).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                recorder.commit()
    return dualform.open(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Net, Net, dualform.Memory]:
    """The trained network, the network before training, and the memory."""
    torch.manual_seed(0)
    model, start = Net(), Net()
    start.load_state_dict(model.state_dict())
    return model, start, trained(tmp_path_factory.mktemp("paper") / "run", model)


@pytest.fixture(scope="module")
def without_bias(tmp_path_factory: pytest.TempPathFactory) -> tuple[Net, Net, dualform.Memory]:
    """The same without biases and without a nonlinearity."""
    torch.manual_seed(0)
    model, start = Net(bias=False, relu=False), Net(bias=False, relu=False)
    start.load_state_dict(model.state_dict())
    return model, start, trained(tmp_path_factory.mktemp("paper") / "run", model)


def attention(K: Tensor, V: Tensor, q: Tensor) -> Tensor:
    """Definition 2.1: Attention(K, V, q) = Σ_t α_t v_t with α_t = k_t · q, term by term."""
    total = torch.zeros(V.shape[0], **float64)
    for t in range(K.shape[1]):
        total = total + torch.dot(K[:, t], q) * V[:, t]
    return total


def keys_and_values(memory: dualform.Memory, weight: int) -> tuple[Tensor, Tensor]:
    """X and E of Corollary 1, with e_t = −η g_t."""
    blocks = list(memory.blocks(weight, memory.steps))
    return torch.cat([b.keys for b in blocks]).T, -LR * torch.cat([b.gradients for b in blocks]).T


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


matrices = st.builds(
    lambda seed, T, i, o: tuple(
        torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)) for shape in [(i, T), (o, T), (i,)]
    ),
    st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 8), st.integers(1, 8),
)  # fmt: skip


def attended(path: Path, K: Tensor, V: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """A layer with W0 = 0 trained on exactly these keys and values: what it attends, and its weight."""
    model = nn.Sequential(nn.Linear(K.shape[0], V.shape[0], bias=False, **float64))
    nn.init.zeros_(model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with dualform.record(model, optimizer, path, on_error="raise") as recorder:
        with recorder.batch(torch.arange(K.shape[1])):
            (model(K.T) * -V.T).sum().backward()
        optimizer.step()
    memory = dualform.open(path)
    return memory.attend(None, {"0": q})["0"].output(), model[0].weight.detach()


@hypothesis.given(matrices)
@hypothesis.settings(max_examples=25)
def test_lemma_2_2_attention_is_V_K_transposed_q(drawn: tuple[Tensor, Tensor, Tensor]) -> None:
    """Lemma 2.2, Eq. 2: Attention(K, V, q) = V Kᵀ q, for a memory that holds any K and V."""
    K, V, q = drawn
    with tempfile.TemporaryDirectory() as directory:
        found, _ = attended(Path(directory) / "run", K, V, q)
    scale = float((V.abs() @ K.T.abs() @ q.abs()).max()) + 1.0
    assert (found - V @ K.T @ q).abs().max() <= 1e-13 * scale
    assert (found - attention(K, V, q)).abs().max() <= 1e-13 * scale


@hypothesis.given(matrices)
@hypothesis.settings(max_examples=25)
def test_proposition_1_a_linear_layer_and_an_attention_layer_are_equivalent(
    drawn: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Proposition 1, Eq. 7-10: S1(x) = W x with W = Σ v_t ⊗ k_t equals S2(x) = Attention(K, V, x)."""
    K, V, x = drawn
    W = torch.zeros(V.shape[0], K.shape[0], **float64)
    for t in range(K.shape[1]):
        W += torch.outer(V[:, t], K[:, t])
    with tempfile.TemporaryDirectory() as directory:
        S2, weight = attended(Path(directory) / "run", K, V, x)
    scale = float((V.abs() @ K.T.abs() @ x.abs()).max()) + 1.0
    assert (weight - W).abs().max() <= 1e-13 * float((V.abs() @ K.T.abs()).max() + 1.0)
    assert (S2 - W @ x).abs().max() <= 1e-13 * scale


def test_corollary_1_the_weight_is_its_initialisation_plus_all_outer_products(
    run: tuple[Net, Net, dualform.Memory],
) -> None:
    """Corollary 1, Eq. 11: W = W0 + Σ e_t ⊗ x_t."""
    model, start, memory = run
    for at, layer in enumerate(("fc1", "fc2")):
        X, E = keys_and_values(memory, at)
        assert X.shape[1] == 60
        W = start.get_submodule(layer).weight.detach() + sum(torch.outer(E[:, t], X[:, t]) for t in range(X.shape[1]))
        assert close(W, model.get_submodule(layer).weight)
        assert close(memory.weights()[f"{layer}.weight"], W)
    assert memory.certificate().exact


@pytest.mark.parametrize("layer", ["fc1", "fc2"])
def test_corollary_1_primal_and_dual_layer_are_equivalent(run: tuple[Net, Net, dualform.Memory], layer: str) -> None:
    """Corollary 1, Eq. 12 and 13: W x = W0 x + Attention(X, E, x); a bias adds its own part to both."""
    model, start, memory = run
    X, E = keys_and_values(memory, ("fc1", "fc2").index(layer))
    primal, before = model.get_submodule(layer), start.get_submodule(layer)
    queries = torch.randn(6, X.shape[0], generator=torch.Generator().manual_seed(4), **float64)
    found = memory.attend(None, {layer: queries})[layer]
    for at, x in enumerate(queries):
        S1 = primal.weight @ x
        S2 = before.weight @ x + attention(X, E, x)
        assert close(S1, S2)
        assert close(found.output()[at] - primal.bias, S2)
        assert close(found.scores()[at].double(), (X.T @ x).float().double())


@hypothesis.given(seed=st.integers(0, 2**32), size=st.sampled_from([0.0, 1e-3, 1.0, 1e6]), fold=st.booleans())
def test_definition_2_4_the_dual_model_is_equivalent_to_the_primal_one(
    run: tuple[Net, Net, dualform.Memory], seed: int, size: float, fold: bool
) -> None:
    """Definition 2.4, Eq. 6: for any input the outputs are equal, of the whole network."""
    model, _, memory = run
    x = size * torch.randn(3, DIM_IN, generator=torch.Generator().manual_seed(seed), **float64)
    primal, dual = model(x), memory.dual(model, fold=fold)(x)
    assert (primal - dual).abs().max() <= 1e-12 * (1 + size)


@contextmanager
def shuffled(seed: int) -> Iterator[None]:
    """Inside, the events of every memory come in another order, all in one block."""
    read = StoredMemory.blocks

    def blocks(memory: StoredMemory, weight: int, until: int, since: int = 0, gather: Any = None) -> Iterator[Block]:
        parts = list(read(memory, weight, until, since=since, gather=gather))
        order = torch.randperm(sum(map(len, parts)), generator=torch.Generator().manual_seed(seed))
        fields = Block.__dataclass_fields__
        yield Block(**{name: torch.cat([getattr(part, name) for part in parts])[order] for name in fields})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredMemory, "blocks", blocks)
        yield


@pytest.mark.parametrize("seed", range(3))
def test_remark_3_1_shuffling_the_memory_changes_nothing(run: tuple[Net, Net, dualform.Memory], seed: int) -> None:
    """Remark 3.1: attention is invariant under a permutation of the columns of X and E."""
    model, _, memory = run
    x = torch.randn(4, DIM_IN, generator=torch.Generator().manual_seed(5), **float64)
    for layer in ("fc1", "fc2"):
        in_order = memory.attend(model, x)[layer]
        scores, output, totals = in_order.scores(), in_order.output(), in_order.totals(by="task").values
        with shuffled(seed):
            another = dualform.open(memory.path)
            found = another.attend(model, x)[layer]
            assert not found.scores().equal(scores), "it really is another order"
            assert found.scores().sort(dim=1).values.equal(scores.sort(dim=1).values)
            assert close(found.output(), output) and close(found.totals(by="task").values, totals)
            assert close(another.weights()[f"{layer}.weight"], model.get_submodule(layer).weight)


def test_remark_3_1_nothing_is_forgotten(run: tuple[Net, Net, dualform.Memory]) -> None:
    """Remark 3.1: what the first task put into the weight is still there, exactly, after the second one."""
    model, _, memory = run
    half = memory.steps // 2
    assert {"first", "second"} == set(memory.column("task").groups[0])
    without_second = memory.weights(where={"task": "first"})
    then = memory.weights(until=half)
    for name, tensor in model.state_dict().items():
        assert close(without_second[name], then[name])
        assert not torch.allclose(without_second[name], tensor, atol=1e-3), "the second task did change it"
    x = torch.randn(3, DIM_IN, generator=torch.Generator().manual_seed(6), **float64)
    found = memory.attend(model, x)["fc2"]
    totals = found.contributions().totals(by="task")
    assert list(totals.groups) == ["first", "second"]
    assert close(found.initial() + totals.values.sum(dim=1), model(x))
    assert close(found.where(task="first").output(), found.initial() + totals.values[:, 0])
    assert found.where(task="first").scores().shape[1] == 30, "every event of the first task can be retrieved"


KERNELS = {
    "softmax": ("softmax", lambda scores: torch.softmax(scores, dim=0)),
    "a square": (torch.square, torch.square),
    "an exponential": (lambda scores: torch.exp(0.1 * scores), lambda scores: torch.exp(0.1 * scores)),
    "the identity": (lambda scores: scores, lambda scores: scores),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("layer", ["fc1", "fc2"])
def test_remark_3_2_another_kernel_is_the_plain_formula(
    run: tuple[Net, Net, dualform.Memory], layer: str, name: str
) -> None:
    """Remark 3.2: W0 q + V k(Kᵀ q) + b, softmax over all events at once though they are read in parts."""
    model, start, memory = run
    asked, k = KERNELS[name]
    X, E = keys_and_values(memory, ("fc1", "fc2").index(layer))
    module, before = model.get_submodule(layer), start.get_submodule(layer)
    queries = 3 * torch.randn(4, X.shape[0], generator=torch.Generator().manual_seed(7), **float64)
    found = memory.attend(None, {layer: queries})[layer].output(kernel=asked)
    for at, q in enumerate(queries):
        assert close(found[at], before.weight @ q + E @ k(X.T @ q) + module.bias)


def test_remark_3_2_softmax_of_very_large_scores_is_finite(run: tuple[Net, Net, dualform.Memory]) -> None:
    """Remark 3.2: one event takes all the weight; nothing overflows."""
    _, start, memory = run
    X, E = keys_and_values(memory, 0)
    q = 1e6 * torch.randn(DIM_IN, generator=torch.Generator().manual_seed(8), **float64)
    found = memory.attend(None, {"fc1": q})["fc1"].output(kernel="softmax")
    expected = start.fc1.weight @ q + E @ torch.softmax(X.T @ q, dim=0) + memory.weights()["fc1.bias"]
    assert torch.allclose(found, expected, rtol=1e-12, atol=0)


def test_remark_3_2_the_identity_kernel_is_the_dual_form(run: tuple[Net, Net, dualform.Memory]) -> None:
    """Remark 3.2: with k the identity, the kernel machine is the trained network again."""
    model, _, memory = run
    x = torch.randn(4, DIM_IN, generator=torch.Generator().manual_seed(9), **float64)
    assert close(memory.dual(model, kernel=lambda scores: scores)(x), model(x))
    assert not torch.allclose(memory.dual(model, kernel="softmax")(x), model(x), atol=1e-3)


def test_remark_3_3_an_input_orthogonal_to_all_keys_gets_W0_x(tmp_path: Path) -> None:
    """Remark 3.3: keys in the first three coordinates, an input in the others: the output is W0 x."""
    torch.manual_seed(2)
    model, start = Net(bias=False), Net(bias=False)
    start.load_state_dict(model.state_dict())
    inputs = torch.randn(20, DIM_IN, **float64)
    inputs[:, 3:] = 0.0
    memory = trained(tmp_path / "run", model, inputs)
    x = torch.randn(4, DIM_IN, **float64)
    x[:, :3] = 0.0
    found = memory.attend(model, x)["fc1"]
    assert found.scores().abs().max() == 0.0
    assert found.contributions().totals(by="task").values.abs().max() == 0.0
    assert close(found.output(), x @ start.fc1.weight.T)
    assert close(model.fc1(x), start.fc1(x)), "and so it is in the primal form"
    assert not torch.allclose(model.fc1.weight, start.fc1.weight, atol=1e-3), "although the layer did learn"


@pytest.mark.parametrize("layer", ["fc1", "fc2"])
def test_remark_3_4_a_more_compact_attention_system(run: tuple[Net, Net, dualform.Memory], layer: str) -> None:
    """Remark 3.4: at full rank an equivalent system; below, the error is the relative Frobenius distance."""
    model, start, memory = run
    module = model.get_submodule(layer)
    learned = (module.weight - start.get_submodule(layer).weight).detach()
    x = torch.randn(5, module.in_features, generator=torch.Generator().manual_seed(3), **float64)
    full = min(learned.shape)
    errors = []
    for rank in range(1, full + 1):
        compact = memory.compact(layer, rank)
        K, V = compact.keys.T, compact.values.T
        assert K.shape[1] == V.shape[1] == rank < memory.manifest.events(0)
        plain = float((learned - V @ K.T).norm() / learned.norm())
        assert compact.error == pytest.approx(plain, abs=1e-12)
        errors.append(compact.error)
        expected = start.get_submodule(layer).weight @ x[0] + attention(K, V, x[0]) + module.bias
        assert close(compact.output(x)[0], expected)
    assert all(a > b for a, b in pairwise(errors)) and errors[-1] == 0.0
    assert close(memory.compact(layer).output(x), module(x))


@pytest.mark.parametrize("layer", ["fc1", "fc2"])
def test_equation_14_the_kernel_machine_with_a_bias(run: tuple[Net, Net, dualform.Memory], layer: str) -> None:
    """Eq. 14: Attention(X, A, x) + b = Σ a_t K(x_t, x) + b, with the dot product as K and W0 x in front."""
    model, start, memory = run
    X, A = keys_and_values(memory, ("fc1", "fc2").index(layer))
    b = start.get_submodule(layer).bias.detach() + A.sum(dim=1)  # the bias was moved by the same error signals
    assert close(b, model.get_submodule(layer).bias)
    x = torch.randn(X.shape[0], generator=torch.Generator().manual_seed(10), **float64)
    machine = sum(A[:, t] * (X[:, t] * x).sum() for t in range(X.shape[1])) + b
    found = memory.attend(None, {layer: x})[layer]
    assert close(found.output() - start.get_submodule(layer).weight @ x, machine)
    # By the same error signals: each event's contribution holds its part of the bias, so that they add up.
    assert close(found.initial(), start.get_submodule(layer).weight @ x + start.get_submodule(layer).bias)
    assert close(found.contributions().totals(by="step").values.sum(dim=(0, 1)), machine - b + A.sum(dim=1))


def test_equation_17_two_linear_layers_are_attention(without_bias: tuple[Net, Net, dualform.Memory]) -> None:
    """Eq. 17: W2 W1 x = Attention(W1ᵀ, W2, x): the rows of W1 are keys, the columns of W2 values."""
    model, _, memory = without_bias
    W1, W2 = model.fc1.weight.detach(), model.fc2.weight.detach()
    rebuilt = memory.weights()
    dual, attending = memory.dual(model), memory.dual(model, fold=False)
    for x in torch.randn(5, DIM_IN, generator=torch.Generator().manual_seed(11), **float64):
        expected = attention(W1.T, W2, x)
        assert close(W2 @ W1 @ x, expected)
        assert close(model(x), expected)
        assert close(attention(rebuilt["fc1.weight"].T, rebuilt["fc2.weight"], x), expected)
        assert close(dual(x), expected)
        assert close(attending(x), expected), "two levels of attention over training events give the same"
