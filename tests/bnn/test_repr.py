"""What `repr` says of a BNN: its parts, how much of it is random, and whether it is fitted."""

import copy
import functools

import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from torch import nn

import tyxe
from tests.oracles import bnns
from tests.oracles.bnns import ADAM, NORMAL, laplace, mean_field, plain
from tyxe.likelihoods import Bernoulli, Categorical, HomoskedasticGaussian, Joint

DATA = [(torch.ones(4, 2), torch.arange(4) % 3)]


def variational(index=0):
    return mean_field(nn.Linear(2, 3), Categorical(4))


def lines(bnn):
    pairs = [line.strip().split(": ", 1) for line in repr(bnn).splitlines()]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def test_parts_are_named_and_weights_counted():
    likelihood = HomoskedasticGaussian(7, scale=dist.Uniform(0.0, 1.0))
    net = nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 1))
    prior = tyxe.priors.LayerwiseNormalPrior("radford", expose_modules=[net[0]])
    normal = tyxe.guides.AutoNormal
    found = lines(tyxe.VariationalBNN(net, prior, likelihood, normal, normal))
    del found["(net)"]
    assert {n: part for n, part in found.items() if not n.startswith("(")} == {
        "prior": "LayerwiseNormalPrior('radford')",
        "likelihood": "HomoskedasticGaussian(dataset_size=7, scale=Uniform(low: 0.0, high: 1.0))",
        "random weights": "2,040 of 2,081, in 2 sites",
        "guide": "AutoNormal",
        "likelihood guide": "AutoNormal",
        "state": "not fitted",
    }


def test_a_guide_of_pyro_has_its_name():
    bnn = tyxe.VariationalBNN(nn.Linear(2, 3), NORMAL, Categorical(4), AutoDelta)
    assert lines(bnn)["guide"] == "AutoDelta"


def test_the_net_is_shown_as_torch_shows_it():
    shown = "  (net): Linear(in_features=2, out_features=3, bias=True)\n)"
    assert repr(variational()).endswith(shown)
    assert "(bnn): VariationalBNN(\n" in repr(nn.ModuleDict({"bnn": variational()}))


def test_nothing_is_random_under_maximum_likelihood():
    dropout = tyxe.DropoutBNN(nn.Linear(2, 3), Categorical())
    for bnn in (plain(nn.Linear(2, 3), Categorical()), dropout):
        found = lines(bnn)
        assert found["random weights"] == "0 of 9, in 0 sites"
        assert found["likelihood"] == "Categorical(dataset_size=None)"
        assert "guide" not in found
        assert "prior" not in found


NOISE = "HomoskedasticGaussian(dataset_size=9, "


def noise(**options):
    return HomoskedasticGaussian(9, **options)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (NORMAL, "IIDPrior(Normal(loc: 0.0, scale: 1.0))"),
        (tyxe.priors.BinaryPrior(scale="radford"), "BinaryPrior(delta=None, scale='radford')"),
        (tyxe.priors.DictPrior({"w": dist.Normal(0, 1)}), "DictPrior(1 distributions)"),
        (tyxe.priors.LambdaPrior(lambda *_: dist.Normal(0, 1)), "LambdaPrior()"),
        (noise(scale=0.5), NOISE + "scale=0.5)"),
        (noise(precision=4.0), NOISE + "precision=4.0)"),
        (noise(scale=torch.ones(3)), NOISE + "scale=(3,) tensor)"),
        (noise(scale=1.0, learn_scale=True), NOISE + "scale=() parameter)"),
        (tyxe.calibration.TemperatureScaling(), "TemperatureScaling(temperature=None)"),
    ],
)
def test_parts_say_their_arguments(part, words):
    assert repr(part) == words


def test_the_parts_of_a_likelihood_are_named():
    bnn = mean_field(nn.Linear(2, 3), Joint(kind=Categorical(4), flag=Bernoulli(4)))
    inner = "Categorical(dataset_size=4), Bernoulli(dataset_size=4)"
    assert lines(bnn)["likelihood"] == f"Joint(dataset_size=4) of {inner}"


