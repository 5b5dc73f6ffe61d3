"""tyxe.diagnostics.sbc: uniform for exact posteriors, not for others; its own law; resuming."""

import math
from functools import partial

import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from torch import nn

import tyxe
from tests.oracles.bnns import NORMAL
from tyxe import files
from tyxe.bnn.predict import SupervisedBNN
from tyxe.curvature.output_covariance import covariance_through
from tyxe.diagnostics import SBC, sbc
from tyxe.linalg import Dense

N, NOISE = 8, 0.5
X = torch.linspace(-1, 1, N, dtype=torch.float64)[:, None]


def precision_and_mode(x, y):
    design = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    precision = design.T @ design / NOISE**2 + torch.eye(2, dtype=x.dtype)
    return precision, torch.linalg.solve(precision, design.T @ y / NOISE**2)[:, 0]


class Conjugate(SupervisedBNN):
    """A linear regression with its exact posterior, or one whose variance is off by a factor."""

    factor = 1.0

    def learn(self, data):
        ((x, y),) = data
        precision, mean = precision_and_mode(x, y)
        covariance = self.factor * precision.inverse()
        self.posterior = torch.distributions.MultivariateNormal(mean, covariance)

    def _draws(self, num_predictions):
        for w in self.posterior.sample((num_predictions,)):
            yield {"net.weight": w[:1, None], "net.bias": w[1:]}

    def _one_draw(self):
        return next(self._draws(1))

    def _mean_values(self):
        w = self.posterior.mean
        return {"net.weight": w[:1, None], "net.bias": w[1:]}

    def _gaussian_predictives(self):
        return {"glm": self._glm, "gp": self._glm}

    def _glm(self, inputs):
        linear = self._linearize(inputs)
        covariance = Dense(self.posterior.covariance_matrix)
        return linear.outputs.detach(), covariance_through(linear, covariance)

    def _follow_prior(self, priors):
        pass


def make(prior=NORMAL, factor=1.0):
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(N, scale=NOISE)
    bnn = Conjugate(nn.Linear(1, 1).double(), prior, likelihood)
    bnn.factor = factor
    return bnn


def learn(bnn, data):
    bnn.learn(data)


def at_the_end(outputs, targets):
    return outputs[-1, 0]


FUNCTIONS = {"f(1)": at_the_end}


# --- is the posterior right ---------------------------------------------------------------------


def test_an_exact_posterior_has_uniform_ranks():
    found = sbc(make, learn, X, FUNCTIONS, 200, num_draws=49)
    assert found.ranks.keys() == {"f(1)", "log likelihood"}
    for ranks in found.ranks.values():
        assert ranks.shape == (200,)
        assert ranks.min() >= 0
        assert ranks.max() <= 49
    assert min(found.p_values().values()) > 0.05


def test_functions_of_several_points_take_joint_draws_of_the_linearised_net():
    of_all = {"square": lambda f, y: f.square().mean()}
    found = sbc(make, learn, X, of_all, 100, num_draws=29, predictive="glm", progress=False)
    assert min(found.p_values().values()) > 0.05
    with pytest.raises(ValueError, match="outputs of each point alone"):
        sbc(make, learn, X, of_all, 1, predictive="gp")


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_variance_that_is_off_by_two_is_found(factor):
    found = sbc(partial(make, factor=factor), learn, X, FUNCTIONS, 300, num_draws=49)
    p_values = found.p_values()
    assert min(p_values.values()) < 1e-3
    assert p_values["log likelihood"] < 0.01


# --- its own law --------------------------------------------------------------------------------


def uniform(size, draws, seed):
    generator = torch.Generator().manual_seed(seed)
    return {"f": torch.randint(draws + 1, (size,), generator=generator)}


def test_p_values_of_uniform_ranks_are_uniform():
    p_values = [SBC(uniform(50, 9, seed), 9).p_values()["f"] for seed in range(200)]
    assert stats.binom.interval(0.999, 200, 0.1)[1] >= sum(p <= 0.1 for p in p_values)
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3


