"""Every exception dualform raises.

DualformError
├── BadCall (also a ValueError)      an argument is not what the call takes
│   ├── BadIds                       example ids that fit no layer or no table
│   └── BadQuery                     queries of the wrong width, an unknown layer or column
├── BadMemory                        a directory that cannot be used as a memory
│   ├── EmptyMemory                  nothing was ever committed, or no step was recorded
│   ├── MemoryExists                 recording into a directory that holds something already
│   ├── MemoryInUse                  another recorder is writing there
│   ├── DamagedMemory                a file is truncated, edited or missing
│   └── NewerFormat                  written by a later version of dualform
├── ModelMismatch                    the model is not the one the memory was recorded from
├── NotKept                          the keep level does not hold what the question needs
├── NotExact                         the optimiser has no exact values per event
├── NotAnsweredYet                   an answer was read inside the together() block that asks for it
├── RecordingFailed                  the recorder stopped (raised only with on_error="raise")
├── DataMissing                      a data set was found nowhere, or not as published
└── MissingExtra (also an ImportError)   an optional dependency is not installed
"""


class DualformError(Exception):
    """Base class of every error that dualform raises on purpose."""


class BadCall(DualformError, ValueError):
    """An argument is not what the call takes."""


class BadIds(BadCall):
    """Example ids fit no recorded layer, or lie outside the examples table."""


class BadQuery(BadCall):
    """A question names an unknown layer or column, or its queries have the wrong width."""


class BadMemory(DualformError):
    """A directory cannot be used as a memory."""


class EmptyMemory(BadMemory):
    """Nothing was ever committed there, or no step has been recorded yet."""


class MemoryExists(BadMemory):
    """Recording was asked into a directory that already holds something."""


class MemoryInUse(BadMemory):
    """Another recorder is writing into the directory."""


class DamagedMemory(BadMemory):
    """A file of the memory is truncated, edited or missing."""


class NewerFormat(BadMemory):
    """The memory was written by a later version of dualform."""


class ModelMismatch(DualformError):
    """The model is not the one the memory was recorded from."""


class NotKept(DualformError):
    """The memory's keep level does not hold what the question needs."""


class NotExact(DualformError):
    """The optimiser has no exact value per event, so the question has no exact answer."""


class NotAnsweredYet(DualformError):
    """An answer was read before the together() block that asks for it was left."""


class RecordingFailed(DualformError):
    """The recorder met a failure and stopped; the memory is valid up to its last commit."""


class DataMissing(DualformError):
    """A data set was found nowhere, or what was found is not as published."""


class MissingExtra(DualformError, ImportError):
    """An optional dependency is not installed; the message has the install command."""
