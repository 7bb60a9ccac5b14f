"""Random groups, sizes, schedules, frozen sides and losses over gloo, each against one process.

    python benchmarks/stress_ring.py [--cases 500] [--ranks 5] [--seed 0]

Prints a line every 50 cases and fails at the first difference, or where a rank waits for a minute.
"""

import argparse
import datetime
import os
import random
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn import functional

import tilewise as tw
from tilewise import ring

SECONDS = 60  # after which a rank that waits gives up
LOSSES = ("clip", "clip-ids", "clip-labels", "info_nce", "siglip", "nt_xent", "sup_con")


def loss_of(name: str, sides: list[Tensor], scale: Tensor, at: Tensor, **how: Any) -> Tensor:
    """A loss of pairs whose places in the whole batch are `at`."""
    a, b = sides
    marks = {"clip-ids": {"ids": at % 4}, "clip-labels": {"labels": at % 3}}.get(name, {})
    if name.startswith("clip"):
        return tw.clip_loss(a, b, scale, **marks, **how)
    if name == "sup_con":
        return tw.sup_con(a, at % 4, scale, **how)
    call = {"info_nce": tw.info_nce, "siglip": tw.siglip_loss, "nt_xent": tw.nt_xent}[name]
    return call(a, b, scale, **how)


def draw(random_number: random.Random, ranks: int) -> dict[str, Any]:
    """One case: ranks and their sizes, what is frozen, which loss, what travels how."""
    world = random_number.randint(1, ranks)
    sizes = [random_number.choice([0, 1, 2, 3, 5, 8, 13]) for _ in range(world)]
    sizes[random_number.randrange(world)] = random_number.randint(2, 9)  # not all empty
    name = random_number.choice(LOSSES)
    frozen = random_number.choice([None, 0, 1]) if name not in ("nt_xent", "sup_con") else None
    return {
        "sizes": sizes,
        "frozen": frozen,
        "name": name,
        "seed": random_number.randrange(2**30),
        "slice": random_number.choice([1, 200, 2**26]),
        "promise": random_number.random() < 0.3,
        "schedule": random_number.choice(["auto", "ring", "two-level", "gather"]),
        "per_node": random_number.choice([x for x in range(1, world + 1) if world % x == 0]),
    }


def gradients(case: dict[str, Any], start: int, stop: int, **how: Any) -> list[Tensor]:
    """(loss, gradients of both sides, of the scale) of some rows of a case."""
    maker = torch.Generator().manual_seed(case["seed"])
    made = torch.randn(2, sum(case["sizes"]), 6, generator=maker, dtype=torch.float64)
    sides = [functional.normalize(x, dim=-1)[start:stop].clone() for x in made]
    for k, side in enumerate(sides):
        side.requires_grad_(k != case["frozen"])
    scale = torch.tensor(4.0, dtype=torch.float64, requires_grad=True)
    loss = loss_of(case["name"], sides, scale, torch.arange(start, stop), **how)
    loss.backward()
    return [loss.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad
                             for x in (*sides, scale))]  # fmt: skip


def worst_difference(case: dict[str, Any], mine: list[Tensor], group: Any) -> float:
    """Between the averages over ranks and one process, on rank 0 of the group."""
    parts: list[Any] = [None] * len(case["sizes"])
    dist.all_gather_object(parts, mine, group=group)
    world = len(parts)
    whole = [
        sum(part[0] for part in parts) / world,
        *(torch.cat([part[k] for part in parts]) / world for k in (1, 2)),
        sum(part[3] for part in parts) / world,
    ]
    truth = gradients(case, 0, sum(case["sizes"]))
    return max(float((x - y).abs().max()) for x, y in zip(whole, truth, strict=True))


def work(rank: int, options: argparse.Namespace, port: int) -> None:
    """All cases, on one rank."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks, timeout=limit)
    groups = [dist.new_group(list(range(world + 1))) for world in range(options.ranks)]
    drawn = random.Random(options.seed)
    worst = 0.0
    for number in range(options.cases):
        case = draw(drawn, options.ranks)
        sizes = case["sizes"]
        if rank < len(sizes):
            ring.SLICE_BYTES = case["slice"]
            group, start = groups[len(sizes) - 1], sum(sizes[:rank])
            how = {"sizes": sizes} if case["promise"] else {}
            os.environ["LOCAL_WORLD_SIZE"] = str(case["per_node"])
            mine = gradients(case, start, start + sizes[rank], group=group,
                             schedule=case["schedule"], **how)  # fmt: skip
            worst = max(worst, worst_difference(case, mine, group))
            if worst > 1e-12:
                sys.exit(f"rank {rank}, case {number}: off by {worst:.1e}: {case}")
        if rank == 0 and (number + 1) % 50 == 0:
            print(f"{number + 1} cases, worst difference {worst:.1e}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    options = parser.parse_args()
    mp.spawn(work, args=(options, port), nprocs=options.ranks)


if __name__ == "__main__":
    main()
