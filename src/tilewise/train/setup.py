"""How a run begins: which ranks there are, on which devices, and the model spread over them."""

import datetime
import inspect
import os
import subprocess
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewise.errors import DeviceError, OptionError, RingError
from tilewise.ranks import Ranks

LARGE = 1_000_000  # parameters from which a layer is sharded by itself


def start(device: str, timeout_s: float) -> Ranks:
    """Join the others that torchrun or SLURM started, or be alone."""
    told = _told()
    place = _device(device, told["local_rank"])
    if told["world"] > 1:
        _join(told, place, timeout_s)
    return Ranks(told["rank"], told["world"], place)


def _join(told: dict[str, int], device: torch.device, timeout_s: float) -> None:
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=address if "TORCHELASTIC_RUN_ID" not in os.environ else "env://",
            rank=told["rank"],
            world_size=told["world"],
            timeout=datetime.timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        raise RingError(
            f"rank {told['rank']} of {told['world']} could not join the others at {address}: "
            f"{error}; look at what the first rank printed, and whether the port is free"
        ) from error


def _told() -> dict[str, int]:
    """Rank, world and local rank, by torchrun or by SLURM."""
    env = os.environ
    if "RANK" in env:
        return {
            "rank": int(env["RANK"]),
            "world": int(env.get("WORLD_SIZE", "1")),
            "local_rank": int(env.get("LOCAL_RANK", "0")),
        }
    # Without a step it is the batch script itself, which is alone.
    if int(env.get("SLURM_NTASKS", "1")) > 1 and env.get("SLURM_STEP_ID", "batch").isdigit():
        env.setdefault("MASTER_ADDR", _first_host(env.get("SLURM_NODELIST", "localhost")))
        env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000))
        return {
            "rank": int(env["SLURM_PROCID"]),
            "world": int(env["SLURM_NTASKS"]),
            "local_rank": int(env["SLURM_LOCALID"]),
        }
    return {"rank": 0, "world": 1, "local_rank": 0}


def _first_host(nodes: str) -> str:
    """Of SLURM's list, which may be folded: gpu[03-05,9]."""
    if "[" not in nodes:
        return nodes.split(",", maxsplit=1)[0]
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError) as error:
        raise OptionError(
            f"the first host of {nodes!r} could not be found ({error}); set MASTER_ADDR"
        ) from error


def _device(name: str, local_rank: int) -> torch.device:
    cuda = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if cuda else "cpu"
    if name not in ("cpu", "cuda"):
        raise OptionError(f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cpu":
        return torch.device("cpu")
    if not cuda:
        raise DeviceError(
            "device = 'cuda' needs a GPU that PyTorch can use, and there is none; "
            "set --device cpu, or auto"
        )
    if torch.cuda.device_count() == 1:
        local_rank = 0  # each task sees its own
    if local_rank >= torch.cuda.device_count():
        raise DeviceError(
            f"local rank {local_rank} has no GPU of its own, this machine has "
            f"{torch.cuda.device_count()}; start fewer processes a node"
        )
    torch.cuda.set_device(local_rank)
    torch.backends.cudnn.deterministic = True  # two runs of one seed, the same bits
    return torch.device("cuda", local_rank)


def spread(model: nn.Module, ranks: Ranks, how: str) -> nn.Module:
    """What to call in place of the model, so that gradients are averaged over ranks."""
    if ranks.world == 1:
        return model
    if how == "ddp":
        ddp = nn.parallel.DistributedDataParallel
        ids = [ranks.device.index] if ranks.device.type == "cuda" else None
        # Of convolutions, whose gradient is as it should be, whatever its strides.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        # Not before every forward: ranks may have different numbers of micro-batches.
        newer = "forward_sync_buffers" in inspect.signature(ddp).parameters
        never: dict[str, Any] = {"forward_sync_buffers" if newer else "broadcast_buffers": False}
        return ddp(model, device_ids=ids, **never)
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method  # noqa: PLC0415

    mesh = dist.device_mesh.init_device_mesh(ranks.device.type, (ranks.world,))
    _widen_scalars(model)
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name in ("images", "texts", "patches", "precompute"):  # other ways in than forward
        register_fsdp_forward_method(model, name)
    return model


def _widen_scalars(model: nn.Module) -> None:
    """FSDP2 shards along the first dimension, and a learnable scale has none."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim == 0:
                setattr(
                    module,
                    name,
                    nn.Parameter(parameter.detach().reshape(1), parameter.requires_grad),
                )


def _layers(model: nn.Module) -> list[nn.Module]:
    """The large layers of stacks: transformer blocks, stages."""
    stacks = (each for each in model.modules() if isinstance(each, (nn.ModuleList, nn.Sequential)))
    layers = dict.fromkeys(layer for stack in stacks for layer in stack)
    found = [each for each in layers if sum(p.numel() for p in each.parameters()) >= LARGE]
    inner = {id(part) for each in found for part in each.modules() if part is not each}
    return [each for each in found if id(each) not in inner]


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one; others unchanged."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()
