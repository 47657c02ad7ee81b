"""A memory through all that can happen to it, in any order, against a plain list of what happened."""

import copy
import random
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn

import dualform
from dualform.errors import BadMemory, DamagedMemory, MemoryInUse
from dualform.memory import repair, verify, writer
from dualform.memory.derived import derived_files
from dualform.memory.manifest import MANIFEST, read_manifest
from dualform.queries.keyframes import Keyframes
from faults import Fault, Stopped, compiled, faulty

EXAMPLES = 5
X = torch.randn(EXAMPLES, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@dataclass(frozen=True)
class Step:
    """What the two layers saw and what reached them in one step."""

    keys: tuple[Tensor, Tensor]
    gradients: tuple[Tensor, Tensor]
    examples: Tensor


recording = precondition(lambda self: self.recorder is not None)
at_rest = precondition(lambda self: self.recorder is None)
place = st.floats(0, 1, exclude_max=True)
operation = st.integers(1, 14)
steps_back = st.sampled_from([0, 0, 1, 2, 3, 5, 100])
some_batches = st.lists(
    st.tuples(st.lists(st.integers(0, EXAMPLES - 1), min_size=1, max_size=4), st.sampled_from([0.0, 0.0, 0.5])),
    min_size=1,
    max_size=4,
)
Batches = list[tuple[list[int], float]]  # of each the ids, and how much its inputs are shifted by the step


class Life(RuleBasedStateMachine):
    """One directory, and the plain truth: a list of steps, a checkpoint after each, and the columns."""

    compiled = False

    def __init__(self) -> None:
        super().__init__()
        self.resources = ExitStack()
        self.path = Path(self.resources.enter_context(tempfile.TemporaryDirectory(prefix="dualform-life-"))) / "run"
        # No commit but those that are asked for.
        self.resources.enter_context(mock.patch.object(writer.Writer, "due", return_value=False))
        self.resources.enter_context(mock.patch.object(Keyframes, "spacing", 3))
        self.resources.enter_context(mock.patch("os.fsync", return_value=None))
        self.recorder: dualform.Recorder | None = None
        self.steps: list[Step] = []
        self.checkpoints: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.columns: dict[str, list[Any]] = {}
        self.committed = 0
        self.random = random.Random(0)

    def teardown(self) -> None:
        if self.recorder is not None:
            self.drop()
        self.resources.close()

    @initialize(dtype=st.sampled_from([torch.float64, torch.float32]), nesterov=st.booleans(), batches=some_batches)
    def begin(self, dtype: torch.dtype, nesterov: bool, batches: Batches) -> None:
        self.dtype, self.nesterov = torch.float32 if self.compiled else dtype, nesterov
        if self.compiled:
            compiled(self.resources.enter_context(pytest.MonkeyPatch.context()), room=6000)
        self.make()
        self.columns = {"label": [0, 1, 2, 0, 1]}
        self.start(None)
        self.save()
        self.train(batches)
        self.commit()

    def make(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)).to(self.dtype)
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=self.nesterov)

    def start(self, resume_at: int | None) -> None:
        examples = self.columns if resume_at is None else None
        self.recorder = dualform.record(
            self.model, self.optimizer, self.path, examples=examples, resume_at=resume_at, on_error="raise"
        ).start()

    def save(self) -> None:
        self.checkpoints.append(copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict())))

    def load(self, step: int) -> None:
        self.make()
        state, of_optimizer = self.checkpoints[step]
        self.model.load_state_dict(state)
        self.optimizer.load_state_dict(copy.deepcopy(of_optimizer))

    def drop(self) -> None:
        """What is left when a process is gone: no hooks, no thread, no lock."""
        assert self.recorder is not None
        self.recorder._remove_hooks()
        self.recorder._writer._thread.shutdown()
        self.recorder._release()
        self.recorder = None

    def forget_after(self, step: int) -> None:
        self.committed = step
        del self.steps[step:], self.checkpoints[step + 1 :]

    def train(self, batches: Batches) -> None:
        assert self.recorder is not None
        for ids, shift in batches:
            if self.compiled:  # steps that are alike are worked out together
                ids = (4 * ids)[:4]
            x = (X[ids] + shift * len(self.steps)).to(self.dtype)
            with self.recorder.batch(ids):
                first = self.model[0](x)
                hidden = torch.tanh(first)
                second = self.model[2](hidden)
                first.retain_grad()
                second.retain_grad()
                F.cross_entropy(second, torch.tensor(ids) % 2).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps.append(Step((x, hidden.detach()), (first.grad, second.grad), torch.tensor(ids)))
            self.save()

    def commit(self) -> None:
        assert self.recorder is not None
        self.recorder.commit()
        self.committed = len(self.steps)

    @recording
    @rule(batches=some_batches, commit=st.booleans())
    def go_on(self, batches: Batches, commit: bool) -> None:
        self.train(batches)
        if commit:
            self.commit()

    @recording
    @rule()
    def close(self) -> None:
        assert self.recorder is not None
        self.recorder.close()
        self.recorder = None
        self.committed = len(self.steps)

    @recording
    @rule()
    def die(self) -> None:
        self.drop()
        self.forget_after(self.committed)

    @recording
    @rule(at=operation, torn=st.booleans(), closing=st.booleans())
    def die_in_a_commit(self, at: int, torn: bool, closing: bool) -> None:
        assert self.recorder is not None
        self.stopped(self.recorder.close if closing else self.recorder.commit, at, torn)
        self.drop()
        found = read_manifest(self.path).steps
        assert found in (self.committed, len(self.steps))
        self.forget_after(found)

    def stopped(self, function: Callable[[], object], at: int, torn: bool) -> None:
        with faulty(Fault(at, torn=torn)), suppress(Stopped):
            function()

    @at_rest
    @rule(back=steps_back, batches=some_batches)
    def resume(self, back: int, batches: Batches) -> None:
        step = max(self.committed - back, 0)
        self.load(step)
        self.start(step)
        self.forget_after(step)
        self.train(batches)

    @at_rest
    @rule(back=steps_back, at=operation, torn=st.booleans())
    def die_while_resuming(self, back: int, at: int, torn: bool) -> None:
        step = max(self.committed - back, 0)
        self.load(step)
        self.stopped(lambda: self.start(step), at, torn)
        if self.recorder is not None:
            self.drop()
        found = read_manifest(self.path).steps
        assert found in (self.committed, step)
        self.forget_after(found)

    @rule(name=st.sampled_from(["label", "author"]), seed=st.integers(0, 99), texts=st.booleans())
    def annotate(self, name: str, seed: int, texts: bool) -> None:
        numbers = random.Random(seed).choices(range(3), k=EXAMPLES)
        self.columns[name] = [f"ü{number}" for number in numbers] if texts else numbers
        dualform.open(self.path).annotate(**{name: self.columns[name]})

    @rule(
        kind=st.sampled_from(["segments", "examples", "derived", ""]), which=place, where=place, repaired=st.booleans()
    )
    def damage(self, kind: str, which: float, where: float, repaired: bool) -> None:
        """Flip a bit of some file, which is then found; and restore the file, or repair the memory without it."""
        before = {name: (self.path / name).read_bytes() for name in self.files()}
        names = [name for name in before if name.startswith(kind)]
        if not names:
            return
        name = names[int(which * len(names))]
        content = before[name]
        at, bit = divmod(int(where * 8 * len(content)), 8)
        (self.path / name).write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
        if name != MANIFEST:
            assert verify(self.path).damaged == (name,)
        if name == MANIFEST:
            with pytest.raises(BadMemory):
                repair(self.path)
        elif self.recorder is not None:
            with pytest.raises(MemoryInUse):
                repair(self.path)
        elif name == "initial.safetensors":
            with pytest.raises(DamagedMemory):
                repair(self.path)
        elif repaired:
            self.repair(name)
            return
        (self.path / name).write_bytes(content)
        assert before == {name: (self.path / name).read_bytes() for name in self.files()}

    def files(self) -> list[str]:
        """What the memory is made of, without leftovers."""
        own = [*sorted((self.path / "examples").glob("*.safetensors")), *derived_files(self.path)]
        named = [record.file for record in read_manifest(self.path).files]
        return [MANIFEST, *named, *(str(path.relative_to(self.path)) for path in own)]

    def repair(self, name: str) -> None:
        found, done = repair(self.path)
        assert done
        assert found.damaged == (name,)
        assert found.usable <= self.committed
        assert (found.usable < self.committed) is name.startswith("segments/")
        assert repair(self.path)[1] == ()
        self.forget_after(found.usable)
        if name.startswith("examples/"):
            del self.columns[Path(name).stem]

    @invariant()
    def the_memory_is_what_happened(self) -> None:
        if not self.checkpoints:
            return
        assert verify(self.path).ok
        memory = dualform.open(self.path)
        assert memory.steps == self.committed
        steps = self.steps[: self.committed]
        for weight in range(2):
            blocks = list(memory.blocks(weight, self.committed, rows=7))
            assert memory.manifest.events(weight) == sum(len(block) for block in blocks)
            for name, truth in (
                ("keys", [step.keys[weight] for step in steps]),
                ("gradients", [step.gradients[weight] for step in steps]),
                ("examples", [step.examples for step in steps]),
                ("steps", [torch.full_like(step.examples, at) for at, step in enumerate(steps, start=1)]),
            ):
                parts = [getattr(block, name) for block in blocks]
                assert len(parts) == 0 if not steps else torch.cat(parts).equal(torch.cat(truth)), name
        until = self.random.randint(0, self.committed)
        tolerance = 1e-12 if self.dtype == torch.float64 else 1e-5
        for name, tensor in memory.weights(until=until).items():
            assert (tensor - self.checkpoints[until][0][name]).abs().max() <= tolerance
        if self.committed and memory.has_weights(self.committed):
            assert memory.certificate().exact
        assert memory.columns == sorted(self.columns)
        for name, values in self.columns.items():
            column = memory.column(name)
            groups, codes = column.groups
            assert [groups[code] for code in codes.tolist()] == values


class CompiledLife(Life):
    """The same of a run that is gathered as long ones are."""

    compiled = True


@pytest.mark.parametrize("life", [Life, CompiledLife])
def test_whatever_happens_the_memory_is_what_happened(life: type[Life]) -> None:
    run_state_machine_as_test(life, settings=hypothesis.settings(max_examples=15, stateful_step_count=25))


@pytest.mark.long
@pytest.mark.parametrize("life", [Life, CompiledLife])
def test_whatever_happens_for_long_the_memory_is_what_happened(life: type[Life]) -> None:
    run_state_machine_as_test(life, settings=hypothesis.settings(max_examples=500, stateful_step_count=50))
