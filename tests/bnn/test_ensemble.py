"""Ensembles: mixtures by hand, seeds and resuming, state, kinds of members, errors."""

import copy
import functools
import warnings

import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tyxe
from tests.oracles.bnns import NORMAL, NOTHING, mean_field, mlp
from tests.oracles.nets import NetOf
from tyxe.likelihoods import Bernoulli, Categorical, HomoskedasticGaussian, Ordinal, Poisson
from tyxe.likelihoods import HeteroskedasticGaussian as Heteroskedastic

N = 24
X = torch.randn(N, 2, generator=torch.Generator().manual_seed(0))
SUMS = X.sum(-1, keepdim=True)
ADAM = functools.partial(torch.optim.Adam, lr=1e-2)
LIKELIHOODS = {
    "categorical": (Categorical(N), 3, torch.arange(N) % 3),
    "probabilities": (Categorical(N, logit_predictions=False), 3, torch.arange(N) % 3),
    "bernoulli": (Bernoulli(N, event_dim=1), 1, (torch.arange(N) % 2)[:, None].float()),
    "poisson": (Poisson(N, event_dim=1), 1, (torch.arange(N) % 4)[:, None].float()),
    "gaussian": (HomoskedasticGaussian(N, scale=0.3), 1, SUMS),
    "learnt noise": (HomoskedasticGaussian(N, scale=0.3, learn_scale=True), 1, SUMS),
    "heteroskedastic": (Heteroskedastic(N), 2, SUMS),
}


BATCH = [(X, torch.arange(N) % 3)]


def net_for(likelihood, outputs):
    ends = [] if getattr(likelihood, "logit_predictions", True) else [nn.Softmax(-1)]
    return mlp(2, 4, outputs).extend(ends)


KINDS = {
    "ml": lambda *parts: tyxe.VariationalBNN(parts[0], NOTHING, parts[1]),
    "map": lambda *parts: tyxe.VariationalBNN(parts[0], NORMAL, parts[1], AutoDelta),
    "mean field": mean_field,
    "swag": lambda *parts: tyxe.SWAG_BNN(parts[0], NORMAL, parts[1], rank=2),
    "laplace": lambda *parts: tyxe.LaplaceBNN(parts[0], NORMAL, parts[1]),
}


def make(kind, name="categorical"):
    likelihood, outputs, _ = LIKELIHOODS[name]
    return KINDS[kind](net_for(likelihood, outputs), likelihood)


def new(kind="mean field", name="categorical", count=2, **options):
    torch.manual_seed(0)
    return tyxe.EnsembleBNN(lambda _: make(kind, name), count, **options)


def loader(name="categorical"):
    return DataLoader(TensorDataset(X, LIKELIHOODS[name][2]), 7, shuffle=True)


def ensemble_of(kind, name="categorical", count=2, **options):
    ensemble = new(kind, name, count, **options)
    ensemble.fit(loader(name), ADAM, 3, **({"start": 0.0} if kind == "swag" else {}))
    return ensemble, LIKELIHOODS[name][2]


@pytest.mark.parametrize("kind", ["ml", "map", "mean field", "laplace", "swag"])
def test_an_ensemble_of_one_is_the_member(kind):
    ensemble, y = ensemble_of(kind, count=1)
    (member,) = ensemble.members
    for call in (
        lambda bnn: bnn.predict(X, num_predictions=4),
        lambda bnn: bnn.predict(X, num_predictions=4, batch_size=5),
        lambda bnn: bnn.predict(X, num_predictions=3, aggregate=False),
        lambda bnn: bnn.evaluate(X, y, num_predictions=4)[1],
        lambda bnn: bnn.evaluate([(X[:9], y[:9]), (X[9:], y[9:])], num_predictions=4)[0],
        lambda bnn: bnn.sample_predictive(X, num_samples=6),
    ):
        torch.manual_seed(3)
        expected = call(member)
        torch.manual_seed(3)
        torch.testing.assert_close(call(ensemble), expected)


