"""What of a model is recorded: its linear maps, the weights and biases behind them, and the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from dualform.errors import BadCall, ModelMismatch
from dualform.layers import LayerType, LinearMap, find_layer_type
from dualform.memory.arena import Held
from dualform.memory.files import storable
from dualform.recording.swift import Swift

PROBE_COLUMNS = 4
EVERY_STEP_BYTES = 64 << 10
HALVES = (torch.bfloat16, torch.float16)
RECORDED = (torch.float64, torch.float32, *HALVES)

Vector = Float64[np.ndarray, "_"]
Sketch = Float[np.ndarray, "_"]  # in the gradient's own precision, fp32 at least
Layers = str | Sequence[str] | Callable[[str, nn.Module], bool] | None


@dataclass(eq=False)
class Arrived:
    """Keys and gradients of one call of a module, copied during backward.

    They become events when the first step() uses them, for the weight or for its bias. `fixed` says that the keys
    depend on no trained parameter, `sketch` is what the rows put into the gradients (see Use.sketch). Where gradients
    are not kept, they are gone once their `sizes` are known.
    """

    order: int
    use: Use
    kept_keys: Tensor | Held
    kept_gradients: Tensor | Held | None
    examples: Tensor
    positions: Tensor
    fixed: bool
    sketch: Tensor | Float[np.ndarray, "five dim_out"] | None = None
    sizes: tuple[float, float] | None = None
    stored: bool = False

    @property
    def keys(self) -> Tensor:
        """The keys; out of an arena, a tensor is made of them when it is needed."""
        if isinstance(self.kept_keys, Held):
            self.kept_keys = self.kept_keys.rows
        return self.kept_keys

    @property
    def gradients(self) -> Tensor | None:
        """The gradients, where they are kept."""
        if isinstance(self.kept_gradients, Held):
            self.kept_gradients = self.kept_gradients.rows
        return self.kept_gradients

    @property
    def half(self) -> bool:
        """Whether the product that made these events was in half precision."""
        kept = self.kept_keys
        return (kept.place if isinstance(kept, Held) else kept).dtype in HALVES

    @property
    def raw(self) -> Float[np.ndarray, "five dim_out"]:
        """The sketch, on the CPU."""
        if isinstance(self.sketch, Tensor):
            self.sketch = self.sketch.cpu().numpy()
        assert self.sketch is not None
        return self.sketch

    @cached_property
    def vectors(self) -> tuple[Vector, Vector]:
        """Σ g_t (x_t · R) and Σ g_t, flat."""
        sketch = self.raw.astype(np.float64)
        return sketch[:-1].T.reshape(-1), sketch[-1]

    @cached_property
    def magnitudes(self) -> tuple[float, float]:
        """Σ ‖g_t‖² ‖x_t‖² and Σ ‖g_t‖²: how large the terms are before they cancel."""
        if self.gradients is None:
            assert self.sizes is not None
            of_weight, of_bias = (size if math.isfinite(size) else 0.0 for size in self.sizes)
            return of_weight, of_bias
        sizes = self.gradients.double().square().sum(dim=1)
        return float((sizes * self.keys.double().square().sum(dim=1)).sum()), float(sizes.sum())

    def move_out(self) -> None:
        """Leave the arena, which is about to be used for other rows."""
        self.kept_keys = self.keys.clone()
        if self.gradients is not None:
            self.kept_gradients = self.gradients.clone()

    @property
    def nonfinite(self) -> int:
        """How many of the events hold a NaN or an infinity."""
        # A NaN or an infinity anywhere in the rows reaches their sketch.
        if np.isfinite(self.vectors[0]).all():
            return 0
        bad = ~self.keys.isfinite().all(dim=1)
        if self.gradients is not None:
            bad |= ~self.gradients.to(bad.device).isfinite().all(dim=1)
        return int(bad.sum())


@dataclass
class Pass:
    """What one backward pass left in one parameter, as far as its rows explain it.

    `fresh` says that .grad was None before this pass, so what earlier passes left there was most likely thrown away.
    """

    backward: int
    rows: list[Arrived]
    of_bias: bool
    fresh: bool = False

    @cached_property
    def sketch(self) -> Vector:
        """Σ g_t (x_t · R) for a weight and Σ g_t for a bias, flat."""
        vectors = [row.vectors[self.of_bias] for row in self.rows]
        return vectors[0] if len(vectors) == 1 else np.sum(vectors, axis=0)

    @cached_property
    def magnitude(self) -> float:
        """Σ ‖g_t‖² ‖x_t‖² (Σ ‖g_t‖² for a bias): how large the terms are before they cancel."""
        return sum(row.magnitudes[self.of_bias] for row in self.rows)


@dataclass(eq=False)
class Target:
    """A weight or bias whose steps are journalled."""

    index: int
    name: str
    names: list[str]
    parameter: nn.Parameter
    projection: Tensor | None
    swift: Swift
    passes: list[Pass] = field(default_factory=list)
    half: bool = False
    shape: torch.Size = field(init=False)
    _transposed: dict[tuple[torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shape = self.parameter.shape

    def check_shape(self) -> None:
        """Raise where the parameter has another shape than it had, by an assignment to its `data`."""
        now, before = list(self.parameter.shape), list(self.shape)
        if now != before:
            raise ModelMismatch(f"{self.name} has the shape {now} now and had {before} when recording began")

    def sketch(self, matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """matrix @ R for a weight, in fp64 unless told otherwise; a bias is its own sketch."""
        if self.projection is None:
            return matrix.detach().to("cpu", dtype or torch.float64, copy=True)
        return self.project(matrix.detach().cpu(), dtype or torch.float64)

    def quick_sketch(self, matrix: Tensor) -> Sketch:
        """The sketch in the matrix's own precision, fp32 at least: good to some rounding errors of that precision."""
        matrix = matrix.detach()
        if matrix.is_sparse:
            matrix = matrix.to_dense()
        if not matrix.is_cpu or matrix.dtype not in (torch.float32, torch.float64):
            half = matrix.dtype not in (torch.float32, torch.float64)
            return self.sketch(matrix, torch.float32 if half else matrix.dtype).numpy().reshape(-1)
        return matrix.numpy(force=True).copy() if self.projection is None else self.project(matrix).numpy().reshape(-1)

    def project(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """rows @ R, in the rows' dtype unless told otherwise."""
        columns = self.columns(dtype or rows.dtype, rows.device)
        swift = self.swift.project(rows, columns)
        # Five times faster than rows @ R, whose right side is too narrow for a matrix product to pay.
        return nn.functional.linear(rows.to(columns.dtype), columns) if swift is None else swift

    def columns(self, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "four dim_in"]:
        """The probe's columns, as rows."""
        kind = (dtype, device)
        if kind not in self._transposed:
            assert self.projection is not None
            self._transposed[kind] = self.projection.T.to(device, dtype).contiguous()
        return self._transposed[kind]

    @cached_property
    def equations(self) -> int:
        """How many independent numbers the sketch of a gradient has."""
        if self.projection is None:
            return self.parameter.numel()
        return self.parameter.shape[0] * min(PROBE_COLUMNS, self.parameter.shape[1])


@dataclass(eq=False)
class Use:
    """One linear map of one module, through which rows reach a weight."""

    index: int
    map: str
    module_name: str
    module: nn.Module
    kind: LayerType
    weight: Target
    bias: Target | None
    weight_number: int
    copy_at_forward: bool = False
    _affine: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def sketch(self, keys: Tensor, gradients: Tensor) -> Float[Tensor, "five dim_out"]:
        """What these rows put into the gradients: four rows Σ (x_t · R)ᵀ g_t of the weight's, one Σ g_t of the bias's.

        One product gives both, with [x_t · R, 1] on its left side, and is twice as fast this way round.
        """
        if keys.dtype in HALVES:
            keys, gradients = keys.float(), gradients.float()
        kind = (keys.dtype, keys.device)
        if kind not in self._affine:
            assert self.weight.projection is not None
            linear = nn.functional.pad(self.weight.projection.T, (0, 0, 0, 1))
            one = nn.functional.one_hot(torch.tensor(PROBE_COLUMNS), PROBE_COLUMNS + 1)
            self._affine[kind] = linear.to(keys.device, keys.dtype).contiguous(), one.to(keys.device, keys.dtype)
        return nn.functional.linear(keys, *self._affine[kind]).T @ gradients

    @property
    def trained(self) -> list[Target]:
        """The weight and the bias, those of them that take gradients."""
        both = (self.weight,) if self.bias is None else (self.weight, self.bias)
        return [target for target in both if target.parameter.requires_grad]

    @cached_property
    def streams(self) -> tuple[str, str, str]:
        """Where its keys, its gradients and the hashes of its keys gather."""
        weight = f"w{self.weight_number}"
        return f"{weight}/keys", f"{weight}/gradients", f"{weight}/hashes"


@dataclass
class Place:
    """Where an unrecorded parameter or buffer lives; a module may put another tensor there at any time."""

    module: nn.Module
    name: str
    tensor: Tensor

    def current(self) -> Tensor:
        """The tensor that is there now; the last one of the right kind where it changed its kind."""
        found: Tensor | None = self.module._parameters.get(self.name)
        found = self.module._buffers.get(self.name) if found is None else found
        if found is not None and found.shape == self.tensor.shape and found.dtype == self.tensor.dtype:
            self.tensor = found
        return self.tensor.detach()


@dataclass
class Targets:
    """Everything the recorder follows in one model."""

    uses: list[Use]
    weights: list[Target]
    parameters: list[Target]
    every_step: dict[str, Place]
    at_commits: dict[str, Place]
    notes: list[str]
    swift: Swift

    def others(self) -> dict[str, Tensor]:
        """What is unrecorded and small enough to be stored at every step, as it is now."""
        return {name: place.current().clone() for name, place in self.every_step.items()} if self.every_step else {}


def find_targets(model: nn.Module, layers: Layers, seed: int) -> Targets:
    """The linear maps of the model that `layers` chooses (all by default), by weight."""
    chosen = _chooser(layers)
    generator = torch.Generator().manual_seed(seed)
    names = _names(model)
    by_parameter: dict[nn.Parameter, Target] = {}
    weights: list[Target] = []
    uses: list[Use] = []
    notes: list[str] = []
    uses_of: dict[Target, int] = {}
    swift = Swift()

    def target(parameter: nn.Parameter, is_weight: bool) -> Target:
        if parameter not in by_parameter:
            projection = None
            if is_weight:
                size = (parameter.shape[1], PROBE_COLUMNS)
                projection = torch.randn(size, generator=generator, dtype=torch.float64)
            first, *_ = aliases = names[parameter]
            by_parameter[parameter] = Target(len(by_parameter), first, aliases, parameter, projection, swift)
        return by_parameter[parameter]

    for name, module in model.named_modules():
        kind = find_layer_type(module)
        if kind is None or not chosen(name, module):
            continue
        maps = kind.maps(module)
        if not maps:
            notes.append(
                f"{name}: its weight or bias is parametrised (computed, or not a parameter), so it is not recorded"
            )
        weights_of = [_own(module, one.weight) for one in maps]
        lazy = any(isinstance(one, nn.parameter.UninitializedParameter) for one in weights_of)
        if lazy:
            raise BadCall(f"{name} is a lazy layer and has no weights yet: run one forward pass before record().")
        if any(one.dtype not in RECORDED or one.numel() == 0 for one in weights_of):
            notes.append(f"{name}: its weight is empty or not a real floating-point tensor, so it is not recorded")
            continue
        for linear_map in maps:
            weight = target(_own(module, linear_map.weight), True)
            if weight not in weights:
                weights.append(weight)
            bias = target(_own(module, linear_map.bias), False) if linear_map.bias else None
            at = uses_of[weight] = uses_of.get(weight, -1) + 1
            number = weights.index(weight)
            uses.append(Use(at, _map_name(name, linear_map), name, module, kind, weight, bias, number))
    if not uses:
        raise BadCall(
            "there is no layer to record: the model has no nn.Linear"
            + (f" that layers={layers!r} chooses." if layers is not None else " with a weight of its own.")
        )
    every_step, at_commits = _others(model, by_parameter, notes)
    swift.numbers = sum(weight.parameter.numel() for weight in weights)
    return Targets(uses, weights, list(by_parameter.values()), every_step, at_commits, notes, swift)


def _own(module: nn.Module, name: str) -> nn.Parameter:
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def _map_name(module: str, linear_map: LinearMap) -> str:
    return ".".join(part for part in (module, linear_map.suffix) if part)


def _chooser(layers: Layers) -> Callable[[str, nn.Module], bool]:
    if layers is None:
        return lambda name, module: True
    if callable(layers):
        return layers
    patterns = [layers] if isinstance(layers, str) else list(layers) if isinstance(layers, Sequence) else [layers]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise BadCall(f"layers takes globs of module names, or a function of name and module, not {layers!r}.")
    return lambda name, module: any(fnmatchcase(name, pattern) for pattern in patterns)


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _others(
    model: nn.Module, recorded: dict[nn.Parameter, Target], notes: list[str]
) -> tuple[dict[str, Place], dict[str, Place]]:
    """Unrecorded parameters and buffers: the smallest, up to 64 KB, at every step, the rest at commits."""
    every_step: dict[str, Place] = {}
    at_commits: dict[str, Place] = {}
    unrecorded = {n: p for n, p in model.named_parameters() if p not in recorded} | dict(model.named_buffers())
    known = {name: t for name, t in unrecorded.items() if t.layout == torch.strided and storable(t.dtype)}
    for name in unrecorded.keys() - known.keys():
        notes.append(f"{name}: a tensor of this kind cannot be stored; dual() takes it from the model it is given")
    left = EVERY_STEP_BYTES
    for name, tensor in sorted(known.items(), key=lambda item: item[1].nbytes):
        left -= tensor.nbytes
        owner, _, own = name.rpartition(".")
        place = Place(model.get_submodule(owner), own, tensor)
        (every_step if left >= 0 else at_commits)[name] = place
    return every_step, at_commits
