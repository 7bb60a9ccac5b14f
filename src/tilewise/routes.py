"""Which way columns go from rank to rank. Integers only: nothing here knows a process group."""

import functools
from typing import NamedTuple


class Route(NamedTuple):
    """What one rank sees of all columns passing by, step by step."""

    owners: list[int]  # whose columns are here at step 0 (one's own) to W (one's own again)
    after: list[int]  # to whom they go on at the end of step 0 to W - 1
    before: list[int]  # from whom the next ones come


@functools.lru_cache(maxsize=64)
def route_of(rank: int, nodes: tuple[int, ...]) -> Route:
    """The way that visits all ranks of a node before it goes on to the next one.

    `nodes`: which node each rank is on, as many ranks on each. At any step all columns move inside
    their nodes, or all of them to the next node, each over its own rank's link: between nodes every
    block passes once a node. With one node, or one rank on each, it is the plain ring.
    """
    world, order = len(nodes), sorted(range(len(nodes)), key=lambda r: (nodes[r], r))
    number = {owner: at for at, owner in enumerate(order)}
    width = world // len(set(nodes))  # ranks on a node

    def moved(who: int, step: int, way: int) -> int:
        """So many steps along the way (1) or back (-1) from a rank; home after the last."""
        hops, turn = divmod(step % world, width)
        node, place = divmod(number[who], width)
        node = (node + way * hops) % (world // width)
        return order[node * width + (place + way * (turn + hops * (width - 1))) % width]

    owners = [moved(rank, step, -1) for step in range(world + 1)]
    return Route(
        owners,
        [moved(owners[step], step + 1, 1) for step in range(world)],
        [moved(owners[step + 1], step, 1) for step in range(world)],
    )