@pytest.mark.parametrize("weights", [None, [3.0, 1.0]])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_two_members_are_their_mixture(name, weights):
    ensemble, y = ensemble_of("ml", name, weights=weights)
    w = torch.tensor([0.5, 0.5] if weights is None else [0.75, 0.25])
    likelihoods = [member.likelihood for member in ensemble.members]
    with torch.no_grad():
        outputs = [member.net(X) for member in ensemble.members]
    each = [lik.predictive_distribution(f) for lik, f in zip(likelihoods, outputs, strict=True)]
    logs = [lik.log_likelihood(f, y) for lik, f in zip(likelihoods, outputs, strict=True)]
    expected = (torch.stack(logs).exp() * w[:, None]).sum(0).log()
    error, log_likelihood = ensemble.evaluate(X, y, reduction="none")
    torch.testing.assert_close(log_likelihood, expected)
    found = ensemble.predict(X)
    mean = sum(s * d.mean for s, d in zip(w, each, strict=True)) if name != "categorical" else None
    if name in ("gaussian", "learnt noise", "heteroskedastic"):
        second = sum(s * (d.variance + d.mean**2) for s, d in zip(w, each, strict=True))
        if name == "heteroskedastic":
            found = found[..., :1], nn.functional.softplus(found[..., 1:])
        torch.testing.assert_close(found[0], mean)
        torch.testing.assert_close(found[1], (second - mean**2).sqrt())
        torch.testing.assert_close(error, (mean - y).square().sum(-1))
    elif name in ("categorical", "probabilities"):
        probs = sum(s * d.probs for s, d in zip(w, each, strict=True))
        torch.testing.assert_close(found.softmax(-1) if name == "categorical" else found, probs)
        torch.testing.assert_close(error.long(), (probs.argmax(-1) != y).long())
    else:
        like = found.sigmoid() if name == "bernoulli" else found.exp()
        torch.testing.assert_close(like, mean)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_each_member_with_gaussian_outputs_has_a_row_of_scores(reduction):
    ensemble, y = ensemble_of("laplace", "gaussian")
    w = 0.5 + torch.rand(N)
    found = ensemble.evaluate([(X, y, w)], aggregate=False, reduction=reduction)
    each = [member.evaluate([(X, y, w)], reduction=reduction) for member in ensemble.members]
    for scores, expected in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(scores, torch.stack(expected))


@pytest.mark.parametrize("weights", [None, [3.0, 1.0]])
def test_draws_of_each_member_are_scored_by_its_own_cut_points(weights):
    cuts = torch.tensor([[-1.0, 1.0], [-1.0, 3.0]])

    def member(index):
        likelihood = Ordinal(N, 3, cut_points=cuts[index])
        return tyxe.VariationalBNN(nn.Linear(2, 1), NOTHING, likelihood)

    ensemble = tyxe.EnsembleBNN(member, 2, weights=weights)
    each = torch.stack([m.predict(X, num_predictions=0).softmax(-1) for m in ensemble.members])
    w = ensemble.draw_weights(2)
    expected = tyxe.predictive.entropy_decomposition(each, w)
    torch.testing.assert_close(ensemble.ood_score(X), expected.mutual_information)
    torch.testing.assert_close(ensemble.ood_score(X, "predictive_entropy"), expected.total)


def test_samples_are_spread_by_weights():
    ensemble, _ = ensemble_of("ml", "gaussian", weights=[4, 1])
    samples = ensemble.sample_predictive(X, num_samples=500)
    with torch.no_grad():
        means = [member.net(X) for member in ensemble.members]
    assert samples.shape == (500, N, 1)
    for part, mean in zip(samples.split([400, 100]), means, strict=True):
        assert bool(((part.mean(0) - mean).abs() < 5 * 0.3 / len(part) ** 0.5).all())
    lower, upper = ensemble.interval(X, level=0.5)
    assert bool((lower < upper).all())


def test_chains_are_members_without_samples_after_an_error():
    kernel = tyxe.samplers.SGLD(lr=1e-3)

    def member(_):
        return tyxe.MCMC_BNN(mlp(2, 4, 3), NORMAL, Categorical(N), kernel)

    class Stops(list):
        def __iter__(self):
            yield from self[:8]
            raise KeyboardInterrupt

    ensemble = tyxe.EnsembleBNN(member, 2)
    with pytest.raises(KeyboardInterrupt), pytest.warns(tyxe.TyxeWarning, match="keeps"):
        ensemble.fit(Stops(BATCH * 20), 12, warmup_steps=4)
    assert not len(ensemble.members[0].samples)
    fitted = tyxe.EnsembleBNN(member, 2)
    fitted.fit(BATCH, 4, warmup_steps=4)
    assert fitted.predict(X, num_predictions=4, aggregate=False).shape == (8, N, 3)
    state = fitted.state_dict()
    bad = {name: v for name, v in state.items() if not name.startswith("members.1.samples.net.0")}
    with pytest.raises(RuntimeError, match="left as it was"):
        ensemble.load_state_dict(bad)
    assert not any(len(one.samples) for one in ensemble.members)


@pytest.mark.parametrize("weights", [[1, 2, 3, 1, 1, 1], [0.3, 0.3, 0.1, 0.7, 0.2, 0.9]])
def test_a_loaded_ensemble_has_the_saved_weights(weights):
    saved, loaded = new(count=6, weights=weights), new(count=6, weights=[1] * 6)
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(loaded.weights, saved.weights)


