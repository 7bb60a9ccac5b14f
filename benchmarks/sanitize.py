"""Small steps of CLIP and of SigLIP, for compute-sanitizer.

compute-sanitizer --tool memcheck python benchmarks/sanitize.py
compute-sanitizer --tool racecheck python benchmarks/sanitize.py
"""

import torch
from torch.nn import functional

from tilewise import clip_loss, siglip_loss


def main() -> None:
    """Forward and backward, 300 rows of 96 features in bf16, with a learnable scale."""
    image, text = (
        functional.normalize(torch.randn(300, 96, device="cuda"), dim=1).bfloat16().requires_grad_()
        for _ in range(2)
    )
    scale = torch.tensor(14.3, device="cuda", requires_grad=True)
    for keep_mib in (0, 64):
        clip_loss(image, text, scale, backend="fused", keep_mib=keep_mib).backward()
    for bias in (-5.0, -20.0):  # near 0 and far below
        siglip_loss(image, text, scale, bias, backend="fused").backward()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
