"""tyxe.integrations.lightning: a BNN in Lightning's loops, one process and two."""

import functools
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tyxe
from tests.oracles.bnns import mean_field
from tests.oracles.fits import assert_equal, trainable
from tests.oracles.nets import KindAndSize, kind_and_size

pytest.importorskip("lightning", reason="it is the extra 'lightning'")

import lightning

from tyxe.integrations.lightning import LightningBNN

ROOT = Path(__file__).resolve().parents[2]
N = 40
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
NORMAL = tyxe.priors.IIDPrior(dist.Normal(0, 1))
ADAM = functools.partial(torch.optim.Adam, lr=1e-2)
pytestmark = [
    # A loader of a few tensors needs no processes, and validation data are not always given.
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`:UserWarning"),
    # Of lightning 2.6 under torch 2.15.
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning"),
]


def variational(net=None, likelihood=None):
    torch.manual_seed(0)
    net = net or nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    likelihood = likelihood or tyxe.likelihoods.Categorical(N)
    guide = functools.partial(tyxe.guides.AutoNormal, init_scale=1e-2)
    return tyxe.VariationalBNN(net, NORMAL, likelihood, guide)


def loader(y=Y, size=20):
    return DataLoader(TensorDataset(X, y), size)


def trainer(folder, epochs=2, **options):
    common = {
        "max_epochs": epochs,
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "num_sanity_val_steps": 0,
    }
    return lightning.Trainer(**(common | options))


@pytest.mark.parametrize("handler", [nullcontext, tyxe.poutine.local_reparameterization])
def test_it_makes_the_steps_of_fit(tmp_path, handler):
    fitted, own = variational(), variational()
    options = {"lr_multipliers": {"scale": 3.0}, "beta": lambda epoch: (epoch + 1) / 3}
    torch.manual_seed(1)
    with handler():
        fitted.fit(loader(), ADAM, 3, **options)
    module = LightningBNN(own, ADAM, handler=handler, **options)
    torch.manual_seed(1)
    trainer(tmp_path, 3).fit(module, loader())
    assert_equal(trainable(fitted), trainable(own), rtol=0, atol=1e-6)


def test_metrics_are_logged(tmp_path):
    bnn = variational()
    module = LightningBNN(bnn, ADAM, num_predictions=0)
    own = trainer(tmp_path, 30)
    own.fit(module, loader(), loader())
    logged = own.callback_metrics
    error, log_likelihood = bnn.evaluate(X, Y, num_predictions=0, reduction="mean")
    torch.testing.assert_close(logged["val_error"], error)
    torch.testing.assert_close(logged["val_log_likelihood"], log_likelihood)
    assert {"train_loss", "train_log_likelihood", "train_kl"} <= logged.keys()
    loss = (logged["train_kl_epoch"] - logged["train_log_likelihood_epoch"]) / N
    torch.testing.assert_close(logged["train_loss_epoch"], loss)
    (tested,) = own.test(module, loader(), verbose=False)
    assert tested["test_error"] == pytest.approx(float(error))
    predicted = torch.cat(own.predict(module, loader()))
    torch.testing.assert_close(predicted, bnn.predict(X, num_predictions=0))


def test_the_loss_of_an_epoch_counts_weights_of_points_once(tmp_path):
    weights = torch.where(torch.arange(N) < 20, 5.0, 0.1)
    bnn = variational(likelihood=tyxe.likelihoods.Categorical(float(weights.sum())))
    data = DataLoader(TensorDataset(X, Y, weights), 4)
    own = trainer(tmp_path)
    own.fit(LightningBNN(bnn, ADAM, beta=0.5), data)
    logged = own.callback_metrics
    loss = (0.5 * logged["train_kl_epoch"] - logged["train_log_likelihood_epoch"]) / weights.sum()
    torch.testing.assert_close(logged["train_loss_epoch"], loss)


def test_parts_of_a_joint_likelihood_are_logged(tmp_path):
    own = trainer(tmp_path)
    points = [(x, {"kind": y, "size": x[:1]}) for x, y in zip(X, Y, strict=True)]
    batches = DataLoader(points, 20)  # a list would be several loaders
    own.fit(LightningBNN(variational(KindAndSize(3), kind_and_size(N)), ADAM), batches, batches)
    expected = {f"val_log_likelihood_{name}" for name in ("kind", "size", "joint")}
    assert expected | {"val_error_kind", "val_error_size"} <= own.callback_metrics.keys()


def of_joint():
    kinds = torch.full_like(Y, -100)
    kinds[5:9] = Y[5:9]
    points = [(x, {"kind": y, "size": x[:1]}) for x, y in zip(X, kinds, strict=True)]
    likelihood = tyxe.likelihoods.Joint(
        kind=tyxe.likelihoods.Categorical(N, ignore_index=-100),
        size=tyxe.likelihoods.HomoskedasticGaussian(N, scale=0.5),
    )
    return variational(KindAndSize(3), likelihood), DataLoader(points, 7)


def of_weights():
    # Of fractions, and of a batch of which nothing counts.
    weights = torch.tensor([0.01, 0.0, 0.4, 3.0]).repeat_interleave(10)
    return variational(), DataLoader(TensorDataset(X, Y, weights), 10)


@pytest.mark.parametrize("make", [of_joint, of_weights])
def test_metrics_of_batches_are_those_of_evaluate(tmp_path, make):
    bnn, data = make()
    module = LightningBNN(bnn, ADAM, num_predictions=0)
    (found,) = trainer(tmp_path).validate(module, data, verbose=False)
    scores = bnn.evaluate(data, num_predictions=0, reduction="mean")
    for name, score in zip(("error", "log_likelihood"), scores, strict=True):
        parts = {f"_{n}": v for n, v in score.items()} if isinstance(score, dict) else {"": score}
        for ending, value in parts.items():
            assert found[f"val_{name}{ending}"] == pytest.approx(float(value))


@pytest.mark.parametrize("weights", [torch.ones(N), torch.where(torch.arange(N) < 20, 5.0, 0.1)])
def test_a_checkpoint_goes_on_as_if_nothing_had_stopped(tmp_path, weights):
    # Lightning leaves random generators as they are, but opens a loader twice before 2.5.3.
    # A loader draws a seed each time: here from a generator of its own.
    batches = DataLoader(TensorDataset(X, Y, weights), 20)
    batches.generator = torch.Generator()

    def fitted(epochs, checkpoint=None, state=None):
        likelihood = tyxe.likelihoods.Categorical(float(weights.sum()))
        module = LightningBNN(variational(likelihood=likelihood), ADAM, scheduler=halved)
        own = trainer(tmp_path, epochs)
        if state is not None:
            torch.set_rng_state(state)
        own.fit(module, batches, ckpt_path=checkpoint)
        own.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return trainable(module.bnn), module.optimizers().param_groups[0]["lr"]

    whole = fitted(4)
    fitted(2)
    rest = fitted(4, tmp_path / "2.ckpt", torch.get_rng_state())
    assert whole[1] == rest[1] == 1e-2 / 4
    assert_equal(whole[0], rest[0], rtol=0, atol=0)


halved = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)


def test_a_callback_of_lightning_stops_by_held_out_data(tmp_path):
    stop = lightning.pytorch.callbacks.EarlyStopping("val_log_likelihood", mode="max", patience=2)
    own = trainer(tmp_path, 200, callbacks=[stop])
    module = LightningBNN(variational(), functools.partial(torch.optim.Adam, lr=0.2))
    own.fit(module, loader(), loader(1 - Y))  # what is learned is wrong there
    assert own.current_epoch < 20


def test_bf16_mixed_precision(tmp_path):
    half, full = variational(), variational()
    torch.manual_seed(1)
    trainer(tmp_path, 20, precision="bf16-mixed").fit(LightningBNN(half, ADAM), loader())
    torch.manual_seed(1)
    trainer(tmp_path, 20).fit(LightningBNN(full, ADAM), loader())
    assert all(p.dtype == torch.float32 for p in half.parameters())
    assert_equal(trainable(half), trainable(full), rtol=0, atol=2e-2)
    pairs = zip(half.parameters(), full.parameters(), strict=True)
    assert any(not torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize(
    "optim", [ADAM, functools.partial(torch.optim.AdamW, lr=1e-2), pyro.optim.Adam({"lr": 1e-2})]
)
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_mixed_precision_with_clipped_gradients(tmp_path, optim, algorithm):
    bnn = variational()
    module, before = LightningBNN(bnn, optim), trainable(bnn)
    clipping = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": algorithm}
    trainer(tmp_path, 1, precision="bf16-mixed", **clipping).fit(module, loader())
    after = trainable(bnn)
    assert all(not torch.equal(after[name], before[name]) for name in before)
    assert all(value.isfinite().all() for value in after.values())


@pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode:UserWarning")
def test_frozen_parts_keep_their_mode(tmp_path):
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    net[0].requires_grad_(False).eval()
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), expose_module_types=[nn.Linear])
    bnn = mean_field(net, tyxe.likelihoods.Categorical(N), prior)
    before = {name: b.clone() for name, b in bnn.net[0].named_buffers()}
    trainer(tmp_path).fit(LightningBNN(bnn, ADAM), loader(), loader())
    assert_equal(before, dict(bnn.net[0].named_buffers()), rtol=0, atol=0)


def test_an_optimiser_that_takes_its_own_gradients_is_refused():
    ivon = functools.partial(tyxe.optim.IVON, lr=0.1)
    with pytest.raises(TypeError, match="takes its own gradients"):
        LightningBNN(variational(), ivon).configure_optimizers()


def parameters_after_a_fit(folder, count):
    """Fit in so many processes, without a spread, so that the draws of all are the same."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    bnn = tyxe.VariationalBNN(net, NORMAL, tyxe.likelihoods.Categorical(N), AutoDelta)
    module = LightningBNN(bnn, functools.partial(torch.optim.SGD, lr=0.1))
    options = {"strategy": "ddp", "use_distributed_sampler": True} if count > 1 else {}
    own = trainer(folder, 3, devices=count, **options)
    own.fit(module, loader(size=N // count))
    return own, trainable(bnn)


TWO = """
import sys, torch
from tests.integrations.test_lightning import parameters_after_a_fit
own, found = parameters_after_a_fit(".", 2)
if own.is_global_zero:
    torch.save(found, sys.argv[1])
"""


def test_two_processes_make_the_fit_of_one(tmp_path):
    (tmp_path / "two.py").write_text(TWO)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "two.py", "found.pt"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MASTER_PORT": "29517"},
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _, one = parameters_after_a_fit(tmp_path, 1)
    assert_equal(one, torch.load(tmp_path / "found.pt"), rtol=1e-4, atol=1e-5)
