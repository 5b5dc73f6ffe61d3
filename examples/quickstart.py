"""Thirteen ways to train one small CNN, and what each knows about what it does not know.

The task is scikit-learn's digits 0 to 7, with 8 and 9 out-of-distribution; `--data mnist`: MNIST,
with FashionMNIST and notMNIST. Settings were chosen on held-out training data (MNIST: untuned); the
KL's weight `beta` is far below one, so what is shown is a tempered posterior. NLL is in nats a
point, ECE has 15 bins, AUROC is by maximal probability, seconds are for 32 draws.
"""

import copy
import json
import os
import platform
import shlex
import sys
import time
import warnings
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pyro
import torch
from torch import nn

import tyxe
from tyxe import metrics

try:
    import matplotlib  # noqa: F401
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is not installed: pip install -e ".[examples]"') from None
parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
parser.add_argument("--data", choices=["digits", "mnist"], default="digits", help="the task")
parser.add_argument("--out", type=Path, default=Path("results"), help="folder of figure and JSON")
parser.add_argument("--seed", type=int, default=0, help="of split, net and training (default: 0)")
parser.add_argument("--smoke-test", action="store_true", help="few epochs: seconds, no result")
args = parser.parse_args()
pyro.set_rng_seed(args.seed)


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


if args.data == "digits":
    torch.set_num_threads(1)  # 8x8 pixels are too few to share
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    x, (known,), n = x.view(-1, 1, 8, 8).float() / 16, torch.where(y <= 7), sum(y <= 7)
    known, ood = known[torch.randperm(n)], {"AUROC 8-9": x[y > 7]}
    parts = [(x[i], y[i]) for i in known.split([n // 2, n // 10, n - n * 6 // 10])]
else:
    x, y = images("mnist", "train")
    parts = [(x[:50_000], y[:50_000]), (x[50_000:], y[50_000:]), images("mnist", "test")]
    ood = {"AUROC Fashion": "fashion_mnist", "AUROC notMNIST": "notmnist"}
    ood = {column: images(name, "test")[0] for column, name in ood.items()}
count, epochs, draws = (200, 10, 4) if args.smoke_test else (None, 150, 32)
epochs, beta, classes = (epochs, 0.01, 8) if args.data == "digits" else (min(epochs, 10), 1.0, 10)
train, validation, test = ([values[:count] for values in part] for part in parts)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*train), 100, shuffle=True)
conv, pool = partial(nn.Conv2d, kernel_size=3, padding=1), nn.MaxPool2d(2)
net = nn.Sequential(conv(1, 16), nn.ReLU(), pool, conv(16, 32), nn.ReLU(), pool, nn.Flatten())
net.append(nn.Linear(32 * (x.shape[-1] // 4) ** 2, classes))
likelihood = tyxe.likelihoods.Categorical(len(train[0]))
adam = pyro.optim.Adam({"lr": 1e-3})
rows, results, said, columns = {}, {}, [], ["error %", "NLL", "ECE %", *ood, "train s", "predict s"]
print(f"{'':24}" + "".join(f"{column:>16}" for column in columns))


def run(name, bnn, draws=1, optim=adam, handler=nullcontext, **options):
    start = time.perf_counter()
    with handler(), warnings.catch_warnings(record=True) as caught:  # printed below the table
        if isinstance(bnn, tyxe.LaplaceBNN):
            bnn.fit_curvature(loader)
            bnn.optimize_prior_precision(loader=[validation])
        elif isinstance(bnn, tyxe.MCMC_BNN):
            bnn.fit(loader, draws, **options)
        else:
            bnn.fit(loader, optim, epochs, **options)
    said.extend(f"{name}: {warning.message}" for warning in caught)
    each = draws // len(getattr(bnn, "members", [bnn])) or 1
    predict = partial(bnn.predict, num_predictions=each, batch_size=1_000)
    fitted, probs = time.perf_counter(), predict(test[0]).softmax(-1)
    done, unknown = time.perf_counter(), [predict(x[:count]).softmax(-1) for x in ood.values()]
    row = [100 - 100 * metrics.accuracy(probs, test[1]).item(), metrics.nll(probs, test[1]).item()]
    row += [100 * metrics.expected_calibration_error(probs, test[1]).item()]
    row += [metrics.ood_auroc(probs.amax(-1), other.amax(-1)).item() for other in unknown]
    row += [fitted - start, done - fitted]
    print(f"{name:24}" + "".join(f"{value:16.3f}" for value in row), flush=True)
    seen = metrics.nll(predict(validation[0]).softmax(-1), validation[1]).item()
    rows[name] = dict(zip(columns, row, strict=True)) | {"validation NLL": seen}
    results[name] = (probs, test[1], torch.cat(unknown))
    return bnn


def variational(net, prior, guide=None):
    return tyxe.VariationalBNN(net, prior, likelihood, guide)


def member(index):
    return variational(tyxe.util.reset_parameters_(copy.deepcopy(net)), nothing)


normal, local = pyro.distributions.Normal(0, 1), tyxe.poutine.local_reparameterization
prior, head = tyxe.priors.IIDPrior(normal), tyxe.priors.IIDPrior(normal, expose=["7.*"])
nothing = tyxe.priors.IIDPrior(normal, hide_all=True)
ml = run("ML", variational(net, nothing)).to_module()
mode = run("MAP", variational(net, prior, pyro.infer.autoguide.AutoDelta)).to_module()
dropping = nn.Sequential(*net[:-1], nn.Dropout(0.1), net[-1])
run("dropout", tyxe.DropoutBNN(dropping, likelihood), draws)
run("ensemble of 5", tyxe.EnsembleBNN(member, 5))
faster, rank = pyro.optim.Adam({"lr": 3e-3}), min(epochs // 5, 20)
run("SWAG", tyxe.SWAG_BNN(net, prior, likelihood, rank), draws, faster, beta=beta)
run("Laplace", tyxe.LaplaceBNN(mode, prior, likelihood), draws)
run("last layer, Laplace", tyxe.LaplaceBNN(mode, head, likelihood), draws)
guide = partial(tyxe.guides.AutoNormal, init_scale=1e-4)
capped = partial(guide, max_guide_scale=0.1)
fit = {"draws": draws, "beta": beta, "lr_multipliers": {"scale": 10}}  # scales start small
mean_field = run("mean field", variational(ml, prior, capped), handler=local, **fit)
fixed = partial(capped, train_loc=False)
run("mean field, sd only", variational(ml, prior, fixed), handler=local, **fit)
ivon = partial(tyxe.optim.IVON, lr=0.03, betas=(0.9, 0.999), hess_init=0.5)
run("mean field, IVON", variational(net, prior, guide), draws, ivon, beta=beta)
frozen = ml.requires_grad_(False)
run("last layer, mean field", variational(frozen, head, guide), handler=local, **fit)
guide = partial(pyro.infer.autoguide.AutoLowRankMultivariateNormal, rank=10, init_scale=1e-4)
run("last layer, low rank", variational(frozen, head, guide), **fit)
kernel = partial(tyxe.samplers.SGHMC, lr=0.1, temperature=beta, schedule="cyclical")
thinning = max(len(loader) * epochs // (5 * draws), 1)  # the run is as long as it has to be
run("SGHMC", tyxe.MCMC_BNN(net, prior, likelihood, kernel), draws, thinning=thinning)
settings = {"data": args.data, "training images": len(train[0]), "test images": len(test[0])}
settings |= {"epochs": epochs, "draws": draws, "beta": beta}
versions = {"python": platform.python_version(), "tyxe": tyxe.__version__}
versions |= {"torch": torch.__version__, "pyro": pyro.__version__}
machine = {"system": platform.system(), "processor": platform.processor() or platform.machine()}
machine |= {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
content = {"command": shlex.join(["python", "examples/quickstart.py", *sys.argv[1:]])}
content |= {"seed": args.seed, "versions": versions, "machine": machine, "settings": settings}
path, figure = args.out / f"quickstart_{args.data}", tyxe.plotting.calibration_and_entropy
args.out.mkdir(parents=True, exist_ok=True)
figure(results, min_count=5).savefig(f"{path}.png", dpi=120)
Path(f"{path}.json").write_text(json.dumps(content | {"rows": rows}, indent=2) + "\n")
told = tyxe.diagnostics.diagnose(mean_field, loader, [validation], beta=beta).summary
print(*said, f"mean field: {told}", sep="\n")
print(f"wrote {path}.png and {path}.json")
