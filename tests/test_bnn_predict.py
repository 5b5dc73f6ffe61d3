"""`predict`, `evaluate` and `to_module`: one set of draws however the rows are cut."""

import copy
import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoLowRankMultivariateNormal
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import tyxe
from tyxe.guides import AutoNormal
from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Poisson,
)

N, S = 11, 5
NORMAL = tyxe.priors.IIDPrior(dist.Normal(0, 1))
GUIDE = functools.partial(AutoNormal, init_loc_fn=tyxe.guides.init_to_sample, init_scale=0.3)


def net(outputs=3):
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def make(module=None, likelihood=None, guide=GUIDE, prior=NORMAL, likelihood_guide=None):
    pyro.set_rng_seed(0)
    return tyxe.VariationalBNN(
        module or net(), prior, likelihood or Categorical(N), guide, likelihood_guide
    ).double()


def inputs():
    return torch.randn(N, 2, generator=torch.Generator().manual_seed(0)).double()


def seeded(function, *args, **kwargs):
    pyro.set_rng_seed(5)
    return function(*args, **kwargs)


# --------------------------------------------------------------------------- one set of draws


HOW = {
    "vectorize": {"vectorize": True},
    "loop": {"vectorize": False},
    "chunks of rows": {"batch_size": 3},
    "one row at a time": {"batch_size": 1},
    "vectorized chunks": {"vectorize": True, "batch_size": 4},
}


@pytest.mark.parametrize("aggregate", [True, False])
@pytest.mark.parametrize("draws", [1, 5, 19])  # fewer and more than one chunk of vmap
@pytest.mark.parametrize("how", HOW)
def test_numbers_depend_on_the_seed_alone(how, draws, aggregate):
    bnn, x = make(), inputs()
    options = {"num_predictions": draws, "aggregate": aggregate}
    expected = seeded(bnn.predict, x, **options)
    found = seeded(bnn.predict, x, **options, **HOW[how])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


LOADERS = {
    "DataLoader of pairs": lambda x: DataLoader(TensorDataset(x, torch.zeros(N)), batch_size=4),
    "DataLoader of inputs": lambda x: DataLoader(x, batch_size=4),
    "generator": lambda x: ((part, None) for part in x.split(4)),
    "iterator of tensors": lambda x: iter(x.split(4)),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_loader_stands_in_for_inputs(loader):
    bnn, x = make(), inputs()
    expected = seeded(bnn.predict, x, num_predictions=S, aggregate=False)
    found = seeded(bnn.predict, LOADERS[loader](x), num_predictions=S, aggregate=False)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("guide", [AutoDelta, AutoLowRankMultivariateNormal])
def test_vmapped_is_looped_for_pyros_guides(guide):
    bnn, x = make(guide=guide), inputs()
    looped = seeded(bnn.predict, x, num_predictions=S, aggregate=False, vectorize=False)
    vmapped = seeded(bnn.predict, x, num_predictions=S, aggregate=False, vectorize=True)
    torch.testing.assert_close(vmapped, looped, rtol=1e-12, atol=1e-14)


def test_vmapped_is_looped_for_a_convolution_with_batchnorm():
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    ).double()
    bnn, x = make(module), torch.randn(6, 1, 5, 5).double()
    looped = seeded(bnn.predict, x, num_predictions=S, aggregate=False, vectorize=False)
    vmapped = seeded(bnn.predict, x, num_predictions=S, aggregate=False, vectorize=True)
    torch.testing.assert_close(vmapped, looped, rtol=1e-12, atol=1e-13)


def test_draws_are_shared_by_rows_and_differ_among_predictions():
    bnn = make()
    x = inputs()[:1].expand(3, -1)
    outputs = bnn.predict(x, num_predictions=4, aggregate=False)
    torch.testing.assert_close(outputs[:, 0], outputs[:, 2], rtol=1e-12, atol=0)
    assert (outputs[0] - outputs[1]).abs().min() > 0


def test_outputs_are_the_net_at_the_guides_draws():
    bnn, x, plain = make(), inputs(), net()
    outputs = seeded(bnn.predict, x, num_predictions=S, aggregate=False)
    pyro.set_rng_seed(5)
    for output in outputs:
        values = {name: value.detach() for name, value in bnn.guide().items()}
        own = {name.removeprefix("net."): value for name, value in values.items()}
        by_hand = torch.func.functional_call(plain, own, (x,))
        torch.testing.assert_close(output, by_hand, rtol=1e-12, atol=1e-14)


