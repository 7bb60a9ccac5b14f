"""CLIP over all ranks with DistributedDataParallel; random data in place of a data set.

    torchrun --nproc-per-node 2 examples/ddp.py --steps 20

Every rank brings its own pairs; the loss is that of all of them. On GPUs over NCCL, else over gloo.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import tilewise


class Towers(nn.Module):
    """Two small encoders and their learnable scale."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, width))
        self.text = nn.Sequential(nn.Linear(24, width), nn.GELU(), nn.Linear(width, width))
        # Of one dimension, since FSDP2 does not shard numbers.
        self.log_scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Unit features (N, width) of both sides, and the scale."""
        image = functional.normalize(self.image(image), dim=-1)
        return image, functional.normalize(self.text(text), dim=-1), self.log_scale.exp()


def batch(size: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pairs that have something in common."""
    made = torch.randn(size, 32, generator=torch.Generator().manual_seed(seed))
    return made.to(device), made[:, :24].tanh().to(device)


def start() -> torch.device:
    """Join the group that torchrun describes; the device of this rank."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if not cuda:
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", torch.cuda.current_device())


def train(model: nn.Module, device: torch.device, steps: int, size: int) -> None:
    """A few steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        pairs = batch(size, 1000 * step + dist.get_rank(), device)
        loss = tilewise.clip_loss(*model(*pairs), group=dist.group.WORLD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # The average over ranks is the loss of the whole batch.
        dist.all_reduce(loss := loss.detach())
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step}: loss {float(loss) / dist.get_world_size():.4f}")


def main() -> None:
    """Train with DDP."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=256, help="pairs of each rank")
    options = parser.parse_args()
    device = start()
    torch.manual_seed(0)
    train(DistributedDataParallel(Towers().to(device)), device, options.steps, options.batch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
