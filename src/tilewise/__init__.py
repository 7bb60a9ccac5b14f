"""Contrastive learning at near-infinite batch size: exact losses without the B x B matrix."""

from tilewise.agreement import explain_schedule
from tilewise.backends import Choice
from tilewise.costs import Schedule
from tilewise.errors import (
    BackendError,
    CheckpointError,
    DataError,
    DeviceError,
    DtypeError,
    FiniteError,
    GradError,
    OptionError,
    RingError,
    ShapeError,
    StepError,
    TilewiseError,
)
from tilewise.gradcache import CachedStep, StepResult
from tilewise.losses import (
    ClipLoss,
    InfoNCELoss,
    NTXentLoss,
    SigLipLoss,
    SupConLoss,
    clip_loss,
    info_nce,
    nt_xent,
    siglip_loss,
    sup_con,
)
from tilewise.pairs import NO_POSITIVE
from tilewise.phases import StepMetrics
from tilewise.pool import Pool
from tilewise.reductions import Stats
from tilewise.sweep import (
    Kept,
    Reduced,
    explain_backend,
    explain_keep,
    reduce_pairs,
    weigh_pairs,
)

__version__ = "0.1.0"

__all__ = [
    "NO_POSITIVE",
    "BackendError",
    "CachedStep",
    "CheckpointError",
    "Choice",
    "ClipLoss",
    "DataError",
    "DeviceError",
    "DtypeError",
    "FiniteError",
    "GradError",
    "InfoNCELoss",
    "Kept",
    "NTXentLoss",
    "OptionError",
    "Pool",
    "Reduced",
    "RingError",
    "Schedule",
    "ShapeError",
    "SigLipLoss",
    "Stats",
    "StepError",
    "StepMetrics",
    "StepResult",
    "SupConLoss",
    "TilewiseError",
    "clip_loss",
    "explain_backend",
    "explain_keep",
    "explain_schedule",
    "info_nce",
    "nt_xent",
    "reduce_pairs",
    "siglip_loss",
    "sup_con",
    "weigh_pairs",
]
