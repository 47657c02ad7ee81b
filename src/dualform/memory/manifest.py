"""The manifest: one JSON text that says what a memory holds. Nothing in it is ever executed."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dualform.errors import BadMemory, DamagedMemory, EmptyMemory, NewerFormat
from dualform.memory.disk import disk
from dualform.memory.files import FileRecord, seal
from dualform.memory.mapped import unseal

FORMAT = 2
MANIFEST = "manifest-r000.json"
_FILES = re.compile(r"(initial|final)\.safetensors|segments/r\d{3}-\d{6}\.safetensors")


@dataclass(frozen=True)
class ParameterRecord:
    """A weight or bias whose steps are journalled; `names` are all its names in the state dict."""

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    optimizer: int


@dataclass(frozen=True)
class UseRecord:
    """One linear map through which rows reach a weight: `map` is how a user addresses it."""

    map: str
    module: str
    kind: str
    bias: str | None
    transposed: bool = False


@dataclass(frozen=True)
class WeightRecord:
    """A weight with a memory of its own; tied modules are several uses of one weight."""

    name: str
    dim_in: int
    dim_out: int
    uses: tuple[UseRecord, ...]


@dataclass(frozen=True)
class OptimizerRecord:
    """A recorded optimiser; `linear` says whether it belongs to the SGD family."""

    name: str
    linear: bool


@dataclass(frozen=True)
class SegmentRecord:
    """Whole steps of all weights: the valid ones, and for each weight its numbers of events and of stored keys.

    The file may hold more: a resumed run drops the steps after the one at which it went on, and `sketched` is then
    not the last step. Repeated keys are stored once, so there may be fewer keys than events.
    """

    file: FileRecord
    first_step: int
    last_step: int
    first_events: tuple[int, ...]
    events: tuple[int, ...]
    first_keys: tuple[int, ...]
    keys: tuple[int, ...]
    sketched: int
    nonfinite: int = 0

    @cached_property
    def text(self) -> str:
        """The record as it stands in the manifest: every commit writes all of them again."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @property
    def next_events(self) -> tuple[int, ...]:
        """For each weight the number of the first event after this segment."""
        return tuple(first + count for first, count in zip(self.first_events, self.events, strict=True))

    @property
    def next_keys(self) -> tuple[int, ...]:
        """For each weight the number of the first key stored after this segment."""
        return tuple(first + count for first, count in zip(self.first_keys, self.keys, strict=True))


@dataclass(frozen=True)
class Finding:
    """A broken premise: what was found about a parameter, between which steps, how often, how large."""

    parameter: str
    kind: str
    since: int
    step: int
    reason: str
    count: int = 1


