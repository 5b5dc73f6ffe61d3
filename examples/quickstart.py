"""Eight ways to train one small CNN, and what each knows about what it does not know.

The task is scikit-learn's digits 0 to 7 (8x8 pixels); the digits 8 and 9 are out-of-distribution.
`--data mnist` takes all of MNIST, with FashionMNIST and notMNIST out-of-distribution.

Each row of the table is another choice of prior, guide or approximation; net and likelihood stay.
Maximum likelihood comes first; the two Laplace approximations are about the MAP, and the rows after
them start at maximum likelihood's weights. The settings below (epochs, rates, weight of the KL) and
the precision of Laplace's prior were chosen by the negative log-likelihood on a validation part of
the training data, never by test or out-of-distribution data. Digits: 50 % train, 10 % validation,
40 % test, shuffled by --seed. MNIST: its own test set, the last 10,000 training images for
validation; settings not tuned. With this many weights and this few digits the KL outweighs the
data unless its weight `beta` is far below one: what is shown is a tempered posterior.

Columns: error, negative log-likelihood (nats a point), expected calibration error (15 bins), area
under the ROC curve by maximal probability, seconds to train the row (those that start at another's
weights on top of it) and to predict the test set, with 32 draws where there is a posterior to draw
from: of the weights, or for Laplace of the linearised net's outputs.
"""

import argparse
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import _extras  # noqa: F401
import matplotlib as mpl

mpl.use("Agg")

import pyro
import pyro.distributions as dist
import torch
from _data import images
from _record import environment, save
from pyro.infer.autoguide import AutoDelta, AutoLowRankMultivariateNormal
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tyxe
from tyxe import metrics
from tyxe.guides import AutoNormal

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--data", choices=["digits", "mnist"], default="digits", help="the task")
parser.add_argument("--out", type=Path, default=Path("results"), help="folder of figure and JSON")
parser.add_argument("--seed", type=int, default=0, help="of split, net and training (default: 0)")
parser.add_argument("--smoke-test", action="store_true", help="few epochs: seconds, no result")
args = parser.parse_args()
pyro.set_rng_seed(args.seed)


