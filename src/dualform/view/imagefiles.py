"""Image files as the recipes' data sets have them: grey, of one size, light ink on a dark ground."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from dualform.errors import BadCall, MissingExtra

MOST_PIXELS = 50_000_000  # a small file may claim to be a huge image

Fitted = tuple[UInt8[Tensor, "height width"], tuple[str, ...]]


def read_image(path: Path, height: int, width: int, invert: bool = False) -> Fitted:
    """The image in a file at this size, and what is worth saying about it.

    Proportions are kept: what the image does not cover has the brightness of its border.
    """
    _require_pillow()
    if not path.is_file():
        raise BadCall(f"--image {path}: {'this is no file' if path.exists() else 'there is no such file'}.")
    return decode_image(path, f"--image {path}", height, width, invert)


def decode_image(source: Path | io.BytesIO, name: str, height: int, width: int, invert: bool = False) -> Fitted:
    """The same for a file or its content; `name` is what it is called in messages."""
    _require_pillow()
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings(action="ignore"), Image.open(source) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise ValueError(f"it has {opened.width:,} × {opened.height:,} pixels, more than {MOST_PIXELS:,}")
            image = _grey(ImageOps.exif_transpose(opened))
    except UnidentifiedImageError:
        raise BadCall(f"{name} cannot be read as an image: it is of no known kind.") from None
    except Exception as error:
        # A damaged file makes Pillow's readers raise whatever they stumble over.
        raise BadCall(f"{name} cannot be read as an image ({type(error).__name__}: {error}).") from error
    notes = []
    if image.width * height != image.height * width:
        notes.append(f"the image has {image.width} × {image.height} pixels: it was fitted into {width} × {height}.")
    image = ImageOps.invert(image) if invert else image
    # Lanczos averages over all pixels that become one: a thin line stays visible.
    scale = min(width / image.width, height / image.height)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    fitted = image.resize(size, Image.Resampling.LANCZOS)
    ground = round(_border(np.asarray(fitted)))
    whole = Image.new("L", (width, height), ground)
    whole.paste(fitted, ((width - fitted.width) // 2, (height - fitted.height) // 2))
    pixels = np.array(whole)
    if _border(pixels) > 127:
        notes.append(
            "after --invert the border is bright: it was light on dark already, so ask without --invert."
            if invert
            else "the border is bright, as of dark ink on light paper, and the training images are light on dark: "
            "ask again with --invert."
        )
    return torch.from_numpy(pixels), tuple(notes)


def _require_pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra("Images need Pillow, which is not installed: pip install 'dualform[plot]'") from error


def _grey(image: Any) -> Any:
    """Any mode as 8-bit grey; what is transparent gets a ground on which the rest can be seen."""
    from PIL import Image

    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image, dtype=np.float64)
        tops = [65535] if image.mode.startswith("I;16") else [255, 65535] if image.mode == "I" else [1, 255]
        top = next((top for top in tops if values.min() >= 0 and values.max() <= top), None)
        if top is None:
            raise ValueError(f"its values go from {values.min():g} to {values.max():g}, not from 0 to {tops[-1]}")
        return Image.fromarray(np.rint(values * (255 / top)).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("L")
    grey, alpha = (np.asarray(channel, dtype=np.float64) for channel in image.convert("RGBA").convert("LA").split())
    ink = float((grey * alpha).sum() / max(alpha.sum(), 1.0))
    ground = 255.0 if ink <= 127 else 0.0
    return Image.fromarray(np.rint((grey * alpha + ground * (255 - alpha)) / 255).astype(np.uint8))


def _border(pixels: np.ndarray) -> float:
    """The mean brightness of the outermost pixels."""
    inside = np.zeros(pixels.shape, dtype=bool)
    inside[1:-1, 1:-1] = True
    return float(pixels[~inside].mean())
