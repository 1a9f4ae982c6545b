"""Ties that a distribution cuts, and those that it keeps or divides over ranks."""

from __future__ import annotations

from sumgrad.subjects.program.protocol import tied, untied
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(5, 3), nn.LayerNorm(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_a_tie_is_found_with_all_its_names():
    (tie,) = tied(Net())
    assert [name for name, _, _ in tie] == ["embed.weight", "head.weight"]
    assert tied(nn.Linear(2, 2)) == []


def test_a_tie_that_is_kept_is_none_that_is_cut():
    net = Net()
    ties = tied(net)
    assert untied(ties, net) == []
    assert untied(ties, nn.Sequential(net)) == [], "wrapped"


def test_new_parameters_cut_it():
    net = Net()
    ties = tied(net)
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())
    assert untied(ties, net) == [["embed.weight", "head.weight"]]


def test_a_stage_that_holds_one_of_them_cuts_nothing():
    net = Net()
    ties = tied(net)
    net.embed = None
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())
    assert untied(ties, net) == []


def test_a_parameter_that_was_flattened_away_cuts_nothing():
    net = Net()
    ties = tied(net)
    del net.head._parameters["weight"]
    assert untied(ties, net) == []
