"""Derived parts: what can be deleted and is made anew from the rest of a memory."""

from __future__ import annotations

from pathlib import Path

KEYFRAMES = "derived/keyframes"
KEYFRAME = KEYFRAMES + "/{:08d}.safetensors"
SUMS = "derived/sums"
SHADOWS = "derived/shadow"
FOLD = "derived/folds/{}/{:08d}.safetensors"


def derived_files(root: Path) -> list[Path]:
    """Every file of every derived part; each carries its own checksum."""
    return sorted(path for path in (root / "derived").rglob("*.safetensors") if path.is_file())
