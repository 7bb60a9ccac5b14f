"""The same with FSDP2: parameters sharded over all ranks.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import torch
import torch.distributed as dist
from ddp import Towers, start, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Train with FSDP2."""
    device = start()
    torch.manual_seed(0)
    model = Towers().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in (model.image, model.text, model):
        fully_shard(part, mesh=mesh)
    train(model, device, steps=20, size=256)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
