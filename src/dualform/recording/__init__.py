"""Recording: hooks, probe and watch around any training loop."""

from dualform.recording.recorder import Recorder, record

__all__ = ["Recorder", "record"]