def test_no_predictions_is_the_net_at_the_mean():
    bnn, x = make(), inputs()
    means = {name: bnn.net_guide.get_loc(name).detach() for name in bnn.net_prior.names()}
    by_hand = torch.func.functional_call(net(), means, (x,))
    raw = bnn.predict(x, num_predictions=0, aggregate=False)
    torch.testing.assert_close(raw, by_hand[None])
    torch.testing.assert_close(bnn.predict(x, num_predictions=0), by_hand.log_softmax(-1))


def test_negative_number_of_draws():
    with pytest.raises(ValueError, match="num_predictions is -1"):
        make().predict(inputs(), num_predictions=-1)


def test_empty_loader():
    bnn = make()
    with pytest.raises(ValueError, match="loader is empty"):
        bnn.predict(iter([]))
    with pytest.raises(ValueError, match="loader is empty"):
        bnn.evaluate(iter([]))


def test_handlers_are_active_in_predict():
    bnn, x = make(), inputs()[:1].expand(3, -1)
    with tyxe.poutine.report() as report, tyxe.poutine.local_reparameterization():
        outputs = bnn.predict(x, num_predictions=2, aggregate=False)
        means = bnn.predict(x, num_predictions=0, aggregate=False)
    assert {row.treatment for row in report} == {"moments", "drawn"}  # drawn: at the mean
    assert (outputs[:, 0] - outputs[:, 1]).abs().min() > 0  # noise of its own for each row
    torch.testing.assert_close(means[:, 0], means[:, 1])
    with (
        pytest.raises(ValueError, match="vectorize=True needs drawn weights"),
        tyxe.poutine.local_reparameterization(),
    ):
        bnn.predict(x, vectorize=True)


def test_no_gradient_and_no_graph():
    bnn = make()
    assert not bnn.predict(inputs()).requires_grad
    error, log_likelihood = bnn.evaluate(inputs(), torch.zeros(N).long())
    assert not error.requires_grad
    assert not log_likelihood.requires_grad


# --------------------------------------------------------------------------- nothing is touched


def norm_net():
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))


@pytest.mark.parametrize("modes", ["train", "eval", "mixed"])
def test_predict_is_in_eval_mode_and_gives_modes_back(modes):
    bnn, x = make(norm_net().double()), inputs()
    bnn.train(modes != "eval")
    if modes == "mixed":
        bnn.net[1].eval()
    before = {name: module.training for name, module in bnn.named_modules()}
    state = copy.deepcopy(bnn.state_dict())
    first, second = (seeded(bnn.predict, x, num_predictions=2) for _ in range(2))
    seeded(bnn.evaluate, x, torch.zeros(N).long())
    assert torch.equal(first, second)  # no dropout
    assert {name: module.training for name, module in bnn.named_modules()} == before
    for name, value in bnn.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, state[name]), name


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.broken = nn.Linear(2, 3), False

    def forward(self, x):
        if self.broken:
            raise RuntimeError("out of order")
        return self.layer(x)


def test_modes_and_parameters_come_back_when_the_net_raises():
    bnn = make(Fails().double())
    bnn.net.broken = True
    parameters = dict(bnn.net.named_parameters())
    for call in (bnn.predict, lambda x: bnn.evaluate(x, torch.zeros(N).long())):
        with pytest.raises(RuntimeError, match="out of order"):
            call(inputs())
        assert all(module.training for module in bnn.modules())
        assert dict(bnn.net.named_parameters()).keys() == parameters.keys()
        assert all(p is parameters[n] for n, p in bnn.net.named_parameters())
        assert torch.is_grad_enabled()


# --------------------------------------------------------------------------- evaluate


def log_mean_exp(values):
    return values.logsumexp(0) - math.log(len(values))


def categorical(outputs, y):
    probs = outputs.softmax(-1)
    error = (probs.mean(0).argmax(-1) != y).double()
    return error, probs[:, torch.arange(N), y].mean(0).log()


