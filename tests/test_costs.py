"""Ways round, and what they cost."""

import pytest

from tilewise import costs
from tilewise.routes import route_of

MIB = 2**20


@pytest.mark.parametrize(
    "nodes", [(0,), (0,) * 5, (0, 0, 1, 1, 2, 2), (0, 1, 0, 1), (0, 1, 2), (0,) * 4 + (1,) * 4]
)
def test_every_block_visits_every_rank_once_and_comes_home(nodes):
    world = len(nodes)
    routes = [route_of(rank, nodes) for rank in range(world)]
    for rank, route in enumerate(routes):
        assert sorted(route.owners[:-1]) == list(range(world))
        assert route.owners[0] == route.owners[-1] == rank
        for step, after in enumerate(route.after):
            assert routes[after].before[step] == rank
            assert routes[after].owners[step + 1] == route.owners[step]


def test_between_nodes_every_block_passes_once_a_node():
    nodes = (0, 0, 0, 1, 1, 1, 2, 2, 2)
    crossings = [
        [nodes[rank] != nodes[to] for to in route_of(rank, nodes).after[:-1]] for rank in range(9)
    ]
    assert all(row == crossings[0] for row in crossings), "all leave their node at the same step"
    assert sum(crossings[0]) == 2
    flat = [
        [nodes[rank] != nodes[to] for to in route_of(rank, (0,) * 9).after] for rank in range(9)
    ]
    assert all(any(column) for column in zip(*flat, strict=True)), "a plain ring crosses at each"


LOAD = costs.Load(
    columns=1024, features=512, feature_bytes=2, slices=1, stats=5, carried=True, grads=True
)
CLUSTER = costs.Cluster(1e14, 1e-4, costs.Link(1e11, 1e-5), costs.Link(1e10, 1e-5))


def seconds(schedule, load=LOAD, nodes=(0,) * 4, cluster=CLUSTER):
    return costs.estimate(schedule, load, nodes, cluster).seconds


def test_bytes_of_a_pass():
    forward, backward = costs.passes(LOAD)
    assert (forward.column_bytes, forward.found_bytes) == (1024, 20)
    assert (backward.column_bytes, backward.found_bytes) == (1024 + 40, 2048)
    frozen = costs.passes(LOAD._replace(grads=False))[1]
    assert (frozen.products, frozen.found_bytes) == (2, 0)


def test_arithmetic_hides_messages_where_blocks_are_large():
    large = costs.estimate("ring", LOAD._replace(columns=2**17), (0,) * 8, CLUSTER)
    small = costs.estimate("ring", LOAD._replace(columns=2**11), (0,) * 8, CLUSTER)
    home = 2**17 * 2068 / 1e11 + 2e-5  # the last hop of each pass waits for nothing else
    assert large.waiting_s == pytest.approx(home)
    assert small.waiting_s / small.seconds > 5 * large.waiting_s / large.seconds


def test_a_plain_ring_waits_for_the_slow_link_at_every_step():
    nodes = (0,) * 8 + (1,) * 8
    slow = CLUSTER._replace(between=costs.Link(1e9, 1e-5))
    assert seconds("ring", nodes=nodes, cluster=slow) > 4 * seconds("two-level", nodes=nodes,
                                                                    cluster=slow)  # fmt: skip
    assert seconds("ring") == seconds("two-level"), "on one node they are the same"


def choose(load, nodes, room=256 * MIB, cluster=CLUSTER):
    return costs.choose(load, nodes, cluster, room // costs.GATHER_ROOM)


def test_the_choice_says_why():
    alone = choose(LOAD, (0,))
    assert str(alone) == "ring: a ring of one has nothing to send"
    many = choose(LOAD._replace(columns=64), (0,) * 64)
    assert many.name == "gather", "a visit costs more than its pairs"
    assert "estimated ring" in many.why
    tight = choose(LOAD._replace(columns=64), (0,) * 64, room=MIB)
    assert tight.name == "ring"
    assert "gathering would take" in tight.why
    slow = CLUSTER._replace(between=costs.Link(1e9, 1e-5))
    large = choose(LOAD._replace(columns=2**13), (0,) * 8 + (1,) * 8, cluster=slow, room=MIB)
    assert large.name == "two-level"
    assert choose(LOAD._replace(columns=2**15), (0, 0, 1)).name == "ring", "uneven nodes"
    assert choose(LOAD._replace(columns=2**15), (0, 0, 1, 1)).name == "two-level", "of equals"
    assert choose(LOAD._replace(columns=0), (0, 0)).why == "there is nothing to send"


def test_gathering_uses_all_links_of_a_node():
    nodes, block = (0,) * 8 + (1,) * 8, 1e9
    assert costs._collective_s(block, nodes, CLUSTER) == pytest.approx(15e9 / 1e11 + 4e-5)
    slow = CLUSTER._replace(between=costs.Link(1e9, 1e-5))
    assert costs._collective_s(block, nodes, slow) == pytest.approx(8 / 8 + 4e-5)


def test_what_a_symmetric_loss_sends():
    """NT-Xent and SupCon: nothing follows forward, and no gradients of columns."""
    forward, backward = costs.passes(LOAD._replace(carried=False, grads=False))
    assert forward.found_bytes == backward.found_bytes == 0
    assert backward.column_bytes == 1024 + 2 * 20


def test_uneven_nodes_are_refused():
    assert costs.refusal("two-level", [0, 0, 1]) == (
        "it needs as many ranks on every node, got [1, 2]"
    )
    assert costs.refusal("ring", [0, 0, 1]) is None
