"""What a planner refuses, and why. The package's common errors are here too, for those who import only the planner."""

from ..errors import BadInput, NothingMeasured, SyncfreeError, Unreachable

__all__ = [
    "BadInput",
    "InexactBatch",
    "NothingMeasured",
    "SkippedField",
    "SyncfreeError",
    "UnorderedBatch",
    "Unreachable",
]


class UnorderedBatch(BadInput):
    """A batch whose row order the attention backend would mis-serve; the text names the row."""


class InexactBatch(BadInput):
    """A batch with rows known only by bounds, where a field needs exact lengths on the host: fall back to upstream."""


class SkippedField(SyncfreeError, KeyError):
    """A plan was asked for a field that it left out; the text is the reason for leaving it out."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""