def bernoulli(outputs, y):
    probs = outputs.sigmoid().squeeze(-1)
    y = y.squeeze(-1)
    error = ((probs.mean(0) > 0.5) != (y > 0.5)).double()
    return error, torch.where(y > 0.5, probs, 1 - probs).mean(0).log()


def homoskedastic(outputs, y):
    error = (outputs.mean(0) - y).square().sum(-1)
    return error, log_mean_exp(dist.Normal(outputs, 0.4).log_prob(y).sum(-1))


def heteroskedastic(outputs, y):
    loc, scale = outputs[..., :1], nn.functional.softplus(outputs[..., 1:])
    error = (loc.mean(0) - y).square().sum(-1)
    return error, log_mean_exp(dist.Normal(loc, scale).log_prob(y).sum(-1))


def poisson(outputs, y):
    error = (outputs.exp().mean(0) - y).square().sum(-1)
    return error, log_mean_exp(dist.Poisson(outputs.exp()).log_prob(y).sum(-1))


LIKELIHOODS = {
    "Categorical": (Categorical(N), 3, torch.arange(N) % 3, categorical),
    "Bernoulli": (Bernoulli(N), 1, torch.arange(N)[:, None] % 2, bernoulli),
    "HomoskedasticGaussian": (
        HomoskedasticGaussian(N, scale=0.4),
        2,
        torch.arange(2.0 * N).reshape(N, 2) / N,
        homoskedastic,
    ),
    "HeteroskedasticGaussian": (
        HeteroskedasticGaussian(N),
        2,
        torch.arange(1.0 * N)[:, None] / N,
        heteroskedastic,
    ),
    "Poisson": (Poisson(N), 1, torch.arange(N)[:, None], poisson),
}


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("how", [{}, {"batch_size": 4}, {"vectorize": True}, "loader"])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_evaluate_is_the_computation_by_hand(name, how, reduction):
    likelihood, outputs, y, by_hand = LIKELIHOODS[name]
    bnn, x = make(net(outputs), likelihood), inputs()
    raw = seeded(bnn.predict, x, num_predictions=S, aggregate=False)
    reduce = {"sum": torch.sum, "mean": torch.mean, "none": lambda t: t}[reduction]
    expected = tuple(reduce(values) for values in by_hand(raw, y))
    options = {"num_predictions": S, "reduction": reduction}
    if how == "loader":
        loader = DataLoader(TensorDataset(x, y), batch_size=4)
        found = seeded(bnn.evaluate, loader, **options)
    else:
        found = seeded(bnn.evaluate, x, y, **options, **how)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # scale 0.4 in float32


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_evaluate_without_aggregation_has_a_row_for_each_draw(name):
    likelihood, outputs, y, by_hand = LIKELIHOODS[name]
    bnn, x = make(net(outputs), likelihood), inputs()
    raw = seeded(bnn.predict, x, num_predictions=S, aggregate=False)
    error, log_likelihood = seeded(
        bnn.evaluate, x, y, num_predictions=S, aggregate=False, reduction="none", batch_size=4
    )
    assert error.shape == log_likelihood.shape == (S, N)
    each = [by_hand(raw[s : s + 1], y) for s in range(S)]
    torch.testing.assert_close(error, torch.stack([e for e, _ in each]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        log_likelihood, torch.stack([value for _, value in each]), rtol=1e-6, atol=1e-6
    )


def test_aggregated_predictions_are_the_likelihoods_own_parameters():
    raw = {}
    for name, (likelihood, outputs, *_) in LIKELIHOODS.items():
        bnn = make(net(outputs), likelihood)
        raw[name] = (
            seeded(bnn.predict, inputs(), num_predictions=S, aggregate=False),
            seeded(bnn.predict, inputs(), num_predictions=S, batch_size=4),
        )
    draws, found = raw["Categorical"]
    torch.testing.assert_close(found.softmax(-1), draws.softmax(-1).mean(0))
    draws, found = raw["Bernoulli"]
    torch.testing.assert_close(found.sigmoid(), draws.sigmoid().mean(0))
    draws, found = raw["Poisson"]
    torch.testing.assert_close(found.exp(), draws.exp().mean(0))
    draws, (mean, scale) = raw["HomoskedasticGaussian"]
    torch.testing.assert_close(mean, draws.mean(0))
    torch.testing.assert_close(scale**2, draws.var(0, correction=0) + 0.16, rtol=1e-6, atol=1e-6)
    draws, found = raw["HeteroskedasticGaussian"]
    loc, noise = draws[..., :1], nn.functional.softplus(draws[..., 1:]).square()
    total = loc.var(0, correction=0) + noise.mean(0)
    torch.testing.assert_close(found[..., :1], loc.mean(0))
    torch.testing.assert_close(nn.functional.softplus(found[..., 1:]).square(), total)


def test_inferred_noise_is_drawn_with_the_weights():
    likelihood = HomoskedasticGaussian(N, scale=dist.LogNormal(-1.0, 0.5))
    bnn = make(net(1), likelihood, likelihood_guide=GUIDE)
    x, y = inputs(), torch.arange(1.0 * N)[:, None].double() / N
    raw = seeded(bnn.predict, x, num_predictions=S, aggregate=False)
    pyro.set_rng_seed(5)
    scales = torch.stack([bnn.guide()["likelihood.scale"] for _ in range(S)]).detach()
    assert len(set(scales.tolist())) == S
    mean, scale = seeded(bnn.predict, x, num_predictions=S, batch_size=4)
    expected = raw.var(0, correction=0) + scales.square().mean()
    torch.testing.assert_close(scale**2, expected)
    torch.testing.assert_close(mean, raw.mean(0))
    each = dist.Normal(raw, scales[:, None, None]).log_prob(y).sum(-1)
    _, log_likelihood = seeded(bnn.evaluate, x, y, num_predictions=S, reduction="none")
    torch.testing.assert_close(log_likelihood, log_mean_exp(each))


def test_masked_points_are_left_out_of_the_metrics():
    bnn, x, y = make(), inputs(), torch.arange(N) % 3
    mask = torch.arange(N) % 2 == 0
    with tyxe.poutine.selective_mask(mask=mask, expose=["likelihood.data"]):
        masked = seeded(bnn.evaluate, x, y, num_predictions=S, reduction="mean")
    dropped = seeded(bnn.evaluate, x[mask], y[mask], num_predictions=S, reduction="mean")
    torch.testing.assert_close(masked, dropped, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((inputs(),), {}, "needs targets"),
        ((inputs(), torch.zeros(N).long()), {"reduction": "median"}, "reduction is 'median'"),
        ((inputs(), torch.zeros(N, 1).long()), {}, "squeeze"),
        ((inputs(), torch.zeros(N).long()), {"num_predictions": -2}, "num_predictions is -2"),
    ],
)
def test_evaluate_rejects(args, options, message):
    bnn = make()
    with pytest.raises(ValueError, match=message):
        bnn.evaluate(*args, **options)
    assert bnn.training


