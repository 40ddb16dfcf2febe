"""Errors shared by the whole package; `exit_code` is what the command line ends with."""


class SyncfreeError(Exception):
    """Base of all errors a user can cause or meet. The text is one line: what, where, what was expected."""

    exit_code = 2


class BadInput(SyncfreeError, ValueError):
    """Input that cannot be right; the text names the offending element (`seq_lens[3]: expected ..., got ...`)."""

    exit_code = 2


class UnorderedBatch(BadInput):
    """A batch whose row order the attention backend would mis-serve; the text names the row."""


class InexactBatch(BadInput):
    """A batch with rows known only by bounds, where a field needs exact lengths on the host: fall back to upstream."""


class SkippedField(SyncfreeError, KeyError):
    """A plan was asked for a field that it left out; the text is the reason for leaving it out."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""


class Unreachable(SyncfreeError):
    """The target is not there, refused, or died."""

    exit_code = 3


class NothingMeasured(SyncfreeError):
    """No step was recorded, or the figure that was asked for is unknown."""

    exit_code = 4