def test_bands_hold_all_shares_at_once_as_p_values_say():
    inside = 0
    for seed in range(300):
        found = SBC(uniform(100, 19, seed), 19)
        levels, low, high = found.band(0.9)
        shares = torch.tensor([(found.ranks["f"] < k).double().mean() for k in range(1, 20)])
        assert levels.tolist() == pytest.approx([k / 20 for k in range(1, 20)])
        is_inside = bool(((low <= shares) & (shares <= high)).all())
        p_value = found.p_values()["f"]
        assert is_inside == (p_value > 0.1) or abs(p_value - 0.1) < 0.03
        inside += is_inside
    lowest, highest = stats.binom.interval(0.999, 300, 0.9)
    assert lowest <= inside <= highest


def test_ties_are_broken_by_chance():
    found = sbc(make, learn, X, {"constant": lambda f, y: torch.zeros(())}, 100, num_draws=9)
    assert found.p_values()["constant"] > 0.01


def test_the_figure_has_a_line_for_each_function():
    pytest.importorskip("matplotlib", reason="the extra 'plot'")
    ax = SBC(uniform(60, 9, 0) | {"g": torch.zeros(60, dtype=torch.long)}, 9).plot()
    labels = [line.get_label() for line in ax.lines]
    assert labels[1] == "g (p = 0)"
    assert labels[0].startswith("f (p = ")


# --- running it ---------------------------------------------------------------------------------


def test_workers_and_files_change_nothing(tmp_path):
    one = sbc(make, learn, X, FUNCTIONS, 6, num_draws=9)
    two = sbc(make, learn, X, FUNCTIONS, 6, num_draws=9, num_workers=2, path=tmp_path / "ranks")
    assert {n: r.tolist() for n, r in one.ranks.items()} == {
        n: r.tolist() for n, r in two.ranks.items()
    }

    def refuse(bnn, data):
        raise AssertionError("it is there already")

    again = sbc(make, refuse, X, FUNCTIONS, 4, num_draws=9, path=tmp_path / "ranks")
    assert again.ranks["f(1)"].tolist() == one.ranks["f(1)"][:4].tolist()
    more = sbc(make, learn, X, FUNCTIONS, 8, num_draws=9, path=tmp_path / "ranks")
    assert more.ranks["f(1)"][:6].tolist() == one.ranks["f(1)"].tolist()
    with pytest.raises(ValueError, match=r"no ranks of these settings \(num_draws, predictive\)"):
        sbc(make, learn, X, FUNCTIONS, 4, num_draws=19, predictive="glm", path=tmp_path / "ranks")


def test_generators_stay_as_they_are():
    state = torch.get_rng_state()
    sbc(make, learn, X, FUNCTIONS, 2, num_draws=3)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_has_no_prior_to_draw_from():
    def nothing():
        return make(tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0), hide_all=True))

    with pytest.raises(ValueError, match="exposes no parameters"):
        sbc(nothing, learn, X, FUNCTIONS, 1)
    with pytest.raises(ValueError, match="choose another name"):
        sbc(make, learn, X, {"log likelihood": at_the_end}, 1)
    with pytest.raises(ValueError, match="num_simulations"):
        sbc(make, learn, X, FUNCTIONS, 0)


# Chains this short are no good, but have draws.
@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_inferred_noise_is_ranked_with_its_own_draws():
    """True and drawn variables of a likelihood go into the log-likelihood."""
    noise = dist.LogNormal(torch.tensor(-1.0), torch.tensor(0.3))

    def build():
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(N, scale=noise)
        return tyxe.MCMC_BNN(nn.Linear(1, 1), NORMAL, likelihood, tyxe.samplers.NUTS)

    def chains(bnn, data):
        bnn.fit(data, 30, warmup_steps=30, progress=False)

    found = sbc(build, chains, X.float(), FUNCTIONS, 2, num_draws=9)
    assert all(math.isfinite(p) for p in found.p_values().values())


@pytest.mark.parametrize("found", [3, {}, {"ranks": 3}])
def test_a_file_without_ranks_says_so(found, tmp_path):
    files.write(tmp_path / "file", found)
    with pytest.raises(ValueError, match=r"has (no )?ranks.*: take another file"):
        sbc(make, learn, X, FUNCTIONS, 2, num_draws=9, path=tmp_path / "file")