def digits():
    """Return train, validation and test pairs, and images of the two classes left out."""
    torch.set_num_threads(1)  # 8x8 pixels are too few to share
    bunch = load_digits()
    x, y = torch.tensor(bunch.images[:, None] / 16, dtype=torch.float), torch.tensor(bunch.target)
    (known,), (unknown,) = torch.where(y <= 7), torch.where(y > 7)
    known = known[torch.randperm(len(known))]
    parts = known.split([len(known) // 2, len(known) // 10, len(known) - len(known) * 6 // 10])
    return [(x[part], y[part]) for part in parts], {"AUROC 8-9": x[unknown]}


def mnist():
    """Return the same for MNIST."""
    x, y = images("mnist", "train")
    pairs = [(x[:50_000], y[:50_000]), (x[50_000:], y[50_000:]), images("mnist", "test")]
    others = {"AUROC Fashion": "fashion_mnist", "AUROC notMNIST": "notmnist"}
    return pairs, {column: images(name, "test")[0] for column, name in others.items()}


(train, validation, test), ood = digits() if args.data == "digits" else mnist()
# Weight of the KL: digits by validation NLL among 1, 0.3, 0.1, 0.03 and 0.01; MNIST not tuned.
epochs, draws, beta = (150, 32, 0.01) if args.data == "digits" else (10, 32, 1.0)
if args.smoke_test:
    epochs, draws = 1, 2
    train, validation, test = (tuple(t[:200] for t in p) for p in (train, validation, test))
    ood = {column: x[:200] for column, x in ood.items()}
loader = DataLoader(TensorDataset(*train), batch_size=100, shuffle=True)

pixels, classes = train[0].shape[-1], int(train[1].max()) + 1
net = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(32 * (pixels // 4) ** 2, classes)),
)
likelihood = tyxe.likelihoods.Categorical(len(train[0]))
rows, results = {}, {}


def run(name, net, prior, guide=None, *, handler=nullcontext, draws=1, **options):
    """Fit and score; return the BNN."""
    bnn = tyxe.VariationalBNN(net, prior, likelihood, guide)
    start = time.perf_counter()
    with handler():
        bnn.fit(loader, pyro.optim.Adam({"lr": 1e-3}), epochs, **options)
    score(name, bnn, start, draws)
    return bnn


def laplace(name, net, prior):
    """Approximate about a trained net, with the prior precision that validation data prefer."""
    bnn = tyxe.LaplaceBNN(net, prior, likelihood)
    start = time.perf_counter()
    bnn.fit_curvature(loader)
    bnn.optimize_prior_precision("grid", [validation])
    score(name, bnn, start, draws)


def score(name, bnn, start, draws):
    """Print a row of the table."""
    times = [start, time.perf_counter()]
    predict = partial(bnn.predict, num_predictions=draws, batch_size=1_000)
    probs = predict(test[0]).softmax(-1)
    times.append(time.perf_counter())
    unknown = {key: predict(x).softmax(-1) for key, x in ood.items()}
    rows[name] = {
        "error %": 100 - 100 * metrics.accuracy(probs, test[1]).item(),
        "NLL": metrics.nll(probs, test[1]).item(),
        "ECE %": 100 * metrics.expected_calibration_error(probs, test[1]).item(),
        **{k: metrics.ood_auroc(probs.amax(-1), p.amax(-1)).item() for k, p in unknown.items()},
        "train s": times[1] - times[0],
        "predict s": times[2] - times[1],
    }
    if len(rows) == 1:
        print(f"{'':24}" + "".join(f"{column:>16}" for column in rows[name]))
    print(f"{name:24}" + "".join(f"{value:16.3f}" for value in rows[name].values()), flush=True)
    seen = predict(validation[0]).softmax(-1)
    rows[name]["validation NLL"] = metrics.nll(seen, validation[1]).item()
    results[name] = (probs, test[1], torch.cat(list(unknown.values())))


normal = dist.Normal(0, 1)
start = tyxe.guides.PretrainedInitializer.from_net
ml = run("ML", net, tyxe.priors.IIDPrior(normal, hide_all=True))
prior = tyxe.priors.IIDPrior(normal)
at_map = run("MAP", net, prior, partial(AutoDelta, init_loc_fn=start(net))).to_module()

# Laplace: nothing more to train.
laplace("Laplace", at_map, prior)
last = tyxe.priors.IIDPrior(normal, expose_modules=[at_map[-1]])
laplace("last layer, Laplace", at_map, last)

# Variational: draws, small scales at first, with a learning rate of their own, about ML's weights.
net = ml.to_module()
guide = partial(AutoNormal, init_loc_fn=start(net), init_scale=1e-4)
capped = partial(guide, max_guide_scale=0.1)
fit = {"draws": draws, "beta": beta, "lr_multipliers": {"scale": 10}}
local = {"handler": tyxe.poutine.local_reparameterization, **fit}
run("mean field", net, prior, capped, **local)
run("mean field, sd only", net, prior, partial(capped, train_loc=False), **local)

# The last layer only: the others are no sites, and frozen.
net.requires_grad_(False)
prior = tyxe.priors.IIDPrior(normal, expose_modules=[net[-1]])
run("last layer, mean field", net, prior, guide, **local)
guide = partial(AutoLowRankMultivariateNormal, rank=10, init_loc_fn=start(net), init_scale=1e-4)
run("last layer, low rank", net, prior, guide, **fit)

figure = tyxe.plotting.calibration_and_entropy(results, min_count=5)
sizes = {"training images": len(train[0]), "test images": len(test[0])}
settings = {"data": args.data, **sizes, "epochs": epochs, "draws": draws, "beta": beta}
content = {**environment(args.seed), "settings": settings, "rows": rows}
save(args.out, f"quickstart_{args.data}", figure, content)