@pytest.mark.parametrize("weights", [None, [0.9, 0.1]])
@pytest.mark.parametrize("name", ["categorical", "learnt noise"])
def test_to_ensemble_is_a_plain_module(name, weights):
    ensemble, _ = ensemble_of("ml", name, weights=weights)
    module = ensemble.to_ensemble(1)
    torch.testing.assert_close(module(X), ensemble.predict(X))
    program = torch.export.export(module, (X,))
    torch.testing.assert_close(program.module()(X), ensemble.predict(X))


def test_a_prior_of_each_member_and_of_none_after_an_error():
    ensemble, _ = ensemble_of("mean field")

    def posterior(member):
        return tyxe.priors.DictPrior(member.net_guide.get_detached_distributions())

    ensemble.update_prior(posterior)
    for member in ensemble.members:
        loc = dict(member.net_prior.priors())["0.weight"].base_dist.loc
        torch.testing.assert_close(loc, member.net_guide.get_loc("0.weight").detach())
    before = [member.prior for member in ensemble.members]

    def wrong(member):
        return NORMAL if member is ensemble.members[0] else tyxe.priors.DictPrior({})

    with pytest.raises(ValueError, match=r"0\.weight|site"):
        ensemble.update_prior(wrong)
    assert [member.prior for member in ensemble.members] == before


@pytest.mark.parametrize("saved", [False, True])
def test_an_interrupted_fit_goes_on_by_members(saved, tmp_path):
    whole = new(count=3)
    assert len(whole.fit(loader(), ADAM, 5)) == 3
    ensemble, data = new(count=3), loader()
    start = copy.deepcopy(ensemble.members[1].state_dict())

    def stop(bnn, epoch, loss):
        if bnn is ensemble.members[1] and epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensemble.fit(data, ADAM, 5, callback=stop)
    torch.testing.assert_close(ensemble.members[1].state_dict(), start)
    torch.randn(7)
    if saved:
        ensemble.save(tmp_path / "ensemble.tyxe", training=True)
        ensemble = new(count=3)
        ensemble.load(tmp_path / "ensemble.tyxe")
    assert len(ensemble.fit(data, ADAM, 5, resume=True)) == 2
    torch.testing.assert_close(ensemble.state_dict(), whole.state_dict(), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="no fit to resume"):
        ensemble.fit(data, ADAM, 1, resume=True)


def test_each_member_has_a_seed_of_its_own_and_the_callers_stream_goes_on():
    following, done = [], []
    for epochs in (1, 3):
        ensemble = new()
        ensemble.fit(BATCH, ADAM, epochs)
        following.append(torch.rand(()))
    assert following[0] == following[1]
    ensemble.fit(BATCH, ADAM, 1, member_callback=lambda e, i: done.append((e, i)))
    assert done == [(ensemble, 0), (ensemble, 1)]


def test_one_bar_that_names_the_member(capsys):
    new("ml").fit(BATCH, ADAM, 1, progress=True)
    shown = capsys.readouterr().err
    assert "member 1/2 fit" in shown
    assert "member 2/2 fit" in shown
    assert "\n" not in shown  # in the place of one bar


def test_a_state_that_does_not_fit_changes_nothing():
    ensemble, _ = ensemble_of("mean field", weights=[1, 2])
    expected = ensemble.predict(X, num_predictions=0)
    fresh = new(weights=[1, 1])
    before = copy.deepcopy(fresh.state_dict())
    state = ensemble.state_dict()
    name = next(k for k in state if k.startswith("members.1.net_guide.locs"))
    values = [state[name] + torch.nan, state[name] + torch.inf, torch.zeros(7)]
    weights = [torch.tensor(w) for w in ([-1.0, 2.0], [0.0, torch.nan], [1.0] * 7)]
    bad = [{**state, name: value} for value in values]
    for one in (*bad, *({**state, "weights": each} for each in weights), {}):
        with pytest.raises(RuntimeError):
            fresh.load_state_dict(one)
        torch.testing.assert_close(fresh.state_dict(), before, rtol=0, atol=0)
    for checkpoint in (state, [1]):
        with pytest.raises(RuntimeError, match="no checkpoint of an ensemble"):
            fresh.load_checkpoint(checkpoint)
    with pytest.raises(ValueError, match="num_epochs"):
        fresh.fit(BATCH, ADAM, -1)
    with pytest.raises(RuntimeError, match="no fit to resume"):
        fresh.fit(BATCH, ADAM, 1, resume=True)
    fresh.load_state_dict(state)
    torch.testing.assert_close(fresh.predict(X, num_predictions=0), expected)
    assert ensemble.double().predict(X.double(), num_predictions=0).dtype == torch.float64


