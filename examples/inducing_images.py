"""Inducing weights on images: accuracy, calibration, unknown and corrupted images, and pruning.

After [T 4.2.4]. The methods: a deterministic net, an ensemble of five, a mean field of the weights
(FFG-W), a mean field of inducing weights (FFG-U), and an ensemble of them (ensemble-U). BatchNorm
stays deterministic. FFG-W has the prior N(0, 1), starts at a net's values with standard deviations
of 1e-4, and caps them at 0.1; U has the prior N(0, 1 / columns), starts at random, M x M inducing
weights in every layer, caps lambda at 0.03 (0.1 in the ensemble) and standard deviations at 0.1.
The KL counts for nothing at first; then its weight grows to 1. Then FFG-U is fitted on with half
and with a quarter of its maps' entries, FFG-W with a tenth and a hundredth of its weights.

Columns: accuracy, negative log-likelihood (NLL, nats an image), expected calibration error (ECE, 10
bins), Brier score, area under the ROC curve of the maximal probability against other images (MNIST
and notMNIST; SVHN for CIFAR-10), the number of parameters to store; and, at levels 1, 3 and 5,
accuracy and ECE of test images corrupted by noise, blur, brightness and contrast, averaged over the
four. Mean and standard error over seeds. --parts ablation fits FFG-U with other M, caps of lambda
(0: weights are a function of U) and caps of standard deviations (0: U is a point), and draws them.

Reduced for a CPU, in brackets what --published sets: 3,000 training images (50,000), 2,000 test
images (10,000), no augmentation (crops and flips), a residual net of seven convolutions, 78
thousand weights (ResNet-50; --net resnet18), M = 16 (64), 20 epochs of Adam at 1e-3 for the
deterministic net (200 at 3e-4), 30 at 3e-3 for FFG-W (200 at 3e-4), 40 at 3e-3 for U (300 at 1e-3),
8 at 1e-3 for what is pruned (50 at 1e-4), 30 at 3e-3 in the ablation (100 at 3e-4). Rates are
divided by ten once (U's alone), and those of scales multiplied by ten (not), which else would not
get to their caps. 10 epochs are without KL, over 5 its weight grows (100 and 50; 50 and 40 in the
ablation). Corruptions of ours (the paper: 19 types). FashionMNIST stands in for CIFAR-10, whose
local files are a fifth of it; 20 draws in predictions. Settings were chosen on training images that
are not trained on. Cells that the JSON in --out holds, with the same settings, are not run again.
"""

import argparse
import copy
import json
import time
import warnings
from functools import partial
from pathlib import Path

import _extras  # noqa: F401
import pyro
import pyro.distributions as dist
import torch
from _inducing_images import (
    PUBLISHED,
    REDUCED,
    SMOKE,
    Batches,
    load,
    make_net,
    scores,
    scores_elsewhere,
)
from _inducing_report import earlier, figure, summary, tables
from _record import environment
from torch import nn

import tyxe
from tyxe.guides import AutoInducing, AutoNormal, PretrainedInitializer, parameter_count

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--data", choices=["fashion_mnist", "cifar10"], default="fashion_mnist", help="the images"
)
parser.add_argument(
    "--parts", nargs="+", choices=["table", "ablation"], default=["table"], help="what to run"
)
parser.add_argument("--published", action="store_true", help="the published settings, see above")
parser.add_argument(
    "--net", choices=["resnet18", "resnet50"], help="torchvision's, for --published"
)
parser.add_argument("--seeds", type=int, help="number of seeds (default: 3; of the ablation 1)")
parser.add_argument("--device", default="cpu", help="where to compute (default: cpu)")
parser.add_argument("--table", action="store_true", help="only print the table of what --out has")
parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results")
parser.add_argument(
    "--smoke-test", action="store_true", help="a tiny net on scikit-learn's digits: no result"
)
args = parser.parse_args()
settings = SMOKE if args.smoke_test else PUBLISHED if args.published else REDUCED
if args.net is not None:
    settings = settings | {"net": args.net}
if args.smoke_test:
    args.data = "digits"
