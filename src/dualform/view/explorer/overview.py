"""The overview of a memory: what it holds, how exact it is, and how the model learned."""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch

from dualform.errors import DualformError
from dualform.view.explorer.subject import Subject

logger = logging.getLogger("dualform")
POINTS = 20  # of accuracy over training


class Overview:
    """Facts at once; certificate and accuracy are measured in the background when they are first asked for."""

    def __init__(self, subject: Subject) -> None:
        self._subject, self._memory = subject, subject.memory
        self._started = threading.Lock()
        self._stop = threading.Event()
        self._certificate: list[dict[str, Any]] | None = None
        self._accuracy: dict[str, list[Any]] = {"steps": []}
        self._problem = ""
        self._done = False

    def facts(self) -> dict[str, Any]:
        """Everything that is known by now."""
        manifest = self._memory.manifest
        weights = [
            {"name": record.name, "dim_in": record.dim_in, "dim_out": record.dim_out, "events": manifest.events(at)}
            for at, record in enumerate(manifest.weights)
        ]
        return {
            "title": self._subject.title,
            "recipe": manifest.recipe,
            "steps": self._memory.steps,
            "bytes": self._memory.bytes,
            "keep": manifest.keep,
            "optimizers": [one.name for one in manifest.optimizers],
            "columns": list(self._memory.columns),
            "examples": manifest.examples,
            "weights": weights,
            "notes": list(manifest.told),
            "closed": manifest.final is not None,
            "certificate": self._certificate,
            "sentences": self._sentences(),
            "accuracy": self._accuracy,
            "measuring": not self._done,
            "problem": self._problem,
        }

    def _sentences(self) -> list[str]:
        """The certificate in plain words."""
        if self._certificate is None:
            return []
        found = []
        for row in self._certificate:
            events = f"{row['events']:,} events"
            if row["residual"] is None:
                found.append(f"{row['weight']} has no exact values: {row['reason']}.")
            elif row["exact"]:
                found.append(f"{row['weight']} is rebuilt from {events} to {row['residual']:.0e}.")
            else:
                found.append(
                    f"{row['weight']} is rebuilt from {events} only to {row['residual']:.0e}: {row['reason']}."
                )
        return found

    def measure(self) -> None:
        """Start measuring, once."""
        if self._started.acquire(blocking=False):
            threading.Thread(target=self._measure, name="dualform-overview", daemon=True).start()

    def close(self) -> None:
        """Let measuring end at the next point."""
        self._stop.set()

    def _measure(self) -> None:
        try:
            self._measure_accuracy()
            if not self._stop.is_set():
                self._certificate = self._measured_certificate()
        except DualformError as problem:
            self._problem = str(problem)
        except Exception as problem:
            # The page must say so; the server goes on.
            logger.exception("the overview of %s could not be measured", self._memory.path)
            self._problem = f"{type(problem).__name__}: {problem}"
        self._done = True

    def _measured_certificate(self) -> list[dict[str, Any]]:
        manifest = self._memory.manifest
        events = {record.name: manifest.events(at) for at, record in enumerate(manifest.weights)}
        return [
            {
                "weight": row.weight,
                "residual": row.residual,
                "rounding": row.rounding,
                "exact": row.exact,
                "reason": row.reason or "",
                "events": events.get(row.weight, 0),
            }
            for row in self._memory.certificate()
        ]

    @torch.no_grad()
    def _measure_accuracy(self) -> None:
        images = self._subject.images
        if images is None or not self._subject.has_values:
            return
        steps = self._memory.steps
        inputs = [images.preprocess(images.test.images[images.test.tasks == at], at) for at in range(len(images.tasks))]
        labels = [images.test.labels[images.test.tasks == at] for at in range(len(images.tasks))]
        found: dict[str, list[Any]] = {"steps": []} | {task.title: [] for task in images.tasks}
        for step in dict.fromkeys(round(steps * number / POINTS) for number in range(POINTS + 1)):
            if self._stop.is_set():
                return
            model = self._memory.dual(images.model, until=step)
            for at, task in enumerate(images.tasks):
                right = model(inputs[at]).argmax(1) == labels[at]
                found[task.title].append(100 * float(right.double().mean()))
            found["steps"].append(step)
            self._accuracy = {name: list(values) for name, values in found.items()}