def test_members_that_are_one():
    one, other = make("ml"), make("ml")
    with pytest.raises(ValueError, match=r"members 0 and 1 share '.*': make_member has to make"):
        tyxe.EnsembleBNN(lambda _: one, 2)
    other.net[0].weight = one.net[0].weight
    with pytest.raises(ValueError, match=r"members 0 and 1 share 'net\.0\.weight'"):
        tyxe.EnsembleBNN(lambda i: (one, other)[i], 2)
    for bnn in (one, other):  # a frozen body may be one
        bnn.net[0].requires_grad_(False)
    other.net[0].bias = one.net[0].bias
    assert len(tyxe.EnsembleBNN(lambda i: (one, other)[i], 2).members) == 2


BAD = [
    (lambda i: make("ml"), 0, {}, ValueError, "num_members is 0"),
    (lambda i: make("ml"), 2, {"weights": [1.0]}, ValueError, r"weights has shape \(1,\)"),
    (lambda i: make("ml"), 2, {"weights": [1.0, -1.0]}, ValueError, "weights ranges from -1 to 1"),
    (lambda i: make("ml"), 2, {"weights": [0.0, 0.0]}, ValueError, "the sum of weights is 0"),
    (make("ml"), 2, {}, TypeError, r"make_member is a VariationalBNN.*lambda index"),
    (lambda i: nn.Linear(2, 1), 2, {}, TypeError, r"make_member made .*Linear"),
    *(
        (lambda i, kinds=kinds: make("ml", kinds[i]), 2, {}, ValueError, "several kinds")
        for kinds in (["gaussian", "poisson"], ["categorical", "probabilities"])
    ),
]


@pytest.mark.parametrize(("make_member", "count", "options", "error", "message"), BAD)
def test_bad_arguments(make_member, count, options, error, message):
    with pytest.raises(error, match=message):
        tyxe.EnsembleBNN(make_member, count, **options)


def test_lists_of_inputs_in_batches_are_arguments():
    def member(_):
        net = NetOf(lambda self, one, other: self.layer(one + 2 * other), layer=nn.Linear(2, 3))
        return tyxe.VariationalBNN(net, NOTHING, Categorical(N))

    ensemble = tyxe.EnsembleBNN(member, 2)
    batches = [([X, X], torch.arange(N) % 3)]  # as DataLoader collates them
    assert ensemble.predict(batches).shape == (N, 3)
    assert ensemble.predict(batches, aggregate=False).shape == (2, N, 3)
    assert ensemble.sample_predictive(batches, num_samples=4).shape == (4, N)
    torch.testing.assert_close(ensemble.predict(batches), ensemble.predict(X, X))
    torch.testing.assert_close(ensemble.evaluate(batches), ensemble.evaluate((X, X), batches[0][1]))


def test_few_samples_are_of_every_member_at_times():
    ensemble, _ = ensemble_of("ml", count=5)
    asked = []
    for index, member in enumerate(ensemble.members):
        member.sample_predictive = lambda x, num_samples, index=index: (
            asked.append(index) or torch.zeros(num_samples, len(x))
        )
    for _ in range(400):
        assert ensemble.sample_predictive(X, num_samples=2).shape == (2, N)
    counts = torch.tensor(asked).bincount(minlength=5) / 800
    assert (counts - 0.2).abs().max() < 4 * (0.2 * 0.8 / 400) ** 0.5


def test_members_that_start_alike_are_told_of_but_chains():
    net, parts = nn.Linear(2, 3), (NORMAL, Categorical(N))
    with pytest.warns(tyxe.TyxeWarning, match="reset_parameters_"):
        tyxe.EnsembleBNN(lambda _: tyxe.VariationalBNN(net, *parts, AutoDelta), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tyxe.EnsembleBNN(lambda _: tyxe.MCMC_BNN(net, *parts, tyxe.samplers.NUTS), 2)


def test_members_that_are_not_fitted_are_told_of():
    def stop(ensemble, index):
        raise KeyboardInterrupt

    ensemble, y = ensemble_of("ml", count=3)
    ensemble.predict(X)
    with pytest.raises(KeyboardInterrupt):
        ensemble.fit([(X, y)], ADAM, 1, member_callback=stop)
    for call in (ensemble.predict, ensemble.sample_predictive, lambda x: ensemble.evaluate(x, y)):
        with pytest.warns(tyxe.TyxeWarning, match=r"members \[1, 2\] are not fitted"):
            call(X)
    ensemble.fit([(X, y)], ADAM, 1, resume=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ensemble.predict(X)