def test_the_state_follows_fits_files_and_copies(tmp_path):
    bnn = variational()
    bnn.fit(DATA, ADAM, 1)
    assert lines(bnn)["state"] == "fitted, 1 epoch"
    bnn.fit(DATA, ADAM, 12)
    assert lines(bnn)["state"] == lines(copy.deepcopy(bnn))["state"] == "fitted, 12 epochs"
    bnn.save(tmp_path / "bnn.tyxe")
    fresh = variational()
    with pytest.raises(RuntimeError):
        fresh.load_state_dict({})
    assert lines(fresh)["state"] == "not fitted"
    fresh.load(tmp_path / "bnn.tyxe")
    assert lines(fresh)["state"] == "loaded"


def test_weights_of_the_best_epoch_are_no_loaded_ones():
    torch.manual_seed(0)
    bnn, (inputs, _) = variational(), DATA[0]
    wrong = [(inputs, torch.full((4,), 2))]  # the longer the fit, the worse
    adam = functools.partial(torch.optim.Adam, lr=0.1)
    history = bnn.fit([(inputs, torch.zeros(4, dtype=torch.long))], adam, 4, validation=wrong)
    assert history.validation[-1] < history.validation[0]
    assert lines(bnn)["state"] == "fitted, 4 epochs, weights of the best"


def test_laplace_is_fitted_when_it_has_a_curvature(tmp_path):
    bnn, fresh = (laplace(nn.Linear(2, 3), Categorical(4)) for _ in range(2))
    assert lines(bnn)["guide"] == "a Gaussian about the mode, structure='kron'"
    assert lines(bnn)["state"] == "not fitted, no curvature"
    bnn.fit_curvature(DATA)
    assert lines(bnn)["state"] == "fitted, with its curvature"
    bnn.save(tmp_path / "bnn.tyxe")
    fresh.load(tmp_path / "bnn.tyxe")
    assert lines(fresh)["state"] == "fitted, with its curvature"


def test_samples_and_snapshots_are_counted():
    likelihood = Categorical(4)
    chains = bnns.chains(nn.Linear(2, 3), likelihood)
    assert (lines(chains)["kernel"], lines(chains)["state"]) == ("HMC", "not fitted")
    chains.fit(DATA, 5, warmup_steps=0, num_chains=2, compile=False)
    assert lines(chains)["state"] == "2 chains of 5 samples"
    swag = bnns.swag(nn.Linear(2, 3), likelihood)
    assert lines(swag)["state"] == "not fitted"
    swag.fit(DATA, ADAM, 3, start=0)
    assert lines(swag)["state"] == "3 snapshots, rank 2"


def test_members_of_an_ensemble_are_counted_by_their_states():
    ensemble = tyxe.EnsembleBNN(variational, 3)

    def fail(bnn, epoch, loss):
        raise KeyError(epoch)

    with pytest.raises(KeyError):
        ensemble.fit(DATA, ADAM, 2, fail)
    assert "state: 3 x not fitted\n" in repr(ensemble)
    ensemble.members[1].fit(DATA, ADAM, 2)
    assert repr(ensemble).startswith(
        "EnsembleBNN(\n  members: 3\n  state: 2 x not fitted; 1 x fitted, 2 epochs\n"
        "  (members[0]): VariationalBNN(\n    prior: IIDPrior"
    )
    ensemble.fit(DATA, ADAM, 4, vectorize=True)
    assert "state: 3 x fitted, 4 epochs\n" in repr(ensemble)


def test_a_loop_of_ones_own_is_said():
    bnn = variational()
    tyxe.Trainable(bnn)(DATA[0])
    assert lines(bnn)["state"] == "trained in your own loop"
    plain = tyxe.PytorchBNN(nn.Linear(2, 3), NORMAL, tyxe.guides.AutoNormal)
    assert lines(plain)["state"] == "trained in your own loop"
    assert "likelihood" not in lines(plain)


def test_a_calibrated_bnn_says_its_calibrator():
    temperature = tyxe.calibration.TemperatureScaling()
    temperature.temperature = 1.5
    calibrated = tyxe.calibration.Calibrated(variational(), temperature, {"num_predictions": 8})
    assert repr(calibrated).startswith(
        "Calibrated(\n  calibrator: TemperatureScaling(temperature=1.5)\n"
        "  predict: num_predictions=8\n  (bnn): VariationalBNN(\n    prior: IIDPrior"
    )
