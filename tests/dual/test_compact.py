"""Remark 3.4: fewer key/value pairs for the same layer, with an honest error."""

from pathlib import Path
from typing import Any

import pytest
import torch

import plain
from dualform.errors import BadCall, BadQuery
from plain import DIM_IN, DIM_OUT
from small import batch, network, run


@pytest.mark.parametrize("layer", ["0", "2"])
def test_at_full_rank_the_compact_system_is_the_layer(tmp_path: Path, layer: str) -> None:
    model, memory = run(tmp_path / "run")
    compact = memory.compact(layer)
    module = model.get_submodule(layer)
    full = min(module.weight.shape)
    assert (compact.rank, compact.layer) == (full, layer)
    assert compact.keys.shape == (full, module.in_features) and compact.values.shape == (full, module.out_features)
    assert compact.error == 0.0
    x = torch.randn(3, 2, module.in_features, dtype=torch.float64)
    assert torch.allclose(compact.output(x), module(x), rtol=0, atol=1e-12)
    assert compact.output(x[0, 0]).shape == (module.out_features,)
    assert compact.output(x.float()).dtype == torch.float64
    assert repr(compact) == f"Compact({layer!r}: {full} key/value pairs, error 0.0e+00)"


def test_the_error_is_what_is_left_out_of_what_was_learned() -> None:
    """‖ΔW − V Kᵀ‖_F / ‖ΔW‖_F, and no smaller one is possible (Eckart and Young)."""
    history = plain.history("float64")
    learned = torch.zeros(DIM_OUT, DIM_IN, dtype=torch.float64)
    for event in history.events:
        value = history.coefficient(event, 6) * torch.tensor(event.gradient, dtype=torch.float64)
        learned += torch.outer(value, torch.tensor(event.key, dtype=torch.float64))
    sizes = torch.linalg.svdvals(learned)
    errors = []
    for rank in range(1, DIM_OUT + 1):
        compact = history.memory.compact("fc", rank)
        assert compact.rank == rank
        left = learned - compact.values.T @ compact.keys
        assert compact.error == pytest.approx(float(left.norm() / learned.norm()), abs=1e-12)
        assert compact.error == pytest.approx(float(sizes[rank:].norm() / sizes.norm()), abs=1e-12)
        errors.append(compact.error)
    assert errors[0] > errors[1] > errors[2] == 0.0


def test_bias_and_initial_weight_are_those_of_the_use() -> None:
    history = plain.history("float64")
    kept = plain.response(plain.OF_WEIGHTS, 6, 0, 1.0)
    x = torch.randn(4, DIM_IN, dtype=torch.float64)
    for layer in ("fc", "twin"):
        module = getattr(history.model, layer)
        compact = history.memory.compact(layer)
        assert torch.allclose(compact.initial_weight, kept * history.initial["fc.weight"], rtol=0, atol=1e-14)
        assert torch.allclose(compact.bias, module.bias, rtol=0, atol=1e-12)
        assert torch.allclose(compact.output(x), module(x), rtol=0, atol=1e-11)


def test_a_layer_that_learned_nothing_has_no_error(tmp_path: Path) -> None:
    model = network()
    model[0].requires_grad_(False)
    model, memory = run(tmp_path / "run", model=model)
    compact = memory.compact("0", 2)
    assert compact.error == 0.0 and compact.values.abs().max() == 0.0
    x = batch(1)[1]
    assert torch.allclose(compact.output(x), model[0](x), rtol=0, atol=1e-13)


@pytest.mark.parametrize("rank", [0, -1, 5, True])
def test_a_rank_that_makes_no_sense_is_refused(tmp_path: Path, rank: Any) -> None:
    _, memory = run(tmp_path / "run")
    with pytest.raises(BadCall, match="rank must be a whole number from 1 to 4, the smaller side of 2.weight"):
        memory.compact("2", rank)


def test_an_unknown_layer_is_refused(tmp_path: Path) -> None:
    _, memory = run(tmp_path / "run")
    with pytest.raises(BadQuery, match="'9' is not recorded; recorded layers: 0, 2"):
        memory.compact("9")
