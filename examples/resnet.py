"""ResNet-18 on CIFAR-10 in ten ways, each a line or two, and SVHN as what it does not know [T 5.3].

torchvision's ResNet-18 with a stem for small images (3x3, no max-pooling). The function `inference`
below has all that differs: prior, guide or approximation, and handler.

  ml, map                 maximum likelihood; the maximum of the posterior
  mean-field              all convolutions and the head; means start at ml. sd-only: they stay there
  last-layer-...          the head alone, the rest frozen as ml has it (laplace: as map has it)
  laplace-kron            Kronecker-factored, about map
  variational-laplace     a mean field by curvature, without draws, with ReLU smoothed; about ml
  inducing                M x M inducing weights in each layer; starts at random

Settings are those of [T]: batches of 100; flips, and crops of images reflected by 4 pixels; Adam,
200 epochs at 1e-3 and 100 at 1e-4 for what starts at random, 200 at 1e-3 for what starts at ml; a
N(0, 1) prior, BatchNorm deterministic; local reparameterisation, standard deviations from 1e-4 to
0.1 at most; rank 10; 32 draws, within the handler as in training, and for mean fields of weights as
well. Variational Laplace and inducing weights have the prior N(0, 1 / fan-in). The former starts at
standard deviations of e^-3 of its, has beta 0.1 and predicts by the mean network [VL]; the latter
have no KL for a third of the epochs, and a growing one for a sixth. Laplace: the prior precision of
most evidence, the linearised net. Norms take the statistics of the batch in training, draws and
all, and their running averages in prediction; in a frozen net they stay. On a GPU training is in
bfloat16 (autocast) and channels-last.

--cpu is a reduction to an hour and a quarter of one core: a stem with stride 2 (1), width 16 (64),
48 epochs (300: now 32 and 16), M = 16 (64), standard deviations of at most 0.05 or, sd-only, 0.03
(0.1), which learn ten times as fast as means (as fast), for lack of steps; beta 0.02 (0.1). The
local files have 10,000 and 2,000 images of CIFAR-10 that went through JPEG (50,000 and 10,000) and
1,040 of SVHN (26,032); where they are missing, torchvision downloads the whole sets.

Columns: NLL (nats), accuracy, ECE (15 bins), area under the ROC curve of the maximal probability;
seconds (of one core, or of a GPU) to train, less those of what a row starts from, and to predict
both sets. After each epoch there is a checkpoint, from which a stopped run goes on as if it had not
been; ml and map are fitted once for all that start there. Cells that --out has are not run again.
"""

import argparse
import json
import warnings
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path

import _extras  # noqa: F401
import pyro.distributions as dist
import torch
from _inducing_images import Batches
from _record import environment
from _resnet import KINDS, PUBLISHED, STARTS, Clock, chosen, fit, load, make_net, noise, own
from _resnet_report import COLUMNS, reported, same, scores, summary
from pyro.infer.autoguide import AutoDelta, AutoLowRankMultivariateNormal
from torch import nn

import tyxe
from tyxe import LaplaceBNN, VariationalBNN
from tyxe.guides import AutoInducing, AutoNormal, PretrainedInitializer, scale_below_prior
from tyxe.poutine import local_reparameterization, variational_laplace
from tyxe.priors import IIDPrior, LayerwiseNormalPrior

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--inference", nargs="+", choices=STARTS, metavar="NAME", help="of those above (default: all)"
)
parser.add_argument("--cpu", action="store_true", help="the reduced settings, see above")
parser.add_argument("--width", type=int, help="number of channels of the first layers")
parser.add_argument("--epochs", type=int, help="of what starts at random; others: two thirds")
parser.add_argument("--subset", type=int, help="number of training images (default: all)")
parser.add_argument("--stem", choices=["cifar", "strided", "imagenet"], help="of the net")
parser.add_argument("--seeds", type=int, default=1, help="number of seeds (default: 1)")
parser.add_argument("--device", default="cpu", help="where to compute (default: cpu)")
parser.add_argument("--amp", choices=["on", "off"], help="bfloat16, channels-last (default: GPU)")
parser.add_argument("--stop-after", type=int, metavar="N", help="stop N epochs from here")
parser.add_argument("--table", action="store_true", help="only print the tables of what --out has")
parser.add_argument("--figure", action="store_true", help="only draw the figures of what --out has")
parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results")
parser.add_argument("--checkpoints", type=Path, help="their folder (default: that in --out)")
parser.add_argument("--smoke-test", action="store_true", help="a tiny net on noise: no result")
args = parser.parse_args()


