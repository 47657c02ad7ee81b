"""The memory on disk: immutable segments and one manifest. README.md beside this file has the byte layout."""

from dualform.memory.columns import Column
from dualform.memory.journal import Call, Journal, StepRows
from dualform.memory.manifest import Finding, Manifest
from dualform.memory.stored import StoredMemory
from dualform.memory.verify import Verification, repair, verify
from dualform.memory.writer import Writer

__all__ = [
    "Call",
    "Column",
    "Finding",
    "Journal",
    "Manifest",
    "StepRows",
    "StoredMemory",
    "Verification",
    "Writer",
    "repair",
    "verify",
]
