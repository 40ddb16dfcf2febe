"""Errors of the whole package; `exit_code` is what the command line ends with. Imports nothing: a start is fast."""


class SyncfreeError(Exception):
    """Base of all errors a user can cause or meet. The text is one line: what, where, what was expected."""

    exit_code = 2


class BadInput(SyncfreeError, ValueError):
    """Input that cannot be right; the text names the offending element (`seq_lens[3]: expected ..., got ...`)."""

    exit_code = 2


class Unreachable(SyncfreeError):
    """The target is not there, refused, or died."""

    exit_code = 3


class NothingMeasured(SyncfreeError):
    """No step was recorded, or the figure that was asked for is unknown."""

    exit_code = 4
