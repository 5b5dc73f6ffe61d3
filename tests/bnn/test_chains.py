"""Chains of tyxe's own samplers: exact posteriors, starts, interrupts, and what they tell."""

import copy
import functools
import math
import signal
from pathlib import Path

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from torch import nn

import tyxe
from tests.oracles.chains import NOISE, PRIOR, N, data
from tyxe.likelihoods import Bernoulli, HomoskedasticGaussian
from tyxe.samplers import HMC, MCLMC, NUTS, Run, warm_start

# Short runs get advice, which the tests of advice look at.
pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
KERNELS = {
    "HMC": HMC(num_steps=5),
    "NUTS": NUTS(),
    "MCLMC": MCLMC(energy_variance=5e-5, step_size=0.1),
}
ORACLES = Path(__file__).parents[1] / "oracles"


def make(kernel=None, net=None, likelihood=None, prior=PRIOR):
    kernel = HMC(num_steps=3) if kernel is None else kernel
    likelihood = likelihood or HomoskedasticGaussian(N, scale=NOISE)
    return tyxe.MCMC_BNN(net or nn.Linear(1, 1), prior, likelihood, kernel).double()


def standard_errors(values: torch.Tensor) -> torch.Tensor:
    """The Monte-Carlo standard errors of the means of `(chains, samples, ...)`, by batches."""
    parts = values.unflatten(1, (10, -1)).mean(2).flatten(0, 1)
    return parts.std(0) / math.sqrt(len(parts))


def assert_moments(samples: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> None:
    for found, expected in ((samples, mean), ((samples - mean).square(), variance)):
        error = (found.mean((0, 1)) - expected).abs()
        assert bool((error < 4 * standard_errors(found)).all()), (error, standard_errors(found))


@pytest.mark.parametrize("name", KERNELS)
def test_moments_of_a_conjugate_regression(name: str) -> None:
    x, y = data()
    design = torch.cat([torch.ones_like(x), x], 1)
    precision = design.T @ design / NOISE**2 + torch.eye(2).double() / 1.5**2
    covariance = precision.inverse()
    mean = (covariance @ design.T @ y / NOISE**2)[:, 0]
    bnn = make(KERNELS[name])
    count = 20_000 if name == "MCLMC" else 2_000
    bnn.fit([(x, y)], count, warmup_steps=2_000 if name == "MCLMC" else 300, compile=True)
    samples = torch.cat([bnn.samples["net.bias"], bnn.samples["net.weight"][..., 0]], -1)
    assert samples.shape == (4, count, 2)
    assert_moments(samples, mean, covariance.diagonal())


def quadrature(x: torch.Tensor, y: torch.Tensor, sigma: torch.Tensor) -> list[torch.Tensor]:
    """Moments under `beta ~ N(0, 10^2)`, `sigma ~ HalfNormal(10)`, by a sum over `sigma`."""
    n, d = x.shape
    logs, means, variances = [], [], []
    for s in sigma:
        precision = x.T @ x / s**2 + torch.eye(d).double() / 100
        covariance = precision.inverse()
        mean = (covariance @ x.T @ y / s**2)[:, 0]
        marginal = -n * s.log() - 0.5 * precision.logdet() - 0.5 * d * math.log(100)
        marginal = marginal - 0.5 * (y.square().sum() / s**2 - mean @ precision @ mean)
        logs.append(marginal - s**2 / 200)
        means.append(torch.cat([mean, s[None]]))
        variances.append(torch.cat([covariance.diagonal(), s[None] * 0]))
    weights = torch.stack(logs).softmax(0)[:, None]
    mean = (weights * torch.stack(means)).sum(0)
    spread = (torch.stack(means) - mean).square() + torch.stack(variances)
    return [mean, (weights * spread).sum(0)]


@pytest.mark.parametrize("inferred", [True, False])
@pytest.mark.parametrize("name", ["sblrc", "sblri"])
def test_moments_of_posteriordbs_regressions(name: str, inferred: bool) -> None:
    given = np.load(ORACLES / f"{name}.npz")
    x, y = (torch.from_numpy(given[key]) for key in ("X", "y"))
    grid = torch.linspace(0.6, 1.6, 1001).double() if inferred else torch.ones(1).double()
    mean, variance = quadrature(x, y, grid)
    likelihood = HomoskedasticGaussian(100, scale=dist.HalfNormal(10.0) if inferred else 1.0)
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 10))
    bnn = make(NUTS(), nn.Linear(5, 1, bias=False), likelihood, prior)
    run = bnn.fit([(x, y)], 2_000, warmup_steps=1_000, compile=True)
    assert not run.statistics["diverged"].any()
    samples = [bnn.samples["net.weight"][:, :, 0]]
    if inferred:
        (scale,) = (value for site, value in bnn.samples.items() if site != "net.weight")
        samples.append(scale[..., None])
    found = torch.cat(samples, -1)
    assert_moments(found, mean[: found.shape[-1]], variance[: found.shape[-1]])


