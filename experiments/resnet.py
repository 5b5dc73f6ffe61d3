"""ResNet-18 on CIFAR-10 in ten ways, a line or two each, and SVHN as what it does not know [T 5.3].

torchvision's net with a stem for small images (3x3, no max-pooling). `inference` below has all that
differs: prior, guide or approximation, and handler.

  ml, map                 maximum likelihood; the maximum of the posterior
  mean-field              all convolutions and the head; means start at ml. sd-only: they stay there
  last-layer-...          the head alone, the rest frozen as ml has it (laplace: as map has it)
  laplace-kron            Kronecker-factored, about map; precision of most evidence, linearised net
  variational-laplace     by curvature, without draws, ReLU smoothed; about ml, mean network [VL]
  inducing                M x M inducing weights in each layer; starts at random

Flips, and crops of images reflected by 4 pixels; Adam, its rate cut by ten after two thirds of the
epochs (what starts at ml takes the first two thirds); BatchNorm deterministic; local
reparameterisation, within which mean fields are predicted as well, besides by "weights drawn";
inducing weights have no KL for a third of the epochs, and a growing one for a sixth. On a GPU
training is in bfloat16 (autocast) and channels-last. After each epoch there is a checkpoint, from
which a stopped run goes on as if it had not been. Seconds to train are less those of what a row
starts from; OOD AUROC is of the maximal probability.
"""

import math
import sys
import time
from contextlib import nullcontext
from functools import cache, partial

import common
import runner
import tables
import torch
from common import normal
from pyro.infer.autoguide import AutoLowRankMultivariateNormal
from torch import nn

import tyxe
from tyxe import LaplaceBNN, VariationalBNN, metrics, plotting
from tyxe.plotting.axes import PALETTE
from tyxe.poutine import local_reparameterization, variational_laplace
from tyxe.priors import LayerwiseNormalPrior

# What each inference starts from.
STARTS = {"ml": None, "map": None, "mean-field": "ml", "mean-field-sd-only": "ml"}
STARTS |= {"last-layer-mean-field": "ml", "last-layer-low-rank": "ml", "last-layer-laplace": "map"}
STARTS |= {"laplace-kron": "map", "variational-laplace": "ml", "inducing": None}
# Settings that not every inference depends on.
SCALED = ["mean-field", "mean-field-sd-only", "last-layer-mean-field", "last-layer-low-rank"]
LOCAL = SCALED[:3]  # mean fields, by local reparameterisation
OWN = {"rank": ["last-layer-low-rank"], "M": ["inducing"], "max lambda": ["inducing"]}
OWN |= {"scale multiplier": [*SCALED, "variational-laplace", "inducing"]}
OWN |= {"max scale": SCALED[:2], "max scale of U": ["inducing"]}
ANNEALED = ("without", "of growing")
FORMATS = {"NLL": ".3f", "accuracy %": ".2f", "ECE %": ".2f", "OOD AUROC": ".3f"}
# [T tab. 5.1], in the order of the columns.
PAPER = runner.SETTINGS["resnet"]["paper"]


