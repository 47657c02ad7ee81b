"""One small exhibit for all tests of the views."""

import pytest
import torch

from dualform.view.panels import Exhibit, Match, Panel


@pytest.fixture
def exhibit() -> Exhibit:
    image = torch.tensor([[0, 255], [255, 0]], dtype=torch.uint8)
    matches = tuple(Match(image, "dog", score, 7, 3) for score in (1234.5, 2.25, -1e-5))
    panels = tuple(Panel(layer, matches, torch.tensor([0.25, 0.75])) for layer in ("fc0", "fc1"))
    return Exhibit(image, "test image 3", "cat", "dog", 0.625, ("cat", "dog"), panels)