def test_moments_of_a_logistic_regression() -> None:
    x = torch.tensor([-1.0, -0.5, 0.2, 0.6, 1.0, 1.5]).double()[:, None]
    y = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 1.0]).double()[:, None]
    axis = torch.linspace(-9, 9, 401).double()
    w, b = torch.meshgrid(axis, axis, indexing="ij")
    logits = w[..., None] * x[:, 0] + b[..., None]
    log_joint = dist.Bernoulli(logits=logits).log_prob(y[:, 0]).sum(-1)
    log_joint = log_joint + dist.Normal(0.0, 1.5).log_prob(torch.stack([w, b])).sum(0)
    weights = log_joint.flatten().softmax(0)
    points = torch.stack([w.flatten(), b.flatten()], -1)
    mean = weights @ points
    variance = weights @ (points - mean).square()
    bnn = make(NUTS(), likelihood=Bernoulli(len(x), event_dim=1))
    bnn.fit([(x, y)], 2_000, warmup_steps=300, compile=True)
    samples = torch.cat([bnn.samples["net.weight"][..., 0], bnn.samples["net.bias"]], -1)
    assert_moments(samples, mean, variance)


# --- starts -------------------------------------------------------------------------------------


def starts(bnn, **options) -> torch.Tensor:
    return bnn.fit([data()], 1, warmup_steps=0, compile=False, **options).run.starts


def test_chains_start_where_they_are_told() -> None:
    bnn = make()
    weight, bias = (p.item() for p in bnn.net.parameters())
    at_net = starts(bnn, init="net", num_chains=2)
    assert at_net.tolist() == [[bias, weight]] * 2
    assert starts(bnn).shape == (4, 2)
    given = {"net.weight": torch.randn(3, 1, 1), "net.bias": torch.randn(3, 1)}
    found = starts(bnn, init=given)
    expected = torch.cat([given["net.bias"], given["net.weight"][..., 0]], -1)
    torch.testing.assert_close(found, expected.double())
    guided = tyxe.VariationalBNN(
        nn.Linear(1, 1).double(), PRIOR, HomoskedasticGaussian(N, scale=NOISE), AutoDelta
    )
    values = torch.cat([v.flatten() for _, v in sorted(guided.mean_values().items())])
    assert starts(bnn, init=guided, num_chains=2).tolist() == [values.tolist()] * 2


def test_starts_at_the_prior_have_its_law() -> None:
    found = starts(make(), num_chains=2_000)
    assert abs(float(found.mean())) < 4 * 1.5 / math.sqrt(4_000)
    assert abs(float(found.std()) - 1.5) < 4 * 1.5 / math.sqrt(8_000)


def test_members_of_a_warm_start_are_trained_from_seeds_of_their_own() -> None:
    x, y = data()
    bnn = make(MCLMC(), nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))
    before = [p.clone() for p in bnn.net.parameters()]
    init = warm_start(
        functools.partial(torch.optim.AdamW, lr=0.03), 300, batch_size=4, validation=0
    )
    run = bnn.fit([(x, y)], 1, warmup_steps=0, num_chains=3, init=init, compile=False)
    found = run.run.starts
    assert len({tuple(row.tolist()) for row in found}) == 3
    design = torch.cat([x, torch.ones_like(x)], 1)
    line = (design @ torch.linalg.lstsq(design, y).solution - y).square().mean()
    for row in found:
        fitted = bnn.run_net(run.potential.unflatten(row), x)
        assert float((fitted - y).square().mean()) < line
    assert all(torch.equal(a, b) for a, b in zip(before, bnn.net.parameters(), strict=True))


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * x


