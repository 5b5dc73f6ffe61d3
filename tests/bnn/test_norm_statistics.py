"""Statistics of normalising layers at the centre and at each draw, against `update_bn`."""

import copy
import functools
import pickle

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import tyxe
from tests.oracles import bnns
from tests.oracles.bnns import HIDE_NORMS
from tests.oracles.nets import NetOf
from tests.oracles.predictions import seeded
from tests.oracles.states import assert_same_state
from tyxe.guides import AutoNormal
from tyxe.likelihoods import Categorical

N = 30


def inputs():
    return torch.randn(N, 4, generator=torch.Generator().manual_seed(0))


def batches():
    """Yield pairs, the last of which is smaller."""
    return [(x, torch.randint(3, (len(x),))) for x in inputs().split(8)]


def shared():
    """Return a net of which a norm is called twice."""

    def forward(net, x):
        return net.two(net.norm(torch.tanh(net.norm(net.one(x)))))

    return NetOf(forward, one=nn.Linear(4, 6), norm=nn.BatchNorm1d(6), two=nn.Linear(6, 3))


def mlp():
    return bnns.two_layers(4, 6, 3, nn.BatchNorm1d(6), nn.Tanh())


def made(net=None, scale=0.3, prior=HIDE_NORMS):
    torch.manual_seed(0)
    guide = functools.partial(AutoNormal, init_scale=scale)
    return tyxe.VariationalBNN(net or mlp(), prior, Categorical(N), guide)


def laplace():
    torch.manual_seed(0)
    return bnns.laplace(mlp(), Categorical(N), batches(), HIDE_NORMS)


def mcmc():
    bnn = tyxe.MCMC_BNN(mlp(), HIDE_NORMS, Categorical(N), tyxe.samplers.HMC)
    with pytest.warns(tyxe.TyxeWarning):
        bnn.fit(batches(), num_samples=3, warmup_steps=2, num_chains=2)
    return bnn


def assert_same(state, before):
    assert all(torch.equal(before[name], value) for name, value in state.items())


def expected(bnn, x, count):
    """Return outputs of plain copies at the same draws, each after torch's own `update_bn`."""
    bnn.update_norm_statistics(None)
    outputs = []
    for module in seeded(bnn.to_ensemble, count).members:
        own = copy.deepcopy(module).train()
        update_bn(batches(), own)
        outputs.append(own.eval()(x))
    return torch.stack(outputs)


@pytest.mark.parametrize("net", [mlp, shared])
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


@pytest.mark.parametrize("kind", [made, laplace, mcmc, lambda: made(shared())])
def test_each_draw_has_its_own(kind):
    bnn, x = kind(), inputs()
    bnn.update_norm_statistics(batches())
    before = copy.deepcopy(bnn.net.state_dict())
    options = {"num_predictions": 3, "aggregate": False, "predictive": "bnn"}
    found = seeded(bnn.predict, x, **options)
    plain = torch.stack([member(x) for member in seeded(bnn.to_ensemble, 3).members])
    one = bnn.to_module(sample=True)
    own = copy.deepcopy(one).train()
    update_bn(batches(), own)
    torch.testing.assert_close(one(x), own.eval()(x))
    assert_same(bnn.net.state_dict(), before)
    want = expected(bnn, x, 3)
    torch.testing.assert_close((found, plain), (want, want))
    with tyxe.poutine.local_reparameterization():
        assert bool(bnn.predict(x, **options).isfinite().all())


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
    bnn = made(bnns.two_layers(4, 6, 3, nn.Dropout(0.5), nn.BatchNorm1d(6)))
    modes = [module.training for module in bnn.modules()]
    bnn.update_norm_statistics(batches())
    own = bnn.to_module()
    means = torch.stack([own[0](x).mean(0) for x, _ in batches()])
    torch.testing.assert_close(bnn.net[2].running_mean, means.mean(0))
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
    last = tyxe.priors.IIDPrior(dist.Normal(0, 1), expose_all=False, expose_modules=[net[2]])
    bnn = made(net, prior=last)
    before = bnn.net[0][1].running_mean.clone()
    bnn.update_norm_statistics(batches())
    torch.testing.assert_close(bnn.net[0][1].running_mean, before, rtol=0, atol=0)
    assert not torch.allclose(bnn.net[1].running_mean, torch.zeros(3))


def test_without_norms_and_after_none_there_is_no_loader():
    for net, passes in ((nn.Linear(4, 3), 0), (mlp(), 1)):
        bnn, loader = made(net), Counted(batches())
        bnn.update_norm_statistics(loader)
        if passes:
            bnn.update_norm_statistics(None)
        bnn.predict(inputs(), num_predictions=2, vectorize=True)
        assert loader.passes == passes


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
    with pytest.raises(TypeError, match=r"data_loader is .*; expected a loader"):
        made().update_norm_statistics(loader)


class Failing(Counted):
    """Batches of which the second is missing in a later pass."""

    def __iter__(self):
        first, *others = super().__iter__()
        yield first
        if self.passes > 2:
            raise OSError("the disk is gone")
        yield from others


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda bnn: bnn.predict(inputs(), num_predictions=3), OSError),
        (lambda bnn: bnn.to_ensemble(3), OSError),
        (lambda bnn: bnn.to_module(sample=True), OSError),
        (lambda bnn: bnn.update_norm_statistics([]), ValueError),
        (lambda bnn: bnn.predict(inputs(), num_predictions=2, vectorize=True), ValueError),
    ],
)
def test_an_error_leaves_the_statistics_as_they_were(use, error):
    bnn = made()
    bnn.update_norm_statistics(Failing(batches()))
    if error is OSError:
        bnn.predict(inputs(), num_predictions=1)
    before = copy.deepcopy(bnn.net.state_dict())
    modes = [module.training for module in bnn.modules()]
    with pytest.raises(error, match=r"the disk is gone|is empty|leave vectorize"):
        use(bnn)
    assert_same(bnn.net.state_dict(), before)
    assert [module.training for module in bnn.modules()] == modes
    assert bnn.net[1].momentum == 0.1


def test_an_ensemble_shares_all_but_the_statistics():
    net = mlp()
    net.register_buffer("table", torch.zeros(5))
    bnn = made(net)
    bnn.update_norm_statistics(batches())
    first, second = bnn.to_ensemble(2).members
    assert first.table is second.table
    assert first[1].weight is second[1].weight
    assert first[1].running_mean is not second[1].running_mean
