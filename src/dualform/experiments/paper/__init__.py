"""The paper's image experiments (Sections 5.2 to 5.4, Appendices A and B), by one command."""

from dualform.experiments.paper.job import Job, reproduce

__all__ = ["Job", "reproduce"]
