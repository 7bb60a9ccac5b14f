"""What tilewise raises: every message says what was got, what was wanted and what to do."""


class TilewiseError(Exception):
    """Base of every error raised on purpose; each child is also the built-in kind people catch."""


class ShapeError(TilewiseError, ValueError):
    """A tensor has the wrong number of dimensions or a size that does not fit another one."""


class DtypeError(TilewiseError, TypeError):
    """A tensor or number is of a type the sweep cannot take, or two types differ."""


class DeviceError(TilewiseError, ValueError):
    """Tensors of one call live on different devices, or a device or place cannot be had."""


class OptionError(TilewiseError, ValueError):
    """An option, or two options together, or a value in a CPU tensor, cannot be right."""


class BackendError(TilewiseError, RuntimeError):
    """A backend asked for by name cannot run here."""


class GradError(TilewiseError, RuntimeError):
    """A derivative was asked for that the sweep does not have."""


class RingError(TilewiseError, RuntimeError):
    """A rank of the group did not answer, or the ranks do not agree on what they compute."""


class StepError(TilewiseError, RuntimeError):
    """A step did not get to its end; says where, and what became of the gradients."""


class FiniteError(OptionError, ArithmeticError):
    """A loss or a gradient is not finite."""


class DataError(TilewiseError, ValueError):
    """Data to train on or to evaluate with is missing, damaged or of another kind than told.

    `kind` is a short name under which damaged samples are counted.
    """

    def __init__(self, message: str, kind: str = "other") -> None:
        super().__init__(message)
        self.kind = kind


class CheckpointError(TilewiseError, RuntimeError):
    """A checkpoint is missing, incomplete or of another model than the one at hand."""
