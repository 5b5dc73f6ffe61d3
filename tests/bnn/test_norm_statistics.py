"""Statistics of normalising layers at the centre and at each draw, against `update_bn`."""

import copy
import functools
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import tyxe
from tests.oracles.states import assert_same_state
from tyxe.guides import AutoNormal
from tyxe.likelihoods import Categorical

N = 30
PRIOR = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])


def inputs():
    return torch.randn(N, 4, generator=torch.Generator().manual_seed(0))


def batches():
    """Yield pairs, the last of which is smaller."""
    return [(x, torch.randint(3, (len(x),))) for x in inputs().split(8)]


class Shared(nn.Module):
    """A norm that is called twice."""

    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.two(self.norm(torch.tanh(self.norm(self.one(x)))))


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def made(net=None, scale=0.3, prior=PRIOR):
    torch.manual_seed(0)
    guide = functools.partial(AutoNormal, init_scale=scale)
    return tyxe.VariationalBNN(net or mlp(), prior, Categorical(N), guide)


def laplace():
    torch.manual_seed(0)
    bnn = tyxe.LaplaceBNN(mlp(), PRIOR, Categorical(N))
    bnn.fit_curvature(batches())
    return bnn


def mcmc():
    bnn = tyxe.MCMC_BNN(mlp(), PRIOR, Categorical(N), tyxe.samplers.HMC)
    with pytest.warns(tyxe.TyxeWarning):
        bnn.fit(batches(), num_samples=3, warmup_steps=2, num_chains=2)
    return bnn


def seeded(function, *args, **options):
    pyro.set_rng_seed(3)
    return function(*args, **options)


def expected(bnn, x, count):
    """Return outputs of plain copies at the same draws, each after torch's own `update_bn`."""
    bnn.update_norm_statistics(None)
    outputs = []
    for module in seeded(bnn.to_ensemble, count).members:
        own = copy.deepcopy(module).train()
        update_bn(batches(), own)
        outputs.append(own.eval()(x))
    return torch.stack(outputs)


@pytest.mark.parametrize("net", [mlp, Shared])
def test_the_centre_is_that_of_update_bn(net):
    bnn = made(net())
    own = bnn.to_module().train()
    update_bn(batches(), own)
    bnn.update_norm_statistics(batches())
    for name, buffer in own.named_buffers():
        torch.testing.assert_close(bnn.net.get_buffer(name), buffer)
    x = inputs()
    torch.testing.assert_close(bnn.to_module()(x), own.eval()(x))
    for norm in bnn.net.modules():
        assert getattr(norm, "momentum", 0.1) == 0.1


@pytest.mark.parametrize("kind", [made, laplace, mcmc, functools.partial(made, Shared())])
def test_each_draw_has_its_own(kind):
    bnn, x = kind(), inputs()
    bnn.update_norm_statistics(batches())
    options = {"num_predictions": 3, "aggregate": False, "predictive": "bnn"}
    found = seeded(bnn.predict, x, **options)
    ensemble = seeded(bnn.to_ensemble, 3)
    plain = torch.stack([member(x) for member in ensemble.members])
    before = copy.deepcopy(bnn.net.state_dict())
    want = expected(bnn, x, 3)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(plain, want)
    for name, value in bnn.net.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_one_draw_as_a_module():
    bnn = made()
    bnn.update_norm_statistics(batches())
    module = seeded(bnn.to_module, sample=True)
    own = copy.deepcopy(module).train()
    update_bn(batches(), own)
    torch.testing.assert_close(own[1].running_mean, module[1].running_mean)
    assert not torch.allclose(bnn.net[1].running_mean, module[1].running_mean)