ONE = torch.zeros(2, 1)


@pytest.mark.parametrize(
    ("init", "num_chains", "message"),
    [
        (
            {"net.bias": ONE, "net.weight": ONE[..., None]},
            3,
            "there are 2 starts of 'net.bias' for 3",
        ),
        ({"net.bias": ONE}, None, "no values for net.weight"),
        ({"net.bias": ONE, "net.weight": ONE}, None, "'net.weight' has the shape"),
        ({"net.bias": ONE / 0, "net.weight": ONE[..., None]}, None, "'net.bias' is not finite"),
        ({"bias": ONE}, None, "bias"),
    ],
)
def test_bad_starts(init, num_chains, message) -> None:
    bnn = make()
    with pytest.raises(ValueError, match=message):
        starts(bnn, init=init, num_chains=num_chains)
    assert not len(bnn.samples)


def test_a_start_without_density_is_named() -> None:
    bnn = make(prior=tyxe.priors.IIDPrior(dist.HalfNormal(1.0)))
    with pytest.raises(ValueError, match=r"'net\.bias' is not finite, or not in"):
        starts(bnn, init={"net.bias": -torch.ones(2, 1), "net.weight": torch.ones(2, 1, 1)})
    with pytest.raises(TypeError, match="init is 3; expected"):
        starts(bnn, init=3)
    with pytest.raises(ValueError, match=r"module of 'gain' has no reset_parameters"):
        starts(make(net=Bare()), init=warm_start(torch.optim.Adam, 1))


# --- the run ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_an_interrupted_run_goes_on_exactly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"warmup_steps": 20, "num_chains": 2, "compile": False}
    torch.manual_seed(5)
    whole = make(KERNELS[name])
    whole.fit([data()], 30, **options)
    torch.manual_seed(5)
    bnn = make(KERNELS[name])
    bnn.net.load_state_dict(whole.net.state_dict())
    advance, calls = Run._advance, []

    def stops(self, *arguments):
        calls.append(1)
        if int(self.transitions.min()) == 35 and len(calls) < 10_000:
            calls.extend([1] * 10_000)
            signal.raise_signal(signal.SIGINT)
        return advance(self, *arguments)

    monkeypatch.setattr(Run, "_advance", stops)
    kept = pytest.warns(tyxe.TyxeWarning, match=r"keeps 1[5-9] samples of each of 2 chains")
    with kept, pytest.raises(KeyboardInterrupt):
        bnn.fit([data()], 30, **options)
    kept = bnn.samples["net.weight"].clone()
    assert torch.equal(kept, whole.samples["net.weight"][:, : kept.shape[1]])
    bnn.fit([data()], 30, resume=True)
    for site, value in whole.samples.items():
        assert torch.equal(bnn.samples[site], value)


def test_there_is_nothing_to_resume() -> None:
    with pytest.raises(RuntimeError, match="no run to resume"):
        make().fit([data()], 3, resume=True)


