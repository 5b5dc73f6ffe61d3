"""Saving and loading BNNs: whole or not at all, tensors only, and training that goes on."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch

import tyxe
from tests.oracles.rejections import rejects
from tests.oracles.states import (
    ADAM,
    GUIDES,
    NORMAL,
    N,
    assert_same_predictions,
    assert_same_state,
    data,
    fitted,
    make,
    mcmc,
    net,
    sampled,
)
from tyxe.guides import AutoInducing, AutoNormal
from tyxe.likelihoods import HomoskedasticGaussian

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")


NOISE = HomoskedasticGaussian(N, scale=0.1)


def laplace(structure: str = "kron"):
    return tyxe.LaplaceBNN(net(), NORMAL, NOISE, structure=structure)


def fitted_laplace(structure: str = "kron"):
    bnn = laplace(structure)
    bnn.fit([data()], ADAM, 2)
    return bnn


def swag():
    return tyxe.SWAG_BNN(net(), NORMAL, NOISE, rank=2)


def fitted_swag():
    bnn = swag()
    bnn.fit([data()], ADAM, 2, start=0.0)
    bnn.update_norm_statistics(None)  # files are without the loader
    return bnn


def pytorch():
    return tyxe.PytorchBNN(net(), NORMAL, AutoNormal)


INDUCING = partial(
    AutoInducing, inducing_rows=2, inducing_cols=2, q_inducing="ensemble", everywhere=True
)
MADE = {
    **{name: (partial(fitted, g), partial(make, g)) for name, g in GUIDES.items()},
    "AutoInducing": (lambda: fitted(INDUCING), lambda: make(INDUCING)),
    "kron": (fitted_laplace, laplace),
    "full": (lambda: fitted_laplace("full"), lambda: laplace("full")),
    "MCMC": (sampled, mcmc),
    "SWAG": (fitted_swag, swag),
    "PytorchBNN": (pytorch, pytorch),
}


@pytest.mark.parametrize("name", MADE)
def test_a_loaded_bnn_is_the_saved_one(name: str, tmp_path: Path) -> None:
    full, fresh = MADE[name]
    bnn, path = full(), tmp_path / "bnn.tyxe"
    bnn.save(path)
    loaded = fresh()
    assert loaded.load(path) is loaded
    assert_same_state(loaded, bnn)
    assert_same_predictions(loaded, bnn)
    # What safetensors asks for, and with it the trainers that save by it.
    state = bnn.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    assert all(value.is_contiguous() for value in state.values())
    storages = [v.untyped_storage().data_ptr() for v in state.values() if v.numel()]
    assert len(set(storages)) == len(storages)
    assert not {key for key in state if key.startswith("net.") and key[4:6] in ("0.", "2.")}


def test_files_of_others_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "bnn.tyxe"
    with pytest.raises(FileNotFoundError):
        make().load(path)
    make(hidden=5).save(path)
    bnn = fitted()
    rejects(bnn, RuntimeError, "does not fit this VariationalBNN", lambda: bnn.load(path))
    tyxe.files.write(path, {"loss": 1.0})
    with pytest.raises(ValueError, match="not written by the save of a BNN"):
        bnn.load(path)
    fitted().save(path, training=True)
    with pytest.raises(RuntimeError, match="a checkpoint, for another wrapper"):
        pytorch().load(path)
    with pytest.raises(TypeError, match="has no fit to go on with"):
        sampled().save(path, training=True)


def test_files_of_an_ensemble_and_of_one_bnn_are_told_apart(tmp_path: Path) -> None:
    one, ensemble, path = make(), tyxe.EnsembleBNN(lambda _: make(), 2), tmp_path / "bnn.tyxe"
    ensemble.save(path)
    with pytest.raises(RuntimeError, match=r"not that of one BNN.*an ensemble's into an Ensemble"):
        one.load(path)
    one.save(path)
    with pytest.raises(RuntimeError, match=r"fit this ensemble of 2 members, .* it is of one BNN"):
        ensemble.load(path)
    one.save(path, training=True)
    with pytest.raises(RuntimeError, match=r"pass what its checkpoint\(\) returned"):
        ensemble.load(path)


# --- training that goes on ------------------------------------------------------------------------

BATCHES = [tuple(part[rows] for part in data()) for rows in (slice(0, 5), slice(5, 12))]


def test_the_best_checkpoint_in_memory_stays_the_best() -> None:
    bnn, kept = make(), {}

    def keep(bnn, epoch, loss) -> None:
        kept[epoch] = bnn.checkpoint()

    bnn.fit(BATCHES, ADAM, 2, keep)
    first = copy.deepcopy(kept[0])
    bnn.fit(BATCHES, ADAM, 5)
    for name, value in kept[0]["bnn"].items():
        assert torch.equal(value, first["bnn"][name])
    moments = [s["exp_avg"] for s in kept[0]["optimizer"]["state"].values()]
    expected = [s["exp_avg"] for s in first["optimizer"]["state"].values()]
    assert all(map(torch.equal, moments, expected))


@pytest.mark.parametrize("build", [make, laplace])
@pytest.mark.parametrize("resumed", [False, True])
def test_after_an_interrupt_a_checkpoint_is_that_of_the_last_step(build, resumed: bool) -> None:
    def interrupted():
        yield BATCHES[0]
        raise KeyboardInterrupt

    bnn = build()
    bnn.fit(BATCHES, ADAM, 2)
    if resumed:
        again = build()
        again.load_checkpoint(bnn.checkpoint())
        bnn = again
    with pytest.raises(KeyboardInterrupt):
        bnn.fit(interrupted(), ADAM, 3)
    taken = bnn.checkpoint()
    steps = {int(state["step"]) for state in taken["optimizer"]["state"].values()}
    assert steps == {5 if resumed else 1}
    assert taken["epoch"] == (2 if resumed else 0)
    for name, value in bnn.state_dict().items():
        assert torch.equal(taken["bnn"][name], value)


def test_an_optimiser_of_other_shapes_is_refused() -> None:
    bnn = fitted()
    taken = bnn.checkpoint()
    state = taken["optimizer"]["state"]
    state[0]["exp_avg"] = torch.zeros(1000, 1000)
    fresh = make()
    fresh.load_checkpoint(taken)
    message = r"optimiser has exp_avg of shape \(1000, 1000\) for a"
    rejects(fresh, ValueError, message, lambda: fresh.fit([data()], ADAM, 1))
