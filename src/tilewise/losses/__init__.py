"""The losses: arithmetic on what a sweep returns, one short file each."""

from tilewise.losses.clip import clip_loss
from tilewise.losses.info_nce import info_nce
from tilewise.losses.modules import ClipLoss, InfoNCELoss, NTXentLoss, SigLipLoss, SupConLoss
from tilewise.losses.nt_xent import nt_xent
from tilewise.losses.siglip import siglip_loss
from tilewise.losses.sup_con import sup_con

__all__ = [
    "ClipLoss",
    "InfoNCELoss",
    "NTXentLoss",
    "SigLipLoss",
    "SupConLoss",
    "clip_loss",
    "info_nce",
    "nt_xent",
    "siglip_loss",
    "sup_con",
]
