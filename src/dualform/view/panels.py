"""What is shown of a spotlight: for one test image, the best matches and class totals of every layer."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, UInt8
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Match:
    """A training example that a layer attends to: its picture, label, score, and the step of the event.

    With `events` the score is a sum over that many events of the example, and no step is shown.
    """

    image: UInt8[Tensor, "height width"]
    label: str
    score: float
    step: int
    example: int
    measure: str = "score"
    events: int | None = None

    @property
    def caption(self) -> str:
        """Three short lines: label, score, and when."""
        when = f"step {self.step:,}" if self.events is None else f"sum of {self.events:,} events"
        return f"label {self.label}\n{self.measure} {self.score:,.4g}\n{when}"


@dataclass(frozen=True, eq=False)
class Panel:
    """One layer: its best matches, and what each class draws: the share of all attention (sums to 1), or a sum."""

    layer: str
    matches: tuple[Match, ...]
    shares: Float[Tensor, " classes"]


@dataclass(frozen=True, eq=False)
class Exhibit:
    """One test image, what it is (None: unknown), what the model takes it for, and a panel for every layer.

    `signed` says that the panels hold sums of either sign, not shares.
    """

    image: UInt8[Tensor, "height width"]
    title: str
    label: str | None
    answer: str
    probability: float
    class_names: tuple[str, ...]
    panels: tuple[Panel, ...]
    matches_title: str = "best matches in training"
    shares_title: str = "share of all attention, by class"
    signed: bool = False

    @property
    def certainty(self) -> str:
        """The model's probability of its answer, never rounded up to 1."""
        return certainty(self.probability)

    @property
    def verdict(self) -> str:
        """Say in one sentence what the model answers and whether that is right."""
        return verdict(self.answer, self.probability, self.label)


def certainty(probability: float) -> str:
    """A probability in words for people, never rounded up to 1.

    >>> certainty(0.9999)
    'over 0.99'
    """
    return f"{probability:.2f}" if probability < 0.995 else "over 0.99"


def verdict(answer: str, probability: float, label: str | None) -> str:
    """Say what the model answers and, where the label is known, whether that is right.

    >>> verdict("6", 0.5, "5")
    'The model answers 6 with probability 0.50, which is wrong: it is 5.'
    """
    right = "" if label is None else ", which is right" if answer == label else f", which is wrong: it is {label}"
    return f"The model answers {answer} with probability {certainty(probability)}{right}."