# --------------------------------------------------------------------------- the user's net


class Tracked(nn.Sequential):
    """A class of the user's own, with a forward that counts."""

    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x)


def describe(module):
    return {
        "class": [type(m) for m in module.modules()],
        "training": [m.training for m in module.modules()],
        "grad": [(n, p.requires_grad, p.grad) for n, p in module.named_parameters()],
        "ids": [id(p) for p in module.parameters()],
        "hooks": [list(m._forward_hooks) + list(m._forward_pre_hooks) for m in module.modules()],
        "dict": [sorted(vars(m)) for m in module.modules()],
        "state": {n: v.clone() for n, v in module.state_dict().items()},
    }


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_the_users_net_is_never_changed():
    module = Tracked(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    module[1].eval()
    module[0].bias.requires_grad_(False)
    module.register_forward_hook(lambda *_: None)
    before = describe(module)
    bnn = make(module)
    y = torch.arange(N) % 3
    bnn.fit([(inputs(), y)], functools.partial(torch.optim.Adam, lr=0.1), 2)
    bnn.predict(inputs(), num_predictions=2, vectorize=True)
    bnn.evaluate(inputs(), y)
    bnn.update_prior(tyxe.priors.IIDPrior(dist.Normal(0, 2)))
    bnn.to_module().train()
    tyxe.PytorchBNN(module, NORMAL, AutoNormal)(inputs())
    after = describe(module)
    for key in before.keys() - {"state"}:
        assert after[key] == before[key], key
    for name, value in before["state"].items():
        assert torch.equal(after["state"][name], value), name
    # The copy is one in class and hooks, too.
    assert type(bnn.net) is Tracked
    assert len(bnn.net._forward_hooks) == 1


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_to_module_is_a_plain_net_of_the_class_that_came_in():
    module = Tracked(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    hide = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])
    bnn, x = make(module, prior=hide), inputs()
    bnn.fit([(x, torch.arange(N) % 3)], functools.partial(torch.optim.Adam, lr=0.1), 3)

    exported = bnn.to_module()
    assert type(exported) is Tracked
    assert exported.state_dict().keys() == module.state_dict().keys()
    assert all(type(p) is nn.Parameter and p.requires_grad for p in exported.parameters())
    assert tyxe.util.pyro_sample_sites(exported) == []
    assert set(vars(exported)) == set(vars(module))
    raw = bnn.predict(x, num_predictions=0, aggregate=False)[0]
    torch.testing.assert_close(exported.eval()(x), raw)

    # It shares nothing with the BNN: training it on leaves the BNN as it is.
    state = copy.deepcopy(bnn.state_dict())
    with torch.no_grad():
        for parameter in exported.parameters():
            parameter.add_(1.0)
    for name, value in bnn.state_dict().items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, state[name]), name


