"""tyxe.data: the targets of batches, weighted or not, put together."""

import pytest
import torch

from tyxe.data import Targets, concatenate_targets


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_weighted_and_plain_batches_are_put_together(shape):
    one, two = torch.randn(4, *shape), torch.randn(3, *shape)
    weights = torch.tensor([0.0, 1.0, 2.0, 1.0])
    found = concatenate_targets([Targets(one, weights), two])
    assert torch.equal(found.values, torch.cat([one, two]))
    assert found.weights.tolist() == [0, 1, 2, 1, 1, 1, 1]
    assert found.mask is None
    mask = torch.ones_like(two)
    assert concatenate_targets([Targets(one, weights), Targets(two, None, mask)]).mask is not None
    assert torch.equal(concatenate_targets([one, two]), torch.cat([one, two]))