def inference(name, net, likelihood):
    """Return the BNN of an inference about a net, and the handler that it is fitted in."""
    normal, at_net = dist.Normal(0, 1), PretrainedInitializer.from_net(net)
    weights = IIDPrior(normal, hide_module_types=[nn.BatchNorm2d])
    narrow = partial(AutoNormal, init_loc_fn=at_net, init_scale=1e-4)
    capped = partial(narrow, max_guide_scale=settings["max scale"].get(name))
    layerwise = LayerwiseNormalPrior("radford", hide_module_types=[nn.BatchNorm2d])
    head = IIDPrior(normal, expose=["fc.*"])
    if name.startswith("last-layer"):
        net.requires_grad_(False)
    match name:
        case "ml":
            prior = IIDPrior(normal, hide_all=True)
            return VariationalBNN(net, prior, likelihood), nullcontext
        case "map":
            guide = partial(AutoDelta, init_loc_fn=at_net)
            return VariationalBNN(net, weights, likelihood, guide), nullcontext
        case "mean-field":
            return VariationalBNN(net, weights, likelihood, capped), local_reparameterization
        case "mean-field-sd-only":
            guide = partial(capped, train_loc=False)
            return VariationalBNN(net, weights, likelihood, guide), local_reparameterization
        case "last-layer-mean-field":
            return VariationalBNN(net, head, likelihood, narrow), local_reparameterization
        case "last-layer-low-rank":
            guide = partial(AutoLowRankMultivariateNormal, rank=settings["rank"], **narrow.keywords)
            return VariationalBNN(net, head, likelihood, guide), nullcontext
        case "last-layer-laplace":
            return LaplaceBNN(net, head, likelihood, structure="full"), nullcontext
        case "laplace-kron":
            return LaplaceBNN(net, weights, likelihood, structure="kron"), nullcontext
        case "variational-laplace":
            tyxe.util.replace_activations_(net, nn.ReLU, partial(nn.Softplus, beta=10))
            guide = partial(AutoNormal, init_loc_fn=at_net, init_scale=scale_below_prior())
            return VariationalBNN(net, layerwise, likelihood, guide), variational_laplace
        case "inducing":
            caps = {"max_lambda": settings["max lambda"], "max_scale_u": settings["max scale of U"]}
            sizes = {"inducing_rows": settings["M"], "inducing_cols": settings["M"]}
            guide = partial(AutoInducing, everywhere=True, **sizes, **caps)
            return VariationalBNN(net, layerwise, likelihood, guide), nullcontext


@cache
def data():
    """Return all images."""
    try:
        return noise() if args.smoke_test else load(settings, args.device)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))


def fitted(name, seed):
    """Return the BNN of an inference, fitted or from its checkpoint, its handler, what it took."""
    torch.manual_seed(seed)
    net = make_net(settings["width"], settings["stem"], args.device, args.amp == "on")
    if STARTS[name] is not None:
        net = fitted(STARTS[name], seed)[0].to_module()
    torch.manual_seed(seed)
    bnn, handler = inference(name, net, tyxe.likelihoods.Categorical(len(data().train[1])))
    batches = partial(Batches, *data().train, settings["batch"])
    file = files / f"{kind}_{name}_{seed}.pt"
    if isinstance(bnn, LaplaceBNN):
        clock = Clock(args.device)
        bnn.fit_curvature(batches(augment=False))
        precision = bnn.optimize_prior_precision().item()
        return bnn, handler, {"prior precision": precision, "train s": clock()}
    how = {"stop_after": args.stop_after, "amp": args.amp == "on"}
    found = fit(bnn, handler, batches(augment=True), own(settings, name), file, **how)
    return bnn, handler, found


def run(name, seed):
    """Return a cell of the JSON."""
    bnn, handler, found = fitted(name, seed)
    is_point = name in ("ml", "map", "variational-laplace")
    how = {"num_predictions": 0 if is_point else settings["draws"], "batch_size": settings["batch"]}
    clock = Clock(args.device)
    torch.manual_seed(seed)
    with (nullcontext if is_point else handler)():
        cell = scores(bnn, data(), how)
    cell |= {**found, "predict s": clock(), "settings": own(settings, name)}
    if name.startswith("mean-field"):  # as one draw for all images, too
        torch.manual_seed(seed)
        cell["weights drawn"] = scores(bnn, data(), how)
    return cell


def main():
    """Run the cells that are missing, writing the JSON after each."""
    content = json.loads(path.read_text()) if path.exists() else {}
    before = content.get("cells", {})
    cells = {name: same(before.get(name, {}), own(settings, name)) for name in STARTS}
    about = environment(None, content.get("commands", []))
    for seed in map(str, range(args.seeds)):
        for name in args.inference or STARTS:
            if seed in cells[name]:
                continue
            cells[name][seed] = cell = run(name, int(seed))
            found = ", ".join(f"{column} {cell[column]:.3f}" for column in COLUMNS)
            print(f"seed {seed}, {name}: {found}", flush=True)
            content = {**about, "settings": settings}
            content |= {"published settings": PUBLISHED, "summary": summary(cells), "cells": cells}
            args.out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, indent=1) + "\n")


kind, settings = chosen(args, parser)
path, files = args.out / f"{kind}.json", args.checkpoints or args.out / "checkpoints"
torch.set_num_threads(1)
# A prior on so many weights dwarfs few images; that is what the cap is for.
warnings.filterwarnings("ignore", "the weighted KL", tyxe.TyxeWarning)
if not (is_report := args.table or args.figure):
    main()
reports = [args.out / f"{name}.json" for name in (KINDS if is_report else [kind])]
if not any(report.exists() for report in reports):
    parser.error(f"there is no {path}; run without --table and --figure first")
print("\n\n".join(reported(path, not args.table) for path in reports if path.exists()))