def test_to_module_at_a_draw():
    bnn, x = make(), inputs()
    sample = seeded(bnn.to_module, sample=True)
    output = seeded(bnn.predict, x, aggregate=False)[0]
    torch.testing.assert_close(sample(x), output)
    assert not torch.equal(sample[0].weight, bnn.to_module(sample=True)[0].weight)


def test_to_module_of_a_frozen_backbone_keeps_it_frozen():
    module = net()
    for parameter in module[0].parameters():
        parameter.requires_grad_(False)
    bnn = make(module)
    grads = {n: p.requires_grad for n, p in bnn.to_module().named_parameters()}
    assert grads == {"0.weight": False, "0.bias": False, "2.weight": True, "2.bias": True}


def test_forward_draws_from_the_posterior():
    bnn, x = make(), inputs()
    pyro.set_rng_seed(3)
    output = bnn(x)
    assert output.requires_grad
    pyro.set_rng_seed(3)
    drawn = bnn.one_draw()
    own = {name.removeprefix("net."): value for name, value in drawn.items()}
    torch.testing.assert_close(output, torch.func.functional_call(net(), own, (x,)))


def test_guided_forward_replays_a_trace():
    bnn, x = make(), inputs()
    trace = pyro.poutine.trace(bnn.guide).get_trace()
    first, second = (bnn.guided_forward(x, guide_tr=trace) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, bnn.guided_forward(x))


class WithScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x, scale=1.0):
        return scale * self.layer(x)


def test_forward_takes_positions_and_keywords_together():
    bnn, x = make(WithScale().double()), inputs()
    torch.testing.assert_close(seeded(bnn, x, scale=2.0), 2 * seeded(bnn, x))
    torch.testing.assert_close(seeded(bnn, x=x, scale=2.0), 2 * seeded(bnn, x))


# --------------------------------------------------------------------------- random loaders


class Jittered(Dataset):
    """Data whose transform draws from torch's global generator, and keeps what it gave."""

    def __init__(self):
        self.given = []

    def __len__(self):
        return 6

    def __getitem__(self, index):
        x = 1.0 + torch.rand(1).double()
        self.given.append(x)
        return x, 0.0


@pytest.mark.parametrize("vectorize", [True, False])
def test_a_loaders_randomness_goes_on_while_the_draws_are_the_same(vectorize):
    bnn = make(nn.Linear(1, 1, bias=False), HomoskedasticGaussian(6, scale=0.1))
    dataset = Jittered()
    outputs = bnn.predict(
        DataLoader(dataset, batch_size=2), num_predictions=3, aggregate=False, vectorize=vectorize
    )
    x = torch.stack(dataset.given)
    assert len(x.unique()) == len(x) == 6
    weights = outputs / x
    torch.testing.assert_close(weights, weights[:, :1].expand_as(weights))
    assert len(weights[:, 0].unique()) == 3