torch.set_num_threads(1)
# The KL of tens of thousands of weights dwarfs few data; that is what the caps are for.
warnings.filterwarnings("ignore", "the weighted KL", tyxe.TyxeWarning)
NORMS = {"hide_module_types": [nn.BatchNorm2d]}


def bnn_of(net, prior, guide, points):
    """Return a classifier on the device."""
    likelihood = tyxe.likelihoods.Categorical(points)
    return tyxe.VariationalBNN(net, prior, likelihood, guide).to(args.device)


def new_net(data):
    """Return a net for the images."""
    return make_net(settings["net"], data.train[0].shape[1])


def deterministic(net, points):
    """Return a BNN without a posterior."""
    return bnn_of(net, tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True), None, points)


def ffg_w(net, points):
    """Return a mean field about a net."""
    start = PretrainedInitializer.from_net(net)
    cap = settings["max scale"]
    guide = partial(AutoNormal, init_loc_fn=start, init_scale=1e-4, max_guide_scale=cap)
    return bnn_of(net, tyxe.priors.IIDPrior(dist.Normal(0, 1), **NORMS), guide, points)


def inducing(net, points, kind="diagonal", **changed):
    """Return inducing weights in every layer, with M, caps of lambda and sigma as they are set."""
    m, cap = changed.get("M", settings["M"]), settings["max scale"]
    if kind == "ensemble":  # of one member in the ablation: a point
        options = {"ensemble_size": 1 if changed else settings["members"]}
    else:
        options = {"max_scale_u": changed.get("sigma", cap)}
    guide = partial(
        AutoInducing,
        inducing_rows=m,
        inducing_cols=m,
        q_inducing=kind,
        everywhere=True,
        max_lambda=changed.get("lambda", settings["max lambda"][kind]),
        **options,
    )
    return bnn_of(net, tyxe.priors.LayerwiseNormalPrior("radford", **NORMS), guide, points)


def fit(bnn, data, how):
    """Fit with Adam, its rate cut once, and the KL annealed; `how` is an entry of the settings."""
    free, annealed = how.get("free", 0), how.get("annealed", 0)

    def cut(bnn, epoch, loss):
        if epoch + 1 == how["decay at"]:
            for group in bnn.optimizer.param_groups:
                group["lr"] /= 10

    x, y = data.train
    return bnn.fit(
        Batches(data.normalised(x), y, settings["batch"], settings["augmentation"]),
        partial(torch.optim.Adam, lr=how["rate"]),
        how["epochs"],
        cut,
        # 0 for the free epochs, 1 after the annealed ones.
        beta=lambda epoch: min(max((epoch - free + 1) / (annealed + 1), 0.0), 1.0),
        lr_multipliers={"scale": settings["scale multiplier"]},
        progress=False,
    )


def probabilities(bnns, data, x):
    """Return class probabilities, averaged over BNNs."""
    x = data.normalised(x)
    draws = 1 if bnns[0].net_guide is None else settings["draws"]
    each = [bnn.predict(x, num_predictions=draws, batch_size=500) for bnn in bnns]
    return torch.stack(each).softmax(-1).mean(0)


def scored(bnns, data, elsewhere=True):
    """Return the table's row of an average of BNNs; its numbers of other images cost most time."""
    predict = partial(probabilities, bnns, data)
    row = scores(predict, data) | (scores_elsewhere(predict, data) if elsewhere else {})
    return row | {"parameters": sum(map(stored, bnns))}


def stored(bnn):
    """Return the number of a BNN's parameters: of its guide, and of what no guide stands for."""
    own = sum(p.numel() for p in bnn.net.parameters() if p.requires_grad)
    return own + (parameter_count(bnn.net_guide) if bnn.net_guide else 0)


def plain(data):
    """Fit deterministic nets; return the rows of one and of all."""
    nets = []
    for _ in range(settings["members"]):
        nets.append(deterministic(new_net(data), len(data.train[1])))
        fit(nets[-1], data, settings["deterministic"])
    return {"deterministic": scored(nets[:1], data), "ensemble": scored(nets, data)}


