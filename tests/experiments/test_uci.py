"""experiments/uci.py: splits, nets side by side, and the columns of a split."""

import pytest
import torch
import uci


def test_accuracy_is_that_of_the_likelier_class():
    one = torch.tensor([[2.0], [-1.0], [0.5]])
    assert uci.of_classes(one, torch.tensor([1.0, 0.0, 0.0])[:, None])["accuracy %"] == (
        pytest.approx(200 / 3)
    )
    several = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 3.0]])
    assert uci.of_classes(several, torch.tensor([0, 1]))["accuracy %"] == 50


def test_nets_side_by_side_are_those_nets():
    nets = uci.SideBySide(3, [4, 5, 6, 2]).double()
    x = torch.randn(7, 4, dtype=torch.double)
    alike = nets(x)
    torch.testing.assert_close(alike, alike[:, :1].expand_as(alike))  # one start for all
    for parameter in nets.parameters():
        torch.nn.init.normal_(parameter)
    outputs = nets(x)
    assert outputs.shape == (7, 3, 2)
    for index in range(3):
        torch.testing.assert_close(nets.member(index).double()(x), outputs[:, index])


def test_splits_are_stratified():
    x, y = torch.randn(200, 4), (torch.arange(200) % 4 == 0).long()
    (train, labels), *_, (test, _) = parts = uci.split(x, y, seed=1)
    assert [len(part[0]) for part in parts] == [140, 30, 30]
    assert int(labels.sum()) == 35
    torch.testing.assert_close(train.std(0), torch.ones(4))
    assert bool((uci.split(x, y, seed=1)[2][0] == test).all())
    assert not bool((uci.split(x, y, seed=2)[2][0] == test).all())
