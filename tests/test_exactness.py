"""What the product promises, on random networks, batches, optimisers and loops, against the plain truth."""

import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch

import dualform
from loops import Run, Trained, runs, train

# A failing run is printed as drawn: shrinking it would train for minutes.
PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.generate)

FLOOR = {torch.float64: 1e-12, torch.float32: 1e-4}


def recorded(run: Run, directory: str) -> tuple[Trained, dualform.Memory]:
    path = Path(directory) / "run"
    result = train(run, lambda model, optimizers: dualform.record(model, optimizers, path, on_error="raise"))
    return result, dualform.open(path)


def check(run: Run) -> None:
    with tempfile.TemporaryDirectory() as directory:
        result, memory = recorded(run, directory)
        plain = train(run)
        for mine, theirs in zip(result.history, plain.history, strict=True):
            for name in mine:
                assert mine[name].equal(theirs[name]), f"recording changed the training of {name}"

        for row in memory.certificate():
            assert row.exact, f"{row}\n{memory.manifest.findings}"
            assert row.residual <= max(FLOOR[run.dtype], 10 * row.rounding)

        eps = torch.finfo(run.dtype).eps
        for step, truth in enumerate(result.history):
            rebuilt = memory.weights(until=step)
            for name, tensor in truth.items():
                moved = max(float((later[name] - result.history[0][name]).norm()) for later in result.history)
                floor = 10 * eps * max(step, 1) ** 0.5 * float(max(tensor.norm(), moved))
                allowed = max(FLOOR[run.dtype] * moved, floor)
                assert (rebuilt[name] - tensor).norm() <= allowed, (step, name)

        with torch.no_grad():
            x = result.test_inputs
            primal = result.model(x)
            dual = memory.dual(result.model, fold=False)(x)
        relative = 1e-10 if run.dtype == torch.float64 else 1e-4
        assert (dual - primal).abs().max() <= relative * primal.abs().max().clamp_min(1e-30)


@hypothesis.given(runs(torch.float64))
@hypothesis.settings(max_examples=150, phases=PHASES)
def test_every_run_is_exact_in_fp64(run: Run) -> None:
    check(run)


@hypothesis.given(runs(torch.float32))
@hypothesis.settings(max_examples=100, phases=PHASES)
def test_every_run_is_exact_in_fp32(run: Run) -> None:
    check(run)


# Wider than one everywhere: of a lone number that was clipped nothing can tell the scale, and the certificate says so.
@pytest.mark.long
@hypothesis.given(runs(torch.float64).filter(lambda run: min(run.widths) > 1))
@hypothesis.settings(
    max_examples=2000,
    derandomize=False,
    phases=PHASES,
    suppress_health_check=[hypothesis.HealthCheck.filter_too_much],
)
def test_many_more_runs_are_exact(run: Run) -> None:
    check(run)