@pytest.mark.parametrize("handler", ["local_reparameterization", "flipout"])
def test_noise_of_a_handler_is_not_repeated_in_the_next_chunk(handler):
    bnn = make(nn.Linear(4, 1, bias=False), HomoskedasticGaussian(6, scale=0.1))
    x = torch.ones(6, 4).double()

    def noise(**options):
        with getattr(tyxe.poutine, handler)():
            return bnn.predict(x, num_predictions=3, aggregate=False, **options)

    for outputs in (noise(batch_size=2), noise(batch_size=1)):
        pieces = outputs.flatten(1).T  # equal rows, of three draws
        distances = torch.cdist(pieces, pieces)[~torch.eye(6, dtype=torch.bool)]
        assert bool((distances > 0).all())


# --------------------------------------------------------------------------- many points


class Rounded(nn.Module):
    def __init__(self, dtype, then):
        super().__init__()
        self.layer, self.dtype, self.then = nn.Linear(2, 1), dtype, then

    def forward(self, x):
        return self.layer(x).to(self.dtype).to(self.then)


@pytest.mark.parametrize("aggregate", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_evaluation_of_half_predictions_does_not_overflow(dtype, aggregate):
    x, y = torch.randn(3000, 2), torch.full((3000, 1), 20.0)

    def evaluate(then):
        likelihood = HomoskedasticGaussian(3000, scale=0.5)
        module = Rounded(dtype, then)
        module.load_state_dict({"layer.weight": torch.ones(1, 2), "layer.bias": torch.zeros(1)})
        bnn = tyxe.VariationalBNN(module, NORMAL, likelihood, AutoNormal)
        return seeded(bnn.evaluate, x, y, num_predictions=4, aggregate=aggregate)

    found, expected = evaluate(dtype), evaluate(torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert bool((one.abs() > 1e6).all())
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_list_of_pairs_is_a_loader_as_in_fit():
    bnn, x, y = make(), inputs(), torch.randint(3, (N,))
    whole = seeded(bnn.evaluate, x, y, S)
    parts = seeded(bnn.evaluate, [(x[:4], y[:4]), (x[4:], y[4:])], None, S)
    torch.testing.assert_close(parts, whole)


class Signed(nn.Module):
    """Takes a tensor, a number, a flag and maybe another tensor."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x, sign, flag, other=None):
        assert flag == "on"
        return sign * self.inner(x if other is None else x + other)


@pytest.mark.parametrize("batch_size", [1, 4, N, 2 * N])
def test_arguments_without_rows_go_into_every_piece(batch_size):
    bnn, x = make(Signed()), inputs()
    for arguments in ((x, -1, "on"), (x, torch.tensor(-1.0).double(), "on", x), (x, 2, "on", None)):
        whole = seeded(bnn.predict, *arguments, num_predictions=S)
        found = seeded(bnn.predict, *arguments, num_predictions=S, batch_size=batch_size)
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-14)


def test_inputs_without_one_number_of_rows_are_not_cut():
    bnn, x = make(Signed()), inputs()
    with pytest.raises(ValueError, match="the inputs have 10 and 11 rows; batch_size cuts"):
        bnn.predict(x, 1, "on", x[1:], batch_size=4)
    with pytest.raises(ValueError, match="the inputs have no rows"):
        bnn.predict(1, batch_size=4)


def test_samples_of_gaussian_outputs_are_others_for_other_batch_sizes():
    """As documented: each row has samples of its own, so they agree within their error."""
    bnn, x = make(likelihood=Categorical(N)), inputs()
    count = 4_000
    options = {"predictive": "glm", "num_predictions": count}
    whole = seeded(bnn.predict, x, **options).exp()
    pieces = seeded(bnn.predict, x, batch_size=4, **options).exp()
    outputs = bnn.predict(x, aggregate=False, **options)
    error = outputs.softmax(-1).std(0) * math.sqrt(2 / count)
    assert not torch.equal(whole, pieces)
    assert bool(((whole - pieces).abs() <= 6 * error).all())
    for link in ("probit", "bridge"):
        found = bnn.predict(x, predictive="glm", link=link, batch_size=4)
        torch.testing.assert_close(found, bnn.predict(x, predictive="glm", link=link))