def pruned(bnn, data, prune, keep):
    """Prune a copy, fit it on under the mask, and return its row."""
    smaller = copy.deepcopy(bnn)
    prune(smaller.net_guide, keep=keep)
    fit(smaller, data, settings["pruned"])
    return scored([smaller], data, elsewhere=False)


def bayesian(data, name, make, how, prune=None, keeps=(), elsewhere=True):
    """Fit one posterior; return its row, and those after pruning."""
    bnn = make(new_net(data), len(data.train[1]))
    history = fit(bnn, data, settings[how])
    rows = {name: scored([bnn], data, elsewhere) | {"KL": history.kl[-1], "loss": history.loss[-1]}}
    for keep in keeps:
        rows[f"{name}, {100 * keep:g} % kept"] = pruned(bnn, data, prune, keep)
    return rows


prune_w, prune_u = tyxe.guides.prune_, tyxe.guides.prune_inducing_
ensemble_u = partial(inducing, kind="ensemble")
CELLS = {
    "plain": plain,
    "FFG-W": partial(
        bayesian, name="FFG-W", make=ffg_w, how="weights", prune=prune_w, keeps=(0.1, 0.01)
    ),
    "FFG-U": partial(
        bayesian, name="FFG-U", make=inducing, how="inducing", prune=prune_u, keeps=(0.5, 0.25)
    ),
    "ensemble-U": partial(bayesian, name="ensemble-U", make=ensemble_u, how="inducing"),
}


def ablated(data, **changed):
    """Fit FFG-U with other settings; return its row. Without standard deviations, U is a point."""
    make = partial(inducing, kind="diagonal" if changed["sigma"] else "ensemble", **changed)
    return bayesian(data, "FFG-U", make, "ablation", elsewhere=False)


def ablation_base():
    """Return what is not changed while something else is."""
    largest = max(settings["ablation M"])
    cap = settings["max scale"]
    return {"M": largest, "lambda": settings["max lambda"]["diagonal"], "sigma": cap}


def ablation():
    """Return the cells of the ablation by name."""
    found = {}
    for name, start in ablation_base().items():
        for value in {*settings[f"ablation {name}"], start}:
            changed = ablation_base() | {name: value}
            title = ", ".join(f"{key} {number:g}" for key, number in sorted(changed.items()))
            found[title] = partial(ablated, **changed)
    return found


def jobs():
    """Yield what to run: the part, the seed, the cell's name and its function."""
    defaults = {"table": settings["seeds"], "ablation": settings["ablation seeds"]}
    for part in args.parts:
        for seed in range(args.seeds or defaults[part]):
            for name, run in (CELLS if part == "table" else ablation()).items():
                yield part, str(seed), name, run


def main():
    """Run the cells that are missing, writing the JSON after each."""
    content, data = earlier(path, settings), None
    path.parent.mkdir(parents=True, exist_ok=True)
    for part, seed, name, run in jobs():
        cells = content.setdefault(part, {}).setdefault(seed, {})
        if name in cells:
            continue
        data = data or load(args.data, settings, args.device)
        pyro.set_rng_seed(int(seed))
        start = time.process_time()
        cells[name] = {"rows": (rows := run(data))}
        cells[name]["seconds"] = round(time.process_time() - start, 1)
        found = ", ".join(f"{n}: {r['accuracy %']:.2f} {r['NLL']:.3f}" for n, r in rows.items())
        print(f"{part}, seed {seed}: {found} ({cells[name]['seconds']:.0f} s)", flush=True)
        content |= {
            **environment(None, content.get("commands", [])),
            "settings": settings,
            "published settings": PUBLISHED,
            "ablation base": ablation_base(),
            "summary": summary(content.get("table", {})),
        }
        path.write_text(json.dumps(content, indent=1) + "\n")


path = args.out / f"inducing_{args.data}{'_' + settings['net'] if args.published else ''}.json"
if args.table and not path.exists():
    parser.error(f"there is no {path}; run without --table first")
if not args.table:
    main()
    figure(path)
print(tables(path))