class Counted(list):
    """Batches that count how often they are gone through, and that take random numbers."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        torch.rand(self.passes)
        return super().__iter__()


@pytest.mark.parametrize("use", ["predict", "evaluate", "sample_predictive"])
def test_a_call_goes_through_the_loader_once_for_each_draw(use):
    bnn, loader = made(), Counted(batches())
    bnn.update_norm_statistics(loader)
    assert loader.passes == 1
    x, y = inputs(), torch.zeros(N, dtype=torch.long)
    name = "num_samples" if use == "sample_predictive" else "num_predictions"
    call = functools.partial(getattr(bnn, use), *((x, y) if use == "evaluate" else (x,)))
    whole = seeded(call, **{name: 3})
    assert loader.passes == 4
    after = torch.rand(())
    pieces = seeded(call, **{name: 3}, batch_size=7)
    assert loader.passes == 7
    if use != "sample_predictive":  # whose targets take random numbers batch by batch
        torch.testing.assert_close(pieces, whole)
        assert torch.rand(()) == after


def test_the_centre_and_glm_take_the_nets_own():
    bnn, loader = made(), Counted(batches())
    bnn.update_norm_statistics(loader)
    bnn.predict(inputs(), num_predictions=0)
    bnn.predict(inputs(), num_predictions=4, predictive="glm")
    bnn.to_module()
    assert loader.passes == 1


def test_only_norms_are_in_train_mode():
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 3))
    bnn = made(net)
    modes = [module.training for module in bnn.modules()]
    bnn.update_norm_statistics(batches())
    own = bnn.to_module()
    own[2].train()
    update_bn_of_norms = [own[0](x).mean(0) for x, _ in batches()]
    torch.testing.assert_close(bnn.net[2].running_mean, torch.stack(update_bn_of_norms).mean(0))
    assert [module.training for module in bnn.modules()] == modes


def test_instance_norms():
    net = nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2), nn.InstanceNorm1d(3, track_running_stats=True),
        nn.InstanceNorm1d(3), nn.Flatten(), nn.Linear(9, 3),
    )  # fmt: skip
    bnn = made(net)
    bnn.update_norm_statistics(batches())
    own = bnn.to_module()
    hidden = [own[:2](x) for x, _ in batches()]
    means = torch.stack([h.mean((0, 2)) for h in hidden]).mean(0)
    torch.testing.assert_close(bnn.net[2].running_mean, means)
    variances = torch.stack([h.var(2).mean(0) for h in hidden]).mean(0)
    torch.testing.assert_close(bnn.net[2].running_var, variances)


def test_frozen_parts_keep_theirs():
    net = nn.Sequential(mlp(), nn.BatchNorm1d(3), nn.Linear(3, 3))
    net[0].requires_grad_(False).eval()
    bnn = made(net, prior=tyxe.priors.IIDPrior(dist.Normal(0, 1), expose_all=False,
               expose_modules=[net[2]]))  # fmt: skip
    before = bnn.net[0][1].running_mean.clone()
    bnn.update_norm_statistics(batches())
    torch.testing.assert_close(bnn.net[0][1].running_mean, before, rtol=0, atol=0)
    assert not torch.allclose(bnn.net[1].running_mean, torch.zeros(3))


def test_a_net_without_norms_stays_as_it_is():
    bnn, loader = made(nn.Linear(4, 3)), Counted(batches())
    bnn.update_norm_statistics(loader)
    bnn.predict(inputs(), num_predictions=2, vectorize=True)
    assert loader.passes == 0


def test_none_forgets_the_loader():
    bnn, loader = made(), Counted(batches())
    bnn.update_norm_statistics(loader)
    bnn.update_norm_statistics(None)
    bnn.predict(inputs(), num_predictions=2, vectorize=True)
    assert loader.passes == 1


@pytest.mark.parametrize("kind", ["one", "ensemble"])
def test_copies_and_files_are_without_the_loader(tmp_path, kind):
    bnn, loaded = (
        made() if kind == "one" else tyxe.EnsembleBNN(lambda i: made(scale=0.1 + i), 2)
        for _ in range(2)
    )
    bnn.save(tmp_path / "plain")
    loaded.load(tmp_path / "plain")
    loader = Counted(batches())
    loader.unpicklable = lambda: None
    bnn.update_norm_statistics(loader)
    passes = loader.passes
    bnn.save(tmp_path / "bnn")
    with pytest.warns(
        tyxe.TyxeWarning,
        match=r"a loader, which is not saved: call update_norm_statistics\(loader\)",
    ):
        loaded.load(tmp_path / "bnn")
    for other in (loaded, copy.deepcopy(bnn), pickle.loads(pickle.dumps(bnn))):
        assert_same_state(bnn, other)
        other.predict(inputs(), num_predictions=2)
    assert loader.passes == passes
    loaded.update_norm_statistics(batches())
    loaded.load(tmp_path / "bnn")
    one, two = (seeded(each.predict, inputs(), num_predictions=3) for each in (bnn, loaded))
    assert torch.equal(one, two)


@pytest.mark.parametrize("loader", [torch.zeros(5, 4), (torch.zeros(5, 4),), 3])
def test_what_is_no_loader(loader):
    with pytest.raises(TypeError, match=r"data_loader is .*; expected a loader, or a list"):
        made().update_norm_statistics(loader)


class Failing(Counted):
    """Batches of which the second is missing in a later pass."""

    def __iter__(self):
        first, *others = super().__iter__()
        yield first
        if self.passes > 2:
            raise OSError("the disk is gone")
        yield from others


def test_an_error_leaves_the_statistics_as_they_were():
    bnn = made()
    bnn.update_norm_statistics(Failing(batches()))
    before = copy.deepcopy(bnn.net.state_dict())
    modes = [module.training for module in bnn.modules()]
    for use in (
        lambda: bnn.predict(inputs(), num_predictions=3),
        lambda: bnn.to_ensemble(3),
        lambda: bnn.to_module(sample=True),
        lambda: bnn.update_norm_statistics([]),
    ):
        with pytest.raises((OSError, ValueError), match=r"the disk is gone|is empty"):
            use()
        state = bnn.net.state_dict()
        assert all(torch.equal(before[name], value) for name, value in state.items())
        assert [module.training for module in bnn.modules()] == modes
        assert bnn.net[1].momentum == 0.1


def test_vectorize_is_refused():
    bnn = made()
    bnn.update_norm_statistics(batches())
    with pytest.raises(ValueError, match="update_norm_statistics has been called: leave vectorize"):
        bnn.predict(inputs(), num_predictions=2, vectorize=True)


def test_an_ensemble_shares_all_but_the_statistics():
    net = mlp()
    net.register_buffer("table", torch.zeros(5))
    bnn = made(net)
    bnn.update_norm_statistics(batches())
    first, second = bnn.to_ensemble(2).members
    assert first.table is second.table
    assert first[1].weight is second[1].weight
    assert first[1].running_mean is not second[1].running_mean


def test_under_local_reparameterization():
    bnn = made()
    bnn.update_norm_statistics(batches())
    with tyxe.poutine.local_reparameterization():
        found = bnn.predict(inputs(), num_predictions=2, aggregate=False)
    assert bool(found.isfinite().all())
