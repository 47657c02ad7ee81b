"""A block: a run of events of one weight, wherever it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Keys, gradients and numbers of some events of one weight, in ascending order of event number.

    `gradients` is None where the keep level has none. `backwards` numbers the backward passes of the whole
    run; an event's coefficient depends on it alone. `uses` says through which use of the weight the row went.
    """

    keys: Float[Tensor, "events dim_in"]
    gradients: Float[Tensor, "events dim_out"] | None
    events: Int[Tensor, " events"]
    steps: Int[Tensor, " events"]
    backwards: Int[Tensor, " events"]
    examples: Int[Tensor, " events"]
    positions: Int[Tensor, " events"]
    uses: Int[Tensor, " events"]

    def __len__(self) -> int:
        return len(self.events)

    def select(self, chosen: Bool[Tensor, " events"]) -> Block:
        """The events of this block where `chosen` is true."""
        if bool(chosen.all()):
            return self
        return Block(
            keys=self.keys[chosen],
            gradients=None if self.gradients is None else self.gradients[chosen],
            events=self.events[chosen],
            steps=self.steps[chosen],
            backwards=self.backwards[chosen],
            examples=self.examples[chosen],
            positions=self.positions[chosen],
            uses=self.uses[chosen],
        )