def check(s):
    try:
        torch.zeros(0, device=s.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {s.device}: {str(error).splitlines()[0]}") from None


def is_low_precision(s):
    return s.amp == "on" or (s.amp == "gpu" and s.device.startswith("cuda"))


def settings_of(s, name):
    """Return what an inference depends on: its schedule, and the settings that it reads."""
    read = experiment.recorded(s).items()
    found = {key: value for key, value in read if name in OWN.get(key, [name])}
    cut = round(s.epochs * 2 / 3)
    found |= {"epochs": cut if STARTS[name] else s.epochs, "cut": cut}
    found["beta"] = s.beta.get(name, 1.0)
    if name in s.max_scale:
        found["max scale"] = s.max_scale[name]
    if name == "inducing":
        parts = zip(ANNEALED, (3, 6), strict=True)
        found |= {f"epochs {kind} KL": s.epochs // part for kind, part in parts}
    return found


@cache
def load(s):
    """Return training and test pairs, and images of SVHN, each normalised by its own statistics."""
    if s.smoke_test:
        own = torch.Generator().manual_seed(0)
        sets = [torch.randn(n, 3, 32, 32, generator=own) for n in (40, 30, 20)]
        return [(x, torch.arange(len(x)) % 10) for x in sets[:2]], sets[2]
    (x, y), test = (common.images("cifar10_subset", split) for split in ("train", "test"))
    unknown = common.images("svhn_subset", "test")[0]
    if len(unknown) < 1_000:  # of a local subset, all
        unknown = torch.cat([unknown, common.images("svhn_subset", "train")[0]])
    if (count := s.training_images or len(x)) > len(x):
        sys.exit(f"--training-images is {count:,}, but there are {len(x):,}")
    standardised = common.standardised(x[:count])
    pairs = common.first((x, y), count), test
    pairs = [(standardised(x).to(s.device), y.to(s.device)) for x, y in pairs]
    return pairs, common.standardised(unknown)(unknown).to(s.device)


def make_net(width, stem, device="cpu", channels_last=False):
    """Return torchvision's `resnet18` for ten classes, or a narrower net of its blocks."""
    try:
        from torchvision.models.resnet import BasicBlock, resnet18
    except ImportError as error:
        sys.exit(f'the nets are torchvision\'s ({error}): pip install -e ".[vision]"')
    net = resnet18(num_classes=10)
    if width != 64:
        net.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        net.bn1, net.inplanes = nn.BatchNorm2d(width), width
        for i in range(4):
            layer = net._make_layer(BasicBlock, width * 2**i, 2, stride=2 if i else 1)
            setattr(net, f"layer{i + 1}", layer)
        net.fc = nn.Linear(8 * width, 10)
    if stem != "imagenet":
        stride = {"cifar": 1, "strided": 2}[stem]
        net.conv1 = nn.Conv2d(3, width, 3, stride, padding=1, bias=False)
        net.maxpool = nn.Identity()
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    kept = torch.channels_last if channels_last else torch.preserve_format
    return net.to(device, memory_format=kept)


def inference(s, name, net, likelihood):
    """Return the BNN of an inference about a net, and the handler that it is fitted in."""
    norms = {"hide_module_types": [nn.BatchNorm2d]}
    weights, head = normal(**norms), normal(expose=["fc.*"])
    layerwise, narrow = LayerwiseNormalPrior("radford", **norms), {"init_scale": 1e-4}
    if name.startswith("last-layer"):
        net.requires_grad_(False)
    handler = local_reparameterization if name in LOCAL else nullcontext
    match name:
        case "ml":
            prior, guide = normal(hide_all=True), None
        case "map":
            prior, guide = weights, common.point(net)
        case "mean-field" | "mean-field-sd-only":
            how = {"max_guide_scale": s.max_scale[name], "train_loc": name == "mean-field"}
            prior, guide = weights, common.mean_field(net, **narrow, **how)
        case "last-layer-mean-field":
            prior, guide = head, common.mean_field(net, **narrow)
        case "last-layer-low-rank":
            kind = {"guide": AutoLowRankMultivariateNormal, "rank": s.rank}
            prior, guide = head, common.mean_field(net, **kind, **narrow)
        case "last-layer-laplace":
            return LaplaceBNN(net, head, likelihood, structure="full"), handler
        case "laplace-kron":
            return LaplaceBNN(net, weights, likelihood, structure="kron"), handler
        case "variational-laplace":
            start = {"init_scale": tyxe.guides.scale_below_prior()}
            prior, guide = layerwise, common.mean_field(net, **start)
            tyxe.util.replace_activations_(net, nn.ReLU, partial(nn.Softplus, beta=10))
            handler = variational_laplace
        case "inducing":
            how = {"inducing_rows": s.M, "inducing_cols": s.M, "max_lambda": s.max_lambda}
            how |= {"max_scale_u": s.max_scale_of_U, "everywhere": True}
            prior, guide = layerwise, partial(tyxe.guides.AutoInducing, **how)
    return VariationalBNN(net, prior, likelihood, guide), handler


def now(s):
    """Return seconds of CPU time, or on a GPU of real time."""
    if s.device.startswith("cuda"):
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def fit(s, bnn, handler, batches, settings, path):
    """Fit from the last checkpoint on, making one after each epoch; return losses and seconds."""
    found, start, cut = {"losses": [], "train s": 0.0}, now(s), common.cut_at(settings["cut"])
    if path.exists():
        saved = torch.load(path, map_location=s.device, weights_only=True)
        if saved["settings"] != settings:
            sys.exit(f"{path} is of other settings: name other --checkpoints, or remove it")
        bnn.load_checkpoint(saved["bnn"])
        found = saved["found"]
    first, last, before = len(found["losses"]), settings["epochs"], found["train s"]
    growing = common.annealed(*(settings.get(f"epochs {kind} KL", 0) for kind in ANNEALED))

    def save(bnn, epoch, loss):
        cut(bnn, epoch, loss)
        found["losses"].append(loss)
        found["train s"] = before + now(s) - start
        content = {"settings": settings, "found": found, "bnn": bnn.checkpoint()}
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)  # a run may be killed while it writes
        return epoch + 1 == first + (s.stop_after or last)

    if first < last:
        adam = partial(torch.optim.Adam, lr=settings["rate"])
        how = {"lr_multipliers": {"scale": settings.get("scale multiplier", 1)}}
        how["beta"] = lambda epoch: settings["beta"] * growing(epoch)
        kind = torch.device(s.device).type
        with handler(), torch.autocast(kind, torch.bfloat16, enabled=is_low_precision(s)):
            bnn.fit(batches, adam, last - first, save, **how)
    if len(found["losses"]) < last:
        sys.exit(f"{path.stem}: stopped after {len(found['losses'])} of {last} epochs")
    return found


def fitted(s, name, seed):
    """Return the BNN of an inference, fitted or from its checkpoint, its handler, what it took."""
    torch.manual_seed(seed)
    net = make_net(s.width, s.stem, s.device, is_low_precision(s))
    if STARTS[name] is not None:
        net = fitted(s, STARTS[name], seed)[0].to_module()
    torch.manual_seed(seed)
    train = load(s)[0][0]
    bnn, handler = inference(s, name, net, tyxe.likelihoods.Categorical(len(train[1])))
    if isinstance(bnn, LaplaceBNN):
        start = now(s)
        bnn.fit_curvature(common.Batches(*train, s.batch))
        precision = bnn.optimize_prior_precision().item()
        return bnn, handler, {"prior precision": precision, "train s": now(s) - start}
    file = f"resnet{'_published' if s.published else ''}_{name}_{seed}.pt"
    path = (s.checkpoints or s.out / "checkpoints") / file
    batches = common.Batches(*train, s.batch, common.crops)
    return bnn, handler, fit(s, bnn, handler, batches, settings_of(s, name), path)


def scores(s, bnn, seed, how):
    ((_, (x, targets)), unknown), levels = load(s), torch.linspace(0, 1, 101)
    torch.manual_seed(seed)
    known, unknown = (bnn.predict(images, **how).softmax(-1).cpu() for images in (x, unknown))
    targets = targets.cpu()
    curves = metrics.calibration_curve(known, targets)._asdict()
    for name, probs in (("test", known), ("OOD", unknown)):
        curves[f"{name} entropy quantiles"] = metrics.predictive_entropy(probs).quantile(levels)
    row = {"OOD AUROC": metrics.ood_auroc(known.amax(-1), unknown.amax(-1)).item()}
    row["curves"] = {name: tables.rounded(values) for name, values in curves.items()}
    return tables.scores(known, targets) | row


def run(s, name, seed):
    bnn, handler, found = fitted(s, name, seed)
    is_point = name in ("ml", "map", "variational-laplace")
    how = {"num_predictions": 0 if is_point else s.draws, "batch_size": s.batch}
    start = now(s)
    with (nullcontext if is_point else handler)():
        cell = scores(s, bnn, seed, how)
    cell |= {**found, "predict s": now(s) - start, "settings": settings_of(s, name)}
    if name.startswith("mean-field"):  # as one draw for all images, too
        cell["weights drawn"] = scores(s, bnn, seed, how)
    return cell


def table(record):
    chosen, rows = record.content["settings"], {}
    for name in STARTS:
        own = [*record.of(name).values()]
        drawn = [cell["weights drawn"] for cell in own if "weights drawn" in cell]
        found = {name: own, f"{name}, weights drawn": drawn}
        rows |= {title: cells for title, cells in found.items() if cells}
    said = f"Width {chosen['width']}, {chosen['epochs']} epochs, "
    said += f"{chosen['training images'] or 'all'} training images; in brackets the paper."
    forms = FORMATS | {"train s": ".0f", "predict s": ".1f"}
    return f"{said}\n\n{tables.score_table(rows, forms, PAPER, ['seeds'])}"


def figure(record):
    drawn, (left, right) = tables.subplots(1, 2, figsize=(9, 5))
    left.plot([0, 1], [0, 1], color="0.6", linestyle="dashed", linewidth=1)
    found = {name: [*record.of(name).values()] for name in STARTS}
    found = {name: cells[0] for name, cells in found.items() if cells}
    for color, (name, cell) in zip(PALETTE, found.items(), strict=False):
        curves = cell["curves"]
        # The accuracy of a few points says nothing.
        bins = zip(curves["confidence"], curves["accuracy"], curves["counts"], strict=True)
        points = [(x, y) for x, y, count in bins if count >= 10]
        label = f"{name} (ECE {cell['ECE %']:.1f} %)"
        left.plot(*zip(*points, strict=True), color=color, marker="o", markersize=4, label=label)
        for part, style in (("test", "solid"), ("OOD", "dashed")):
            entropy = torch.tensor(curves[f"{part} entropy quantiles"])
            look = {"linestyle": style, "color": color, "max_entropy": math.log(10)}
            plotting.entropy_ecdf(entropy, right, **look)
    left.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.02), ylim=(0, 1.02))
    right.set(title="CIFAR-10 test set solid, SVHN dashed")
    drawn.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return drawn


cells, choices = runner.every(run, inference="inference", seed="seeds"), {"inference": STARTS}
experiment = runner.Experiment("resnet", cells, table, figure, choices=choices, check=check)
