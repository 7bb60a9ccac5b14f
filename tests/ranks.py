"""Runs a function on several ranks over gloo, each a process of its own, and collects results."""

import datetime
import io
import multiprocessing as mp
import os
import socket
import traceback

import torch
import torch.distributed as dist


def run(body, world, *args, timeout=60.0, lost=()):
    """[body(rank, *args) of every rank], with a default group of `world` ranks.

    Nothing comes from the `lost`.
    """
    # From a server that has imported torch once: a fresh interpreter for each rank takes seconds.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "pytest", "tilewise"])
    queue = context.Queue()
    told = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(world)}  # fmt: skip
    processes = [
        context.Process(target=_start, args=(body, rank, told, timeout, queue, lost, args))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    found = dict(queue.get(timeout=10 * timeout) for _ in range(world - len(lost)))
    for process in processes:
        if lost:
            process.kill()
        process.join()
    # One that lost its neighbour has less to tell than one that failed by itself.
    failed = [f"rank {rank}:\n{said}" for rank, (fine, said) in found.items() if not fine]
    assert not failed, min(failed, key=lambda text: "RingError" in text or "Connection" in text)
    return [torch.load(io.BytesIO(found[rank][1]), weights_only=False) for rank in sorted(found)]


def _start(body, rank, told, timeout, queue, lost, args):
    os.environ.update(told)
    dist.set_debug_level_from_env()
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, timeout=datetime.timedelta(seconds=timeout))
        packed = io.BytesIO()
        torch.save(body(rank, *args), packed)
        queue.put((rank, (True, packed.getvalue())))
        if not lost:
            dist.barrier()
    except Exception:
        queue.put((rank, (False, traceback.format_exc())))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