def test_samples_go_to_a_file_in_a_dtype(tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = make().fit([data()], 6, warmup_steps=5).get_samples(group_by_chain=True)
    torch.manual_seed(1)
    bnn = make()
    bnn.fit([data()], 6, warmup_steps=5, dtype=torch.float32, file=tmp_path / "samples")
    assert (tmp_path / "samples").stat().st_size == 4 * 6 * 2 * 4
    for site, value in expected.items():
        assert bnn.samples[site].dtype == torch.float32
        torch.testing.assert_close(bnn.samples[site], value.float())


def test_thinning_keeps_as_many() -> None:
    torch.manual_seed(1)
    bnn = make()
    all_ = copy.deepcopy(bnn)
    torch.manual_seed(2)
    bnn.fit([data()], 5, warmup_steps=4, thinning=3, compile=False)
    torch.manual_seed(2)
    all_.fit([data()], 15, warmup_steps=4, compile=False)
    assert torch.equal(bnn.samples["net.weight"], all_.samples["net.weight"][:, 2::3])


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (functools.partial(NUTS, stepsize=0.1), "stepsize.*options of NUTS are step_size"),
        (functools.partial(MCLMC, num_steps=3), "num_steps.*options of MCLMC are step_size"),
    ],
)
def test_misspelt_options_of_kernels(kernel, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make(kernel)


def test_options_that_fit_does_not_have() -> None:
    with pytest.raises(TypeError, match=r"no option thin for kernels of tyxe\.samplers"):
        make().fit([data()], 3, thin=2)
    with pytest.raises(ValueError, match="num_chains is 0"):
        make().fit([data()], 3, num_chains=0)


def test_warnings_name_the_remedy() -> None:
    with pytest.warns(tyxe.TyxeWarning, match="warmup_steps=3 is too short to adapt step sizes"):
        make(NUTS()).fit([data()], 3, warmup_steps=3)
    with pytest.warns(tyxe.TyxeWarning, match="100.0% of the transitions diverged"):
        make(HMC(step_size=50.0, adapt_step_size=False, adapt_mass_matrix=False)).fit(
            [data()], 3, warmup_steps=0
        )
    apart = {
        "net.weight": torch.tensor([-50.0, 50.0])[:, None, None],
        "net.bias": torch.tensor([[-50.0], [90.0]]),
    }
    frozen = HMC(step_size=1e-6, adapt_step_size=False, adapt_mass_matrix=False)
    with pytest.warns(tyxe.TyxeWarning, match="chains disagree: R-hat of the log joint"):
        make(frozen).fit([data()], 50, warmup_steps=0, init=apart)
    deep = NUTS(step_size=1e-4, adapt_step_size=False, adapt_mass_matrix=False, max_tree_depth=2)
    with pytest.warns(tyxe.TyxeWarning, match="100.0% of the trees have the full depth of 2"):
        make(deep).fit([data()], 3, warmup_steps=0)


def test_summaries_are_of_predictions() -> None:
    bnn = make(NUTS())
    run = bnn.fit([data()], 200, warmup_steps=150)
    assert run.potentials.shape == (4, 200)
    table = bnn.summary(torch.ones(3, 1).double())
    assert len(table) == 3
    assert float(table["r_hat"].max()) < 1.05
    assert {"ess_bulk", "ess_tail"} <= set(table.columns)
    assert len(bnn.summary()) == 2
    outputs = bnn.to_arviz(torch.ones(3, 1).double()).posterior["predictions"]
    assert outputs.shape == (4, 200, 3, 1)
    weight, bias = bnn.samples["net.weight"], bnn.samples["net.bias"]
    expected = (weight[..., 0] + bias)[:, :, None].expand(-1, -1, 3, -1)
    np.testing.assert_allclose(outputs.values, expected.numpy())


def test_copies_and_states_have_the_samples(tmp_path: Path) -> None:
    bnn = make()
    bnn.fit([data()], 4, warmup_steps=3)
    x = torch.ones(2, 1).double()
    expected = bnn.predict(x, num_predictions=4)[0]
    assert torch.equal(copy.deepcopy(bnn).predict(x, num_predictions=4)[0], expected)
    bnn.save(tmp_path / "bnn.tyxe")
    fresh = make()
    fresh.load(tmp_path / "bnn.tyxe")
    assert torch.equal(fresh.predict(x, num_predictions=4)[0], expected)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1)
        self.second = nn.Linear(1, 1)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_tied_weights_and_hidden_ones() -> None:
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_parameters=["bias"])
    bnn = make(net=Tied(), prior=prior)
    with pytest.warns(tyxe.TyxeWarning, match="MCMC does not fit first.bias, second.bias"):
        run = bnn.fit([data()], 3, warmup_steps=3)
    assert run.run.starts.shape == (4, 1)
    w = next(iter(bnn.samples.items()))[1][0, 0]
    first, second = bnn.net.first.bias.detach(), bnn.net.second.bias.detach()
    x = torch.ones(1, 1).double()
    expected = (x * w + first) * w + second
    found = bnn.predict(x, num_predictions=12, aggregate=False)[0]
    torch.testing.assert_close(found, expected.reshape(1, 1))
