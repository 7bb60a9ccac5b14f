"""Small steps of CLIP and of SigLIP, in bf16 and in fp32, for compute-sanitizer.

compute-sanitizer --tool memcheck python benchmarks/sanitize.py
compute-sanitizer --tool racecheck python benchmarks/sanitize.py
"""

import torch
from torch.nn import functional

from tilewise import clip_loss, siglip_loss


def main() -> None:
    """Forward and backward of either dtype."""
    for dtype in (torch.bfloat16, torch.float32):
        run(dtype)
    torch.cuda.synchronize()


def run(dtype: torch.dtype) -> None:
    """300 rows of 96 features, with a learnable scale."""
    image, text = (
        functional.normalize(torch.randn(300, 96, device="cuda"), dim=1).to(dtype).requires_grad_()
        for _ in range(2)
    )
    scale = torch.tensor(14.3, device="cuda", requires_grad=True)
    for keep_mib in (0, 64):
        clip_loss(image, text, scale, backend="fused", keep_mib=keep_mib).backward()
    for bias in (-5.0, -20.0):  # near 0 and far below
        siglip_loss(image, text, scale, bias, backend="fused").backward()


if __name__ == "__main__":
    main()
