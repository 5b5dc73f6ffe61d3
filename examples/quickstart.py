"""Ten ways to train one small CNN, and how well each knows when it is unsure.

The task is scikit-learn's digits 0 to 7 with 150 labelled images, and 8 and 9 are images that no
label stands for; `--data mnist`: MNIST, with FashionMNIST and notMNIST. Numbers are means over
seeds of split, net and training, with standard errors. NLL is in nats a point, ECE has 15 bins,
AUROC tells known from unknown images by maximal probability. Predictions average 32 draws. The KL's
weight `beta` is below one for digits, so those are tempered posteriors.
"""

import copy
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyro
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

import tyxe
from tyxe import metrics

try:
    import matplotlib.pyplot as plt
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is not installed: pip install -e ".[examples]"') from None
parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
parser.add_argument("--data", choices=["digits", "mnist"], default="digits", help="the task")
parser.add_argument("--out", type=Path, default=Path("results"), help="folder of figure and JSON")
parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
parser.add_argument("--seeds", type=int, help="number of seeds (default: 3; MNIST: 1)")
parser.add_argument("--smoke-test", action="store_true", help="few epochs: seconds, no result")
args = parser.parse_args()
if args.data == "digits":
    torch.set_num_threads(1)  # 8x8 pixels are too few to share
draws = 4 if args.smoke_test else 32
number = args.seeds or (1 if args.data == "mnist" or args.smoke_test else 3)
adam = partial(torch.optim.Adam, lr=5e-3 if args.data == "digits" else 1e-3)
normal, local = pyro.distributions.Normal(0, 1), tyxe.poutine.local_reparameterization
prior, head = tyxe.priors.IIDPrior(normal), tyxe.priors.IIDPrior(normal, expose=["7.*"])
nothing = tyxe.priors.IIDPrior(normal, hide_all=True)


# --------------------------------------------------------------------------- data


def images(name, part):
    near = Path(__file__).resolve().parents
    folders = [os.environ.get("TYXE_DATA", "."), f"{near[2]}/shared/data", f"{near[1]}/data"]
    if found := [path for folder in folders if (path := Path(folder, f"{name}.npz")).exists()]:
        x, y = (torch.from_numpy(np.load(found[0])[f"{key}_{part}"]) for key in "xy")
        return x[:, None] / 255, y.long()
    try:
        from torchvision.datasets import MNIST, FashionMNIST

        sets = {"mnist": MNIST, "fashion_mnist": FashionMNIST}
        data = sets[name](folders[-1], part == "train", download=True)
    except (ImportError, KeyError, OSError, RuntimeError) as error:
        raise SystemExit(f"no {name}.npz in {folders} (TYXE_DATA); download: {error!r}") from None
    return data.data[:, None] / 255, data.targets


def split_digits():
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    x, (known,) = x.view(-1, 1, 8, 8).float() / 16, torch.where(y <= 7)
    known = known[torch.randperm(len(known))]
    parts = [(x[i], y[i]) for i in known.split([150, 200, len(known) - 350])]
    return parts, {"AUROC 8-9": x[y > 7]}


def split_mnist():
    x, y = images("mnist", "train")
    parts = [(x[:50_000], y[:50_000]), (x[50_000:], y[50_000:]), images("mnist", "test")]
    ood = {"AUROC Fashion": "fashion_mnist", "AUROC notMNIST": "notmnist"}
    return parts, {column: images(name, "test")[0] for column, name in ood.items()}


