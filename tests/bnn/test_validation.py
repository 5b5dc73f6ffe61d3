"""Held-out data are followed within a fit, which they may end."""

import functools

import pytest
import torch
from pyro.infer.autoguide import AutoIAFNormal
from torch import nn

import tyxe
from tests.oracles.bnns import NORMAL, mean_field, mlp
from tests.oracles.rejections import rejects

X = torch.linspace(-1, 1, 40)[:, None]
Y = torch.sin(3 * X)
HELD_OUT = [(X[::4] + 0.01, Y[::4]), (X[1::8], Y[1::8])]


LIKELIHOOD = tyxe.likelihoods.HomoskedasticGaussian(40, scale=0.1)


def make():
    torch.manual_seed(0)
    return mean_field(mlp(1, 20, 1), LIKELIHOOD)


def fit(bnn, num_epochs, lr=1e-2, **options):
    torch.manual_seed(1)
    return bnn.fit([(X, Y)], functools.partial(torch.optim.Adam, lr=lr), num_epochs, **options)


def score(bnn):
    total = 0.0
    for batch in HELD_OUT:
        torch.manual_seed(0)
        total += bnn.evaluate(*batch, num_predictions=8)[1].item()
    return total / sum(len(y) for _, y in HELD_OUT)


def test_the_curve_is_the_held_out_log_likelihood_per_point_after_each_epoch():
    bnn, scores = make(), []
    callback = lambda bnn, epoch, loss: scores.append(score(bnn))  # noqa: E731
    history = fit(bnn, 4, validation=HELD_OUT, restore_best=False, callback=callback)
    assert history.validation == pytest.approx(scores, rel=1e-6)


def binary():
    prior = tyxe.priors.IIDPrior(tyxe.distributions.SignedBernoulli(torch.tensor(0.0)))
    guide = functools.partial(tyxe.guides.AutoBernoulli, relaxed=0.5)
    return tyxe.VariationalBNN(mlp(1, 20, 1), prior, LIKELIHOOD, guide)


def flow():
    guide = functools.partial(AutoIAFNormal, hidden_dim=[4])
    return tyxe.VariationalBNN(nn.Linear(1, 1), NORMAL, LIKELIHOOD, guide)


def dropping():
    return tyxe.DropoutBNN(
        nn.Sequential(nn.Linear(1, 20), nn.Dropout(), nn.Linear(20, 1)), LIKELIHOOD
    )


@pytest.mark.parametrize("make", [binary, flow, dropping])
def test_what_has_a_spread_but_no_scales_is_judged_by_draws(make):
    bnn = make()
    history = fit(bnn, 2, validation=HELD_OUT, restore_best=False)
    assert history.validation[-1] == pytest.approx(score(bnn), rel=1e-6)
    assert tyxe.Trainable(bnn).num_predictions == 8


def test_looking_does_not_change_the_fit():
    plain, watched = make(), make()
    one, other = fit(plain, 6), fit(watched, 6, validation=HELD_OUT, restore_best=False)
    assert one.loss == other.loss
    assert one.validation == []
    torch.testing.assert_close(plain._mean_values(), watched._mean_values(), rtol=0, atol=0)


def test_a_fit_stops_after_epochs_without_gain_and_goes_back_to_the_best():
    def worse_later(bnn, epoch, loss):
        if epoch == 4:  # from here on away from the data
            for group in bnn.optimizer.param_groups:
                group["lr"], group["maximize"] = 0.1, True

    bnn = make()
    history = fit(bnn, 50, validation=HELD_OUT, patience=3, callback=worse_later)
    best = max(range(len(history.validation)), key=history.validation.__getitem__)
    assert len(history.loss) == best + 4 < 50
    assert score(bnn) == pytest.approx(history.validation[best], rel=1e-6)
    kept = make()
    fit(kept, 50, validation=HELD_OUT, patience=3, callback=worse_later, restore_best=False)
    assert score(kept) == pytest.approx(history.validation[-1], rel=1e-6)


def test_laplace_approximations_take_their_curvature_at_the_best_epoch():
    net = mlp(1, 20, 1)
    bnn, plain = (tyxe.LaplaceBNN(net, NORMAL, LIKELIHOOD) for _ in range(2))
    history = fit(bnn, 12, lr=0.3, validation=HELD_OUT)
    best = max(range(12), key=history.validation.__getitem__)
    fit(plain, best + 1, lr=0.3)
    torch.testing.assert_close(bnn._mean_values(), plain._mean_values())
    torch.testing.assert_close(bnn.state.precision().to_dense(), plain.state.precision().to_dense())


def test_held_out_batches_are_unpacked_and_weighted_as_the_others():
    def batch(rows, weights):
        return [{"x": X[rows], "y": Y[rows], "w": torch.tensor(weights)}]

    history = []
    for held_out in (
        batch([0, 1, 2, 3], [2.0, 1.0, 0.0, 1.0]),
        batch([0, 0, 1, 3], [1.0, 1.0, 1.0, 1.0]),
    ):
        torch.manual_seed(1)
        found = make().fit(
            batch(range(40), [1.0] * 40),
            torch.optim.Adam,
            2,
            unpack=lambda batch: (batch["x"], batch["y"], batch["w"]),
            validation=held_out,
        )
        history.append(found.validation)
    assert history[0] == pytest.approx(history[1], rel=1e-5)


def test_bad_arguments():
    with pytest.raises(ValueError, match="patience is for the log-likelihood of held-out data"):
        fit(make(), 2, patience=3)
    with pytest.raises(ValueError, match="patience is 0"):
        fit(make(), 2, validation=HELD_OUT, patience=0)
    with pytest.raises(ValueError, match="the loader is empty"):
        fit(make(), 2, validation=[])
    bnn = make()
    bad = {"callback": 16}, {"lr_multipliers": 3.0}, {"lr_multipliers": {"loc": "2"}}
    for options in (*bad, {"validation": 3}, {"validation": HELD_OUT, "restore_best": 2}):
        call = functools.partial(fit, bnn, 2, **options)
        rejects(bnn, TypeError, "; expected ", call, draws=True)
    with pytest.raises(TypeError, match="member_callback is"):
        tyxe.EnsembleBNN(lambda index: make(), 1).fit(
            [(X, Y)], torch.optim.Adam, 1, member_callback=3
        )


def test_snapshots_are_not_undone():
    torch.manual_seed(0)
    bnn = tyxe.SWAG_BNN(nn.Linear(1, 1), NORMAL, LIKELIHOOD, rank=2)
    with pytest.raises(ValueError, match="restore_best"):
        fit(bnn, 8, validation=HELD_OUT, restore_best=True)
    history = fit(bnn, 8, validation=HELD_OUT)
    assert len(history.validation) == 8
