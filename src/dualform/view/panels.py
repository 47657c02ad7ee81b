"""What is shown of a spotlight: for one test image, the best matches and class totals of every layer."""

from dataclasses import dataclass

from jaxtyping import Float, UInt8
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Match:
    """A training example that a layer attends to: its picture, label, score, and the step of the event."""

    image: UInt8[Tensor, "height width"]
    label: str
    score: float
    step: int
    example: int


@dataclass(frozen=True, eq=False)
class Panel:
    """One layer: its best matches, and the share of all attention that each class draws (sums to 1)."""

    layer: str
    matches: tuple[Match, ...]
    shares: Float[Tensor, " classes"]


@dataclass(frozen=True, eq=False)
class Exhibit:
    """One test image, what it is, what the model takes it for, and a panel for every layer."""

    image: UInt8[Tensor, "height width"]
    title: str
    label: str
    answer: str
    probability: float
    class_names: tuple[str, ...]
    panels: tuple[Panel, ...]

    @property
    def certainty(self) -> str:
        """The model's probability of its answer, never rounded up to 1."""
        return f"{self.probability:.2f}" if self.probability < 0.995 else "over 0.99"

    @property
    def verdict(self) -> str:
        """Say in one sentence what the model answers and whether that is right."""
        right = "right" if self.answer == self.label else f"wrong: it is {self.label}"
        return f"The model answers {self.answer} with probability {self.certainty}, which is {right}."