def make_task():
    """Return data and net of one seed."""
    digits, count = args.data == "digits", 200 if args.smoke_test else None
    parts, ood = split_digits() if digits else split_mnist()
    train, validation, test = ([values[:count] for values in part] for part in parts)
    conv, pool = partial(nn.Conv2d, kernel_size=3, padding=1), nn.MaxPool2d(2)
    net = nn.Sequential(conv(1, 16), nn.ReLU(), pool, conv(16, 32), nn.ReLU(), pool, nn.Flatten())
    net.append(nn.Linear(32 * (test[0].shape[-1] // 4) ** 2, 8 if digits else 10))
    return SimpleNamespace(
        loader=DataLoader(TensorDataset(*train), 50 if digits else 100, shuffle=True),
        epochs=10 if args.smoke_test or not digits else 150,
        beta=0.02 if digits else 1.0,
        likelihood=tyxe.likelihoods.Categorical(len(train[0])),
        **{"train": train, "validation": validation, "test": test, "ood": ood, "net": net},
    )


# --------------------------------------------------------------------------- methods


def methods(task):
    """Fit each method, and yield its name, what predicts, and how many draws each part makes."""
    net, loader, likelihood = task.net, task.loader, task.likelihood

    def variational(net, prior, guide=None):
        return tyxe.VariationalBNN(net, prior, likelihood, guide)

    def fitted(bnn, optim=adam, handler=nullcontext, **options):
        with handler():
            bnn.fit(loader, optim, task.epochs, progress=False, **options)
        return bnn

    def laplace(net, prior):
        bnn = tyxe.LaplaceBNN(net, prior, likelihood)
        bnn.fit_curvature(loader, progress=False)
        bnn.optimize_prior_precision(loader=[task.validation])
        return bnn

    def member(index):
        return variational(tyxe.util.reset_parameters_(copy.deepcopy(net)), nothing)

    plain = fitted(variational(net, nothing))
    yield "maximum likelihood", plain, 1
    yield "MAP", fitted(variational(net, prior, pyro.infer.autoguide.AutoDelta)), 1
    dropping = nn.Sequential(*net[:-1], nn.Dropout(0.1), net[-1])
    yield "dropout", fitted(tyxe.DropoutBNN(dropping, likelihood)), draws
    yield "ensemble of 5", fitted(tyxe.EnsembleBNN(member, 5), vectorize=True), 1
    ml = plain.to_module()
    swag = tyxe.SWAG_BNN(net, prior, likelihood, rank=min(task.epochs // 5, 20))
    yield "SWAG", fitted(swag, beta=task.beta), draws
    yield "Laplace", laplace(ml, prior), draws
    yield "last layer, Laplace", laplace(ml, head), draws
    guide = partial(tyxe.guides.AutoNormal, init_scale=1e-4, max_guide_scale=0.1)
    how = {"beta": task.beta, "lr_multipliers": {"scale": 10}}  # scales start small
    yield "mean field", fitted(variational(ml, prior, guide), handler=local, **how), draws
    frozen = copy.deepcopy(ml).requires_grad_(False)
    last = variational(frozen, head, partial(tyxe.guides.AutoNormal, init_scale=1e-4))
    yield "last layer, mean field", fitted(last, handler=local, **how), draws
    kernel = partial(tyxe.samplers.SGHMC, lr=0.1, temperature=task.beta, schedule="cyclical")
    chain = tyxe.MCMC_BNN(net, prior, likelihood, kernel)
    thinning = max(len(loader) * task.epochs // (5 * draws), 1)  # as long as it has to be
    chain.fit(loader, draws, thinning=thinning, progress=False)
    yield "SGHMC", chain, draws


def scores(probs, unknown, y):
    row = {"error %": 100 - 100 * metrics.accuracy(probs, y), "NLL": metrics.nll(probs, y)}
    row["ECE %"] = 100 * metrics.expected_calibration_error(probs, y)
    aurocs = {n: metrics.ood_auroc(probs.amax(-1), other.amax(-1)) for n, other in unknown.items()}
    return {name: value.item() for name, value in {**row, **aurocs}.items()}


def run(seed, found, bar):
    """Fit and score all methods, and return the task with their predictions for its test images."""
    pyro.set_rng_seed(seed)
    task = make_task()
    task.predictions, start = {}, time.perf_counter()
    for name, bnn, count in methods(task):
        done = time.perf_counter()
        predict = partial(bnn.predict, num_predictions=count, batch_size=1_000)
        task.predictions[name] = probs = predict(task.test[0]).softmax(-1)
        predicted = time.perf_counter()
        unknown = {column: predict(x).softmax(-1) for column, x in task.ood.items()}
        seen = metrics.nll(predict(task.validation[0]).softmax(-1), task.validation[1]).item()
        row = scores(probs, unknown, task.test[1])
        row |= {"train s": done - start, "predict s": predicted - done, "validation NLL": seen}
        found.setdefault(name, []).append(row)
        bar.update()
        start = time.perf_counter()
    return task


# --------------------------------------------------------------------------- results


def mean_and_error(values):
    spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.mean(values), spread


def picture(rows, columns, test, kept):
    """Draw a row for each method, and images that the plain net is sure of and wrong about."""
    names = list(rows)
    figure = plt.figure(figsize=(12, 4.5), layout="constrained")
    grid = figure.add_gridspec(3, len(columns) + 1, width_ratios=[*[1] * len(columns), 1.3])
    first = None
    for place, column in enumerate(columns):
        ax = figure.add_subplot(grid[:, place], sharey=first)
        first = first or ax
        for y, name in enumerate(names):
            mean, error = rows[name][column]
            ax.errorbar(mean, y, xerr=error, fmt="o", color=f"C{y}", capsize=2)
        better = "higher" if "AUROC" in column else "lower"
        ax.set_title(f"{column}\n({better} is better)", fontsize=9)
        ax.set_yticks(range(len(names)), names)
        ax.tick_params(labelleft=place == 0, labelsize=8)
        ax.grid(axis="x", alpha=0.3)
    first.invert_yaxis()
    plain, other = kept["maximum likelihood"], kept["mean field"]
    (wrong,) = torch.where(plain.argmax(-1) != test[1])
    order = plain[wrong].amax(-1).argsort(descending=True)
    surest = {}  # of each class the image that the net is surest of
    for index in wrong[order].tolist():
        surest.setdefault(int(test[1][index]), index)
    for place, index in enumerate([*surest.values()][:3]):
        ax = figure.add_subplot(grid[place, -1])
        ax.imshow(test[0][index, 0].numpy(), cmap="gray_r")
        ax.set_axis_off()
        said = [f"a {test[1][index]}"]
        for name, probs in {"max. likelihood": plain, "mean field": other}.items():
            share, label = probs[index].max(-1)
            said.append(f"{name}: {label}, {100 * share:.0f} %")
        ax.text(1.1, 0.5, "\n".join(said), transform=ax.transAxes, va="center", fontsize=8)
    return figure


found, every = {}, []
with tqdm(desc="demo", unit=" fits", disable=None) as bar:  # on a terminal only
    for index in range(number):
        every.append(run(args.seed + index, found, bar))
columns = [column for column in found["MAP"][0] if column != "validation NLL"]
rows = {
    name: {column: mean_and_error([row[column] for row in each]) for column in each[0]}
    for name, each in found.items()
}
print(f"{'':24}" + "".join(f"{column:>18}" for column in columns))
for name, row in rows.items():
    cells = [f"{mean:.3f} +- {error:.3f}" for mean, error in (row[c] for c in columns)]
    print(f"{name:24}" + "".join(f"{cell:>18}" for cell in cells))
settings = {"data": args.data, "training images": len(every[0].train[1])}
settings |= {"test images": len(every[0].test[1]), "epochs": every[0].epochs}
settings |= {"draws": draws, "beta": every[0].beta, "seeds": number}
versions = {"python": platform.python_version(), "tyxe": tyxe.__version__}
versions |= {"torch": torch.__version__, "pyro": pyro.__version__}
machine = {"system": platform.system(), "processor": platform.processor() or platform.machine()}
machine |= {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
content = {"command": shlex.join(["python", "examples/quickstart.py", *sys.argv[1:]])}
content |= {"seed": args.seed, "versions": versions, "machine": machine, "settings": settings}
path = args.out / f"quickstart_{args.data}"
args.out.mkdir(parents=True, exist_ok=True)
shown = [column for column in columns if not column.endswith(" s")]
picture(rows, shown, every[0].test, every[0].predictions).savefig(f"{path}.png", dpi=100)
Path(f"{path}.json").write_text(json.dumps(content | {"rows": rows}, indent=2) + "\n")
print(f"wrote {path}.png and {path}.json")
