"""tyxe.data: the targets of batches, weighted or not, put together."""

import functools

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
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


def test_classes_with_weights_are_sampled_as_repeated_ones():
    """All batches of a chain are one: weights of labels `(n,)` as well."""
    x, y, weights = torch.randn(12, 2), torch.arange(12) % 2, torch.arange(12) % 3

    def potential(batches):
        torch.manual_seed(0)
        bnn = tyxe.MCMC_BNN(
            nn.Linear(2, 2),
            tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            tyxe.likelihoods.Categorical(12),
            functools.partial(
                tyxe.samplers.HMC, step_size=0.1, adapt_step_size=False, adapt_mass_matrix=False
            ),
        )
        bnn.fit(batches, 5, warmup_steps=0, num_chains=1, progress=False)
        return bnn.get_samples()

    counts = weights.float()
    weighted = [(x[:6], y[:6], counts[:6]), (x[6:], y[6:], counts[6:])]
    repeated = [(x.repeat_interleave(weights, 0), y.repeat_interleave(weights))]
    one, two = potential(weighted), potential(repeated)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5)
