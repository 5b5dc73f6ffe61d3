"""Inducing weights on images: accuracy, calibration, unknown and corrupted images [T 4.2.4].

`inducing_images`: a deterministic net, an ensemble of five, a mean field of the weights (FFG-W),
one of inducing weights (FFG-U), and an ensemble of these (ensemble-U); BatchNorm stays
deterministic. FFG-W starts at a net's values, U at random, M x M inducing weights in every layer.
Standard deviations and lambda have caps. The KL counts for nothing in the "free" epochs, and its
weight grows over the "annealed" ones. Then FFG-U is fitted on with half and with a quarter of its
maps' entries, FFG-W with a tenth and a hundredth of its weights. `--parts ablation` [T fig. 4.10]
fits FFG-U with other M, caps of lambda (0: weights are a function of U) and of standard deviations
(0: U is a point).

Other images are told by the maximal probability; accuracy and ECE of corrupted ones are at levels
1, 3 and 5. Settings were chosen on training images that are not trained on.

`corruptions`: the same nets and fits. Test images are corrupted in six ways at five levels. First
table: means over the ways, by level, 0 being the images as they are; second: means over the levels,
by way; in brackets [T], a ResNet-50 on CIFAR-10 and 19 ways.
"""

import copy
import math
import statistics
from functools import cache, partial
from itertools import product

import common
import pyro
import runner
import tables
import torch
import torch.nn.functional as F
from torch import nn

import tyxe
from tyxe import guides, metrics

FORMATS = {"accuracy %": ".2f", "NLL": ".3f", "ECE %": ".2f", "Brier": ".3f"}
PRUNED = {"FFG-W": (guides.prune_, (0.1, 0.01)), "FFG-U": (guides.prune_inducing_, (0.5, 0.25))}
ABLATED = {"M": "M", "lambda": "cap of lambda", "sigma": "cap of standard deviations of U"}


@cache
def load(s):
    """Return training and test pairs, others by name, and what normalises images.

    Training images are the first, those of the rest evenly spaced; all are in [0, 1].
    """
    train, test, unknown = common.known_and_unknown(s.data)
    others = {{"digits": "8-9", "cifar10": "SVHN"}.get(s.data, "MNIST"): unknown}
    if s.data == "fashion_mnist":
        others["notMNIST"] = common.images("notmnist", "test")[0]
    train = [part[: s.training_images].to(s.device) for part in train]
    test = [common.thinned(part, s.test_images).to(s.device) for part in test]
    others = {n: common.thinned(x, s.test_images).to(s.device) for n, x in others.items()}
    return train, test, others, common.standardised(train[0])


def noisy(x, sd, seed=None):
    own = torch.Generator().manual_seed(seed or round(1000 * sd))
    return (x + sd * torch.randn(x.shape, generator=own).to(x)).clamp(0, 1)


def blurred(x, sd):
    radius = min(4, x.shape[-1] - 1)
    kernel = (-0.5 * (torch.arange(-radius, radius + 1).to(x) / sd) ** 2).exp()
    kernel = (kernel / kernel.sum()).expand(x.shape[1], 1, 1, -1)
    x = F.pad(x, (radius,) * 4, mode="reflect")
    return F.conv2d(F.conv2d(x, kernel, groups=x.shape[1]), kernel.mT, groups=x.shape[1])


def flattened(x, contrast):
    mean = x.mean((-1, -2), keepdim=True)
    return mean + contrast * (x - mean)


def pixelated(x, share):
    """Return images of the same size with that share of the pixels of each side."""
    small = F.interpolate(x, scale_factor=share, mode="area")
    return F.interpolate(small, x.shape[-2:], mode="area")


def rounded_cosines(x, step):
    """Return images whose cosine coefficients are multiples of `step (1 + u + v)`, by frequency."""
    own = F.pad(x, (0, -x.shape[-1] % 8, 0, -x.shape[-2] % 8), "replicate")
    index = torch.arange(8.0)
    basis = (math.pi / 8 * (index + 0.5) * index[:, None]).cos() / 2
    basis[0] /= math.sqrt(2)  # orthogonal: rows are frequencies
    steps = (step * (1 + index + index[:, None])).to(x)
    blocks = own.unfold(-2, 8, 8).unfold(-2, 8, 8)  # (..., rows, columns, 8, 8)
    basis = basis.to(x)
    kept = basis.mT @ ((basis @ blocks @ basis.mT / steps).round() * steps) @ basis
    kept = kept.movedim(-2, -3).flatten(-2).flatten(-3, -2)
    return kept[..., : x.shape[-2], : x.shape[-1]].clamp(0, 1)


