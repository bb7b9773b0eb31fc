"""Errors that are not a wrong call: a wrong call is a ValueError that names the argument."""


class CloError(RuntimeError):
    """Base of every error of this package."""


class CheckpointError(CloError):
    """A checkpoint, or a file that becomes one, cannot be read or does not fit."""


class TransferError(CloError):
    """The transfer engine failed: a transfer, a wait, a backend."""


class MemoryPlanError(CloError):
    """A run needs more memory than there is; nothing was allocated."""
