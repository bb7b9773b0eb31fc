"""Errors that a correct call can meet at run time. Bad arguments are `ValueError`s instead."""


class CloError(RuntimeError):
    """Base of every error that clo-jax raises at run time."""


class CheckpointError(CloError):
    """A checkpoint or its source cannot be used as it is; the message names the file or tensor."""


class TransferError(CloError):
    """The transfer engine failed or missed its deadline; the message names backend and layer."""


class MemoryPlanError(CloError):
    """A request does not fit into the memory at hand; the message holds need and limit in bytes."""