# Each with its strengths at levels 1 to 5.
CORRUPTIONS = {
    "noise": (noisy, (0.04, 0.08, 0.12, 0.18, 0.25)),
    "blur": (blurred, (0.5, 0.75, 1.0, 1.3, 1.6)),
    "brightness": (lambda x, more: (x + more).clamp(0, 1), (0.1, 0.175, 0.25, 0.325, 0.4)),
    "contrast": (flattened, (0.7, 0.55, 0.4, 0.3, 0.2)),
    "pixels": (pixelated, (0.8, 0.65, 0.5, 0.4, 0.3)),
    "JPEG": (rounded_cosines, (0.03, 0.06, 0.1, 0.15, 0.25)),
}


def in_four_ways(x, level):
    for way in ("noise", "blur", "brightness", "contrast"):
        change, strengths = CORRUPTIONS[way]
        yield change(x, strengths[level - 1], **({"seed": level} if way == "noise" else {}))


class Block(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2, self.shortcut = nn.BatchNorm2d(out), nn.Identity()
        if stride != 1 or channels != out:
            convolution = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(out))

    def forward(self, x):
        hidden = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(self.shortcut(x) + hidden)


def make_net(which, channels):
    """Return torchvision's ResNet with the stem that small images need, or a small one by width."""
    if which.isdigit():
        a = int(which)
        stem = nn.Conv2d(channels, a, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(a)
        blocks = Block(a, a, 1), Block(a, 2 * a, 2), Block(2 * a, 4 * a, 2)
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * a, 10)
        net = nn.Sequential(*stem, nn.ReLU(), *blocks, *head)
        return net.to(memory_format=torch.channels_last)
    import torchvision

    net = getattr(torchvision.models, which)(num_classes=10)
    net.conv1 = nn.Conv2d(channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
    net.maxpool = nn.Identity()
    return net


def fit(s, bnn, plan):
    """Fit with Adam, its rate cut once, and the KL annealed."""
    (x, y), _, _, normalise = load(s)
    batches = common.Batches(normalise(x), y, s.batch, common.crops if s.augmentation else None)
    epochs, cut, free, annealed = (
        plan[name] and s.longer * plan[name] for name in ("epochs", "decay at", "free", "annealed")
    )
    adam, multipliers = partial(torch.optim.Adam, lr=plan["rate"]), {"scale": s.scale_multiplier}
    options = {"beta": common.annealed(free, annealed), "progress": False}
    options |= {"lr_multipliers": multipliers}
    return bnn.fit(batches, adam, epochs, common.cut_at(cut), **options)


def scored(s, bnns, elsewhere=True):
    """Return a row for an average of BNNs; its numbers of other images cost most time."""
    _, (x, y), others, normalise = load(s)

    def predict(x):
        draws = {"num_predictions": 1 if bnns[0].net_guide is None else s.draws}
        each = [bnn.predict(normalise(x), batch_size=500, **draws) for bnn in bnns]
        return torch.stack(each).softmax(-1).mean(0)

    known = predict(x)
    row = tables.scores(known, y, 10) | {"Brier": metrics.brier_score(known, y).item()}
    if elsewhere:
        known = predict(x).amax(-1)  # by other draws than the scores
        for name, other in others.items():
            row[f"AUROC {name}"] = metrics.ood_auroc(known, predict(other).amax(-1)).item()
        for level in (1, 3, 5):
            each = [tables.scores(predict(images), y, 10) for images in in_four_ways(x, level)]
            for score in ("accuracy %", "ECE %"):
                row[f"level {level}: {score}"] = statistics.fmean(found[score] for found in each)
    # Parameters of the guide, and of the net what no guide stands for.
    own = [p.numel() for bnn in bnns for p in bnn.net.parameters() if p.requires_grad]
    stored = [guides.parameter_count(bnn.net_guide) for bnn in bnns if bnn.net_guide]
    return {n: round(value, 4) for n, value in row.items()} | {"parameters": sum(own + stored)}


def make_bnn(s, method, **changed):
    x, y = load(s)[0]
    net, norms = make_net(s.net, x.shape[1]), {"hide_module_types": [nn.BatchNorm2d]}
    prior, guide = common.normal(hide_all=True), None
    if method == "FFG-W":
        prior, caps = common.normal(**norms), {"max_guide_scale": s.max_scale}
        guide = common.mean_field(net, init_scale=1e-4, **caps)
    elif method != "deterministic":
        # Without standard deviations U is a point: an ensemble of one.
        is_point = method == "ensemble-U" or changed.get("sigma") == 0
        kind, m = "ensemble" if is_point else "diagonal", changed.get("M", s.M)
        of = {"inducing_rows": m, "inducing_cols": m, "q_inducing": kind, "everywhere": True}
        own = {"ensemble_size": 1 if changed else s.members}
        own = own if is_point else {"max_scale_u": changed.get("sigma", s.max_scale)}
        limit = changed.get("lambda", s.max_lambda[kind])
        guide = partial(guides.AutoInducing, max_lambda=limit, **of, **own)
        prior = tyxe.priors.LayerwiseNormalPrior("radford", **norms)
    likelihood = tyxe.likelihoods.Categorical(len(y))
    return tyxe.VariationalBNN(net, prior, likelihood, guide).to(s.device)


def run(s, method, seed, **changed):
    pyro.set_rng_seed(seed)
    if method == "plain":
        nets = []
        for _ in range(s.members):
            nets.append(make_bnn(s, "deterministic"))
            fit(s, nets[-1], s.deterministic)
        return {"rows": {"deterministic": scored(s, nets[:1]), "ensemble": scored(s, nets)}}
    bnn = make_bnn(s, method, **changed)
    plan = s.ablation if changed else s.weights if method == "FFG-W" else s.inducing
    history = fit(s, bnn, plan)
    row = scored(s, [bnn], elsewhere=not changed)
    rows = {method: row | {"KL": history.kl[-1], "loss": history.loss[-1]}}
    prune, keeps = PRUNED.get(method, (None, ()))
    for keep in () if changed else keeps:
        smaller = copy.deepcopy(bnn)
        prune(smaller.net_guide, keep=keep)
        fit(s, smaller, s.pruned)
        rows[f"{method}, {100 * keep:g} % kept"] = scored(s, [smaller], elsewhere=False)
    return {"rows": rows}


def base(settings):
    """Return what is not changed in the ablation while something else is."""
    own = {"M": max(settings["ablation M"]), "lambda": settings["max lambda"]["diagonal"]}
    return own | {"sigma": settings["max scale"]}


def cells(s, found):
    if "table" in s.parts:
        for seed, method in product(s.seeds, ("plain", "FFG-W", "FFG-U", "ensemble-U")):
            yield ("table", method, seed), partial(run, s, method, seed)
    few, start = range(5) if s.published else s.seeds[:1], base(experiment.recorded(s))
    for seed, name in product(few if "ablation" in s.parts else (), start):
        for other in {*getattr(s, f"ablation_{name}"), start[name]}:
            changed = start | {name: other}
            title = ", ".join(f"{key} {number:g}" for key, number in sorted(changed.items()))
            yield ("ablation", title, seed), partial(run, s, "FFG-U", seed, **changed)


def ablation(record):
    """Return what changes and the rows of each cell of the ablation, by its name."""
    found = {}
    for (title, _), cell in record.of("ablation").items():
        pairs = (pair.split(" ") for pair in title.split(", "))
        values = {key: float(number) for key, number in pairs}
        found.setdefault(title, (values, []))[1].append(cell["rows"]["FFG-U"])
    return dict(sorted(found.items(), key=lambda item: [*item[1][0].values()]))


def table(record):
    rows, blocks = tables.rows(record.of("table")), []
    count = {"parameters": ",.0f"}
    if rows:
        columns = next(iter(rows.values()))[0]
        forms = FORMATS | {column: ".3f" for column in columns if column.startswith("AUROC")}
        blocks.append(tables.score_table(rows, forms | count))
        levels = {column: ".1f" for column in columns if column.startswith("level")}
        whole = {name: found for name, found in rows.items() if "kept" not in name}
        blocks.append(tables.score_table(whole, levels))
    if found := {title: found for title, (_, found) in ablation(record).items()}:
        blocks.append(tables.score_table(found, FORMATS | count))
    seconds = sum(cell["CPU seconds"] for cell in record.cells.values())
    return "\n\n".join([*blocks, f"{record.commands()}; {seconds / 60:.0f} minutes of one core."])


def figure(record):
    if not (found := ablation(record)):
        return {}
    drawn, axes = tables.subplots(3, 3, figsize=(10, 7), sharey="row")
    start = base(record.content["settings"])
    for line, (key, label) in zip(axes.T, ABLATED.items(), strict=True):
        own = {v[key]: rows for v, rows in found.values() if v == start | {key: v[key]}}
        for ax, score in zip(line, ("NLL", "accuracy %", "ECE %"), strict=True):
            values = [[row[score] for row in rows] for rows in own.values()]
            tables.errorbar(ax, range(len(own)), values, marker="o", capsize=3)
            ax.set_xticks(range(len(own)), [f"{value:g}" for value in own])
            ax.set(xlabel=label, ylabel=score)
            ax.label_outer()
    return drawn


by, how = ("part", "row", "seed"), {"name": "inducing_{0.data}"}
how["ending"] = lambda s: f"_{s.longer}_times" * (s.longer > 1)
experiment = runner.Experiment("inducing_images", cells, table, figure, by, **how)

# --------------------------------------------------------------------------- corrupted in six ways

SCORES = {"accuracy %": ".1f", "NLL": ".2f", "ECE %": ".1f"}
LEVELS = range(6)
# [T], at levels 1, 3 and 5.
PAPER = runner.SETTINGS["corruptions"]["paper"]


@cache
def nets(s):
    """Return the settings of the nets and of their fits."""
    levels = ["published"] * s.published + ["smoke"] * s.smoke_test
    return experiment.at(*levels, device=s.device)


def corrupted(s, bnns):
    """Return scores of the images as they are, and by way, of the levels, if corrupted."""
    chosen = nets(s)
    _, test, _, normalise = load(chosen)
    x, y = (part[:: max(len(part) // s.images, 1)][: s.images] for part in test)

    def judged(x):
        draws = {"num_predictions": 1 if bnns[0].net_guide is None else chosen.draws}
        each = [bnn.predict(normalise(x), batch_size=500, **draws) for bnn in bnns]
        row = tables.scores(torch.stack(each).softmax(-1).mean(0), y, 10)
        return {name: round(value, 4) for name, value in row.items()}

    found = {}
    for way, (change, strengths) in CORRUPTIONS.items():
        rows = [judged(change(x, strength)) for strength in strengths]
        found[way] = {score: [row[score] for row in rows] for score in SCORES}
    return judged(x) | {"corrupted": found}


def run_corrupted(s, method, seed):
    pyro.set_rng_seed(seed)
    chosen, is_plain = nets(s), method == "plain"
    plan = chosen.deterministic if is_plain else chosen.inducing
    plan = chosen.weights if method == "FFG-W" else plan
    bnns = []
    for _ in range(chosen.members if is_plain else 1):
        bnns.append(make_bnn(chosen, "deterministic" if is_plain else method))
        fit(chosen, bnns[-1], plan)
    if is_plain:
        return {"rows": {"deterministic": corrupted(s, bnns[:1]), "ensemble": corrupted(s, bnns)}}
    return {"rows": {method: corrupted(s, bnns)}}


def by_level(row, score):
    """Return the mean over the ways at each level, from 0 on."""
    each = [row["corrupted"][way][score] for way in CORRUPTIONS]
    return [row[score], *map(statistics.fmean, zip(*each, strict=True))]


def by_way(row, score):
    return [statistics.fmean(row["corrupted"][way][score]) for way in CORRUPTIONS]


def table_of_corruptions(record):
    rows, blocks = tables.rows(record.cells), []
    pages = {by_level: ("", [f"level {i}" for i in LEVELS]), by_way: (", all levels", CORRUPTIONS)}
    for means, (ending, columns) in pages.items():
        for score, form in SCORES.items():
            lines = []
            for row, found in rows.items():
                values = zip(*(means(seed, score) for seed in found), strict=True)
                lines.append([row, *(tables.over_seeds(list(own), form) for own in values)])
                known = PAPER[row].get(score, {}) if means is by_level else {}
                for level, number in known.items():
                    lines[-1][1 + int(level)] += f" ({number})"
            blocks.append(tables.markdown([score + ending, *columns], lines))
    return "\n\n".join(blocks)


def figure_of_corruptions(record):
    shape = len(SCORES), len(CORRUPTIONS)
    drawn, axes = tables.subplots(*shape, figsize=(13, 6.5), sharex=True, sharey="row")
    panels = zip(axes.flat, product(SCORES, CORRUPTIONS), strict=True)
    for ax, (score, way) in panels:
        for row, found in tables.rows(record.cells).items():
            levels = [[seed[score], *seed["corrupted"][way][score]] for seed in found]
            values = [*zip(*levels, strict=True)]
            tables.errorbar(ax, LEVELS, values, label=row, marker="o", markersize=3, capsize=2)
        ax.set(title=way if ax in axes[0] else "", xlabel="level", ylabel=score)
        ax.label_outer()
    drawn.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return drawn


cells_of_corruptions = runner.every(run_corrupted, method="methods", seed="seeds")
corruptions = runner.Experiment(
    "corruptions",
    cells_of_corruptions,
    table_of_corruptions,
    figure_of_corruptions,
    facts={"default settings of the nets": experiment.recorded(experiment.at())},
)