@dataclass(frozen=True)
class Manifest:
    """Everything about a memory but its numbers; replaced as a whole at every commit."""

    id: str
    dualform: str
    created: str
    keep: str
    recipe: str | None
    optimizers: tuple[OptimizerRecord, ...]
    parameters: tuple[ParameterRecord, ...]
    weights: tuple[WeightRecord, ...]
    initial: FileRecord
    every_step: tuple[str, ...] = ()
    at_commits: tuple[str, ...] = ()
    steps: int = 0
    examples: int = 0
    positions: int = 0
    segments: tuple[SegmentRecord, ...] = ()
    findings: tuple[Finding, ...] = ()
    told: tuple[str, ...] = ()
    final: FileRecord | None = None
    failure: str | None = None
    format: int = field(default=FORMAT)

    def parameter(self, name: str) -> int:
        """The number of a parameter by its name."""
        return next(i for i, p in enumerate(self.parameters) if p.name == name)

    @property
    def nonfinite(self) -> int:
        """How many events have a NaN or an infinity in their key or gradient."""
        return sum(segment.nonfinite for segment in self.segments)

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """Every file that the manifest names."""
        final = (self.final,) if self.final else ()
        return (self.initial, *(segment.file for segment in self.segments), *final)

    def shortened(self, segments: Sequence[SegmentRecord]) -> Manifest:
        """The manifest of the first segments only."""
        steps = segments[-1].last_step if segments else 0
        return dataclasses.replace(
            self,
            steps=steps,
            segments=tuple(segments),
            findings=tuple(finding for finding in self.findings if finding.since < steps),
            told=self.told if steps == self.steps else (),
            final=self.final if steps == self.steps else None,
        )

    def events(self, weight: int) -> int:
        """How many events of a weight are committed."""
        return self._events[weight]

    @cached_property
    def _events(self) -> tuple[int, ...]:
        return tuple(sum(segment.events[weight] for segment in self.segments) for weight in range(len(self.weights)))


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Commit a manifest: this one rename makes everything it names part of the memory."""
    body = {"checksum": "0" * 16, **dataclasses.asdict(dataclasses.replace(manifest, segments=()))}
    del body["segments"]
    head = json.dumps(body, separators=(",", ":")).removesuffix("}")
    text = f'{head},"segments":[{",".join(segment.text for segment in manifest.segments)}]}}'
    disk.commit(root / MANIFEST, [memoryview(seal(text.encode()))])


def read_manifest(root: Path) -> Manifest:
    """The last committed manifest of a memory, checked."""
    path = root / MANIFEST
    try:
        text = path.read_bytes()
    except IsADirectoryError:
        raise DamagedMemory(f"{path} is a directory, not a manifest. Restore it from a copy.") from None
    except (FileNotFoundError, NotADirectoryError):
        if not root.exists():
            raise BadMemory(f"there is no directory {root}. Pass the path that was given to record().") from None
        if not root.is_dir():
            raise BadMemory(f"{root} is a file; a memory is a directory, the one that was given to record().") from None
        raise EmptyMemory(
            f"{root} holds no memory: nothing was ever committed there (no {MANIFEST}). "
            "Pass the directory that was given to record(), or record again."
        ) from None
    try:
        version = json.loads(text).get("format")
    except (ValueError, AttributeError, RecursionError):
        raise DamagedMemory(f"{path} is damaged: it is not a JSON object. Restore it from a copy.") from None
    if isinstance(version, int) and version > FORMAT:
        raise NewerFormat(
            f"{root} has format {version}; this dualform reads formats up to {FORMAT}. Upgrade dualform to read it."
        )
    unseal(text, path)
    body = {name: value for name, value in json.loads(text).items() if name != "checksum"}
    manifest: Manifest = _decode(Manifest, _from_format_1(body) if version == 1 else body, str(path))
    for record in manifest.files:
        if not _FILES.fullmatch(record.file):
            raise DamagedMemory(f"{path} names a file {record.file!r} that no memory has: not opened.")
    wrong = _contradiction(manifest)
    if wrong:
        raise DamagedMemory(f"{path} contradicts itself: {wrong}. Restore it from a copy.")
    return manifest


def _from_format_1(body: dict[str, Any]) -> dict[str, Any]:
    """A manifest from before repeated keys were stored once: every event has a key of its own."""
    try:
        segments = [
            {**s, "first_keys": s["first_events"], "keys": s["events"], "sketched": s["last_step"]}
            for s in body["segments"]
        ]
        if segments:
            segments[0]["nonfinite"] = body["nonfinite"]
        rest = {name: value for name, value in body.items() if name != "nonfinite"}
    except (TypeError, KeyError):
        return body  # which is then found to be damaged
    return {**rest, "segments": segments}


def _contradiction(manifest: Manifest) -> str | None:
    """What in a manifest cannot be, though every part of it has the right type; None where all is well."""
    parameters = {record.name for record in manifest.parameters}
    weights = len(manifest.weights)
    if not weights or len(parameters) != len(manifest.parameters):
        return "it has no weights, or two parameters of one name"
    for parameter in manifest.parameters:
        if parameter.dtype not in ("float64", "float32", "bfloat16", "float16"):
            return f"{parameter.name} has the dtype {parameter.dtype!r}"
        if not -1 <= parameter.optimizer < len(manifest.optimizers):
            return f"{parameter.name} belongs to an optimiser that is not there"
    for weight in manifest.weights:
        if not weight.uses or any(name not in parameters for name in (weight.name, *_biases(weight))):
            return f"the weight {weight.name!r} has no use or no parameter"
    step, events, keys = 0, [0] * weights, [0] * weights
    for segment in manifest.segments:
        before = (segment.first_step, list(segment.first_events), list(segment.first_keys))
        if before != (step + 1, events, keys) or not step < segment.last_step <= segment.sketched:
            return f"{segment.file.file} does not follow the segment before it"
        if not len(segment.events) == len(segment.keys) == weights:
            return f"{segment.file.file} has the wrong number of weights"
        if any(not 0 <= k <= n for k, n in zip(segment.keys, segment.events, strict=True)):
            return f"{segment.file.file} has more keys than events"
        step, events, keys = segment.last_step, list(segment.next_events), list(segment.next_keys)
    return None if manifest.steps == step else f"it counts {manifest.steps} steps, its segments {step}"


def _biases(weight: WeightRecord) -> list[str]:
    return [use.bias for use in weight.uses if use.bias is not None]


def _decode(kind: Any, value: Any, where: str) -> Any:
    """JSON into frozen records, by their annotations; anything unexpected is damage."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        missing = [f.name for f in dataclasses.fields(kind) if f.name not in value and _required(f)]
        unknown = [name for name in value if name not in hints]
        if not missing and not unknown:
            decoded = {name: _decode(hints[name], item, f"{where}: {name}") for name, item in value.items()}
            return kind(**decoded)
        raise DamagedMemory(f"{where} is damaged: missing {missing}, unknown {unknown}.")
    if origin is tuple and isinstance(value, list):
        return tuple(_decode(arguments[0], item, where) for item in value)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _decode(next(a for a in arguments if a is not type(None)), value, where)
    if isinstance(kind, type) and origin is None and type(value) is kind:
        return value
    raise DamagedMemory(f"{where} is damaged: expected {kind}, found {type(value).__name__}.")


def _required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
