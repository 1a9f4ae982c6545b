"""The canonical tree over real ranks: bits, bytes on the wire, and ownership it refuses."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from sumgrad.invariance.tree_exchange import DifferentTrees, Held, TooManyNodes, tree_sum
from sumgrad.kernels.layout import Layout
from sumgrad.kernels.tree import Accumulator, Nodes
from test_tree import TREE, nodes_of, whole_root

LENGTHS = (37, 16, 1, 50, 0, 23, 31, 20, 64, 3, 40)
SHARES = {
    1: [range(11)],
    2: [range(4), range(4, 11)],
    3: [range(6), range(6, 6), range(6, 11)],  # a rank without samples
    5: [range(1), range(1, 3), range(3, 4), range(4, 9), range(9, 11)],
}


def finish_with(num_samples):
    def finish(shares):
        tree = Accumulator(num_samples)
        for share in shares:
            if share.keys or share.empties:
                tree.add(
                    Nodes(
                        tree=TREE,
                        num_samples=num_samples,
                        keys=tuple(share.keys),
                        empties=tuple(share.empties),
                        values=share.values,
                    )
                )
        return tree.finish()

    return finish


def held_by(samples) -> Held:
    lengths = [LENGTHS[s] for s in samples]
    layout = Layout.packed(lengths, samples=samples, num_samples=len(LENGTHS))
    nodes = nodes_of(layout)
    return Held(tree=repr(nodes.tree), keys=nodes.keys, empties=nodes.empties, values=nodes.values)


def check_root(ranks):
    held = held_by(SHARES[ranks.world_size][ranks.rank])
    found = tree_sum(held, shape=(3,), dtype=torch.float32, finish=finish_with(len(LENGTHS)))
    assert found.root.numpy().tobytes() == whole_root(LENGTHS).tobytes()
    plain = held.values.sum(0)
    dist.all_reduce(plain)
    if ranks.world_size > 2:
        assert plain.numpy().tobytes() != found.root.numpy().tobytes()


@pytest.mark.distributed(ranks=1)
def test_one_rank(ranks):
    check_root(ranks)


@pytest.mark.distributed(ranks=2)
def test_two_ranks(ranks):
    check_root(ranks)


@pytest.mark.distributed(ranks=3)
def test_three_ranks_one_without_samples(ranks):
    check_root(ranks)


@pytest.mark.distributed(ranks=5)
def test_five_ranks(ranks):
    check_root(ranks)


@pytest.mark.distributed(ranks=3)
def test_bytes_on_the_wire_against_a_ring_sum(ranks):
    """(m + 1) / 2 times a ring SUM for m nodes a rank; as the ledger counted them."""
    numel, m = 3000, 3
    base = 4 * ranks.rank
    keys = [(33, base // 2), (32, base + 2), (32, base + 3)]
    held = Held(tree="a tree", keys=keys, empties=[], values=torch.ones(m, numel))

    def total(shares):
        return torch.stack([share.values.sum(0) for share in shares]).sum(0)

    found = tree_sum(held, shape=(numel,), dtype=torch.float32, finish=total)
    assert found.root.tolist() == [9.0] * numel
    assert found.sent_bytes == (m + 1) / 2 * found.ring_sum_bytes
    assert found.ring_sum_bytes == 2 * (numel * 4) * 2 // 3
    lines = [json.loads(line) for line in ranks.file(".ledger.jsonl").read_text().splitlines()]
    moved = [line for line in lines if "all_to_all" in line.get("op", "")]
    assert [line["numel"] for line in moved] == [m * numel], lines


@pytest.mark.distributed(ranks=2)
def test_scattered_ownership_is_refused_on_every_rank(ranks):
    own = range(ranks.rank, 64, 2)
    values = torch.ones(len(own), 3)
    held = Held(tree="a tree", keys=[(32, s) for s in own], empties=[], values=values)
    with pytest.raises(TooManyNodes, match=r"rank 0 of the group holds 32 nodes, more than 20"):
        tree_sum(held, shape=(3,), dtype=torch.float32, finish=finish_with(64), max_nodes=20)


@pytest.mark.distributed(ranks=3)
def test_nodes_of_different_trees_never_merge_over_ranks_either(ranks):
    """A rank with other tiles would add numbers of another order; a rank with nothing may join."""
    tree = ["TreeId(leaf=256)", "", "TreeId(leaf=1024)"][ranks.rank]
    keys = [] if ranks.rank == 1 else [(32, ranks.rank)]
    held = Held(tree=tree, keys=keys, empties=[], values=torch.ones(len(keys), 3))
    with pytest.raises(DifferentTrees, match=r"ranks 0 and 2 .*this rank's: (TreeId|none)"):
        tree_sum(held, shape=(3,), dtype=torch.float32, finish=finish_with(3))
