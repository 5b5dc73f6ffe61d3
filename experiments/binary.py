"""Nets of binary weights on MNIST, and what they know of FashionMNIST [T tab. 4.2, fig. 4.4].

`binary`: a convolutional net and the fully connected one of permuted MNIST (tanh, 784-100-100-10),
both without biases. Weights are 1 / sqrt(fan_in) or its negative. Rows: the net of real weights all
others start from; signs by the straight-through estimator (STE, real weights clipped to [-1, 1]),
scores averaged over the nets of the ensemble (STE ensemble), whose starts differ; Bernoulli
posteriors, the KL weighed by tau; Beta(1 + delta, 1 + delta) regularised ones, weighed by 1.
Columns in nats: NLL, entropies (log 10 = 2.30; of a weight log 2 = 0.693). Figure, of the
convolutional net: (a) calibration of all class probabilities; (b) share of FashionMNIST with an
entropy below v; (c) accuracy on both sets where the confidence is at least c, FashionMNIST being
always wrong. Batches and the fit of real weights are our choice.

`binary_gap`: why the posteriors are behind the estimator, by .005 in NLL in [T], and by more in
these reduced runs. One thing is changed at a time; the posterior is Bernoulli with tau 0.001. All
of a seed start from one net of real weights. `concrete draws` are of weights, by two temperatures,
in place of sums that are Gaussian by the central limit theorem; `start x 4` has logits that are a
multiple of the weights. NLL is also that of half as many training images, of the likelier value of
each weight (`mode`), of eight times as many draws (`many draws`), and of draws of sums, as in
training (`sums`).
"""

import copy
import math
import statistics
from contextlib import nullcontext
from functools import cache, partial
from itertools import product

import common
import runner
import tables
import torch
from torch import nn
from torch.nn.utils import parametrize

import tyxe
from tyxe.poutine import local_reparameterization

# What the prior and the fit are told, and [T tab. 4.2]: accuracy in per cent, and NLL.
ROWS = runner.SETTINGS["binary"]["table"]
RUNS = [row for row in ROWS if row != "STE ensemble"]
FORMATS = {"accuracy %": ".2f", "NLL": ".3f", "ECE %": ".2f", "OOD entropy": ".2f"}
FORMATS |= {"OOD AUROC": ".3f", "weight entropy": ".3f", "training NLL": ".3f"}
ENTROPIES = [round(i * math.log(10) / 20, 4) for i in range(21)]
CONFIDENCES = [i / 20 for i in range(2, 20)] + [0.99]


def fully_connected(sizes):
    return nn.Sequential(nn.Flatten(), *common.mlp(784, *sizes, 10, act=nn.Tanh, bias=False))


def convolutional(sizes):
    a, b, c = sizes
    return nn.Sequential(
        *(nn.Conv2d(1, a, 3, padding=1, bias=False), nn.MaxPool2d(2), nn.Tanh()),
        *(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.MaxPool2d(2), nn.Tanh()),
        *(nn.Flatten(), *common.mlp(49 * b, c, 10, act=nn.Tanh, bias=False)),
    )


NETS = {"cnn": convolutional, "mlp": fully_connected}
TITLES = {"cnn": "Convolutional", "mlp": "Fully connected"}


class Sign(nn.Module):
    """A weight `scale * sign(u)`, whose gradient passes straight through to the number `u`."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, real):
        signs = torch.where(real < 0, -1.0, 1.0)
        return self.scale * (real + (signs - real).detach())

    def right_inverse(self, weight):
        return (weight / self.scale).clamp(-1, 1)


def by_sign_(net):
    """Make every weight of a net one of two values, `1 / sqrt(fan_in)` and its negative."""
    for module in net:
        if isinstance(module, nn.Linear | nn.Conv2d):
            sign = Sign(module.weight[0].numel() ** -0.5)
            parametrize.register_parametrization(module, "weight", sign)
    return net


def stepwise(optimizer, epochs, decays):
    milestones = [max(1, round(share * epochs)) for share in decays]
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, 0.1)


def fit(net, loader, epochs, rate, decays=(), clip=False):
    adam = torch.optim.Adam(net.parameters(), lr=rate)
    return common.descend(net, loader, epochs, adam, stepwise(adam, epochs, decays), clip)


def bernoulli_bnn(net, prior, points, **how):
    guide, likelihood = (
        partial(tyxe.guides.AutoBernoulli, **how),
        tyxe.likelihoods.Categorical(points),
    )
    return tyxe.VariationalBNN(net, prior, likelihood, guide)


def fit_bernoulli(bnn, loader, epochs, rate, decays, handler=local_reparameterization, **how):
    adam, step = common.scheduled(bnn, rate, stepwise, epochs, decays)
    with handler():
        bnn.fit(loader, adam, epochs, step, progress=False, **how)


@torch.no_grad()
def probabilities(net, x):
    return torch.cat([net(part).softmax(-1) for part in x.split(500)])


def weight_entropy(bnn):
    posteriors = bnn.net_guide.get_detached_distributions()
    found = {name: (q.entropy().item(), q.event_shape.numel()) for name, q in posteriors.items()}
    total, count = map(sum, zip(*found.values(), strict=True))
    return total / count, {name: entropy / n for name, (entropy, n) in found.items()}


@cache
def sets(s):
    parts = [("mnist", "train", s.training_images), ("mnist", "test", s.test_images)]
    parts.append(("fashion_mnist", "test", s.test_images))
    found = [common.first(common.images(name, split), count) for name, split, count in parts]
    return [[tensor.to(s.device) for tensor in pair] for pair in found]


@cache
def real_net(s, kind, seed):
    """Return the fitted net of real weights, and a loader of the training images."""
    loader = common.Batches(*sets(s)[0], s.batch)
    torch.manual_seed(seed)
    net = NETS[kind](s.widths[kind]).to(s.device)
    return fit(net, loader, s.epochs_of_real_weights, 1e-3), loader


def judged(s, predict):
    """Return scores and the panels' curves of a function from images to class probabilities."""
    (seen, labels), (x, y), (unknown, _) = sets(s)
    known, unknown, y = predict(x).cpu(), predict(unknown).cpu(), y.cpu()
    _, entropy, auroc = tables.by_entropy(known, unknown)
    return tables.scores(known, y) | {
        "OOD entropy": entropy.mean().item(),
        "OOD AUROC": auroc,
        "training NLL": tyxe.metrics.nll(predict(seen[: len(x)]), labels[: len(x)]).item(),
        "curves": curves(known, y, unknown),
    }


def curves(known, y, unknown):
    outside = tyxe.metrics.predictive_entropy(unknown)
    probs, is_right = known.flatten(), nn.functional.one_hot(y, known.shape[-1]).flatten().float()
    bins = (10 * probs).long().clamp(max=9)
    confidence = torch.cat([known.amax(-1), unknown.amax(-1)])
    correct = torch.cat([(known.argmax(-1) == y).float(), torch.zeros(len(unknown))])

    def mean(values):  # None where no prediction falls
        return round(values.mean().item(), 5) if len(values) else None

    return {
        "probability": [mean(probs[bins == i]) for i in range(10)],
        "frequency": [mean(is_right[bins == i]) for i in range(10)],
        "share of OOD": [mean((outside <= v).float()) for v in ENTROPIES],
        "accuracy above": [mean(correct[confidence >= c]) for c in CONFIDENCES],
    }


def mean_of(found):
    """Return the mean of numbers in alike dictionaries and lists, leaving None out."""
    if isinstance(found[0], dict):
        return {name: mean_of([each[name] for each in found]) for name in found[0]}
    if isinstance(found[0], list):
        return [mean_of(list(each)) for each in zip(*found, strict=True)]
    numbers = [each for each in found if each is not None]
    return statistics.fmean(numbers) if numbers else None


def run(s, kind, row, seed):
    nets, first = [], s.members * seed
    if row == "real weights":
        return judged(s, partial(probabilities, real_net(s, kind, first)[0]))
    if row == "STE":
        for seed in range(first, first + s.members):
            start, loader = real_net(s, kind, seed)
            torch.manual_seed(seed)
            how = s.epochs, s.rate["STE"], s.decays["STE"]
            nets.append(fit(by_sign_(copy.deepcopy(start)), loader, *how, clip=True))
        each = [judged(s, partial(probabilities, net)) for net in nets]
        all_nets = judged(s, lambda x: torch.stack([probabilities(n, x) for n in nets]).mean(0))
        return {"STE": mean_of(each), "STE ensemble": all_nets}
    chosen, (net, loader) = ROWS[row][0], real_net(s, kind, first)
    prior = tyxe.priors.BinaryPrior(chosen.get("delta"), scale="radford")  # which draws a number
    torch.manual_seed(first)
    bnn = bernoulli_bnn(net, prior, len(sets(s)[0][0]))
    how = s.epochs, s.rate["Bernoulli"], s.decays["Bernoulli"]
    fit_bernoulli(bnn, loader, *how, beta=chosen.get("tau", 1.0))
    draws = {"num_predictions": s.draws, "batch_size": 500}
    found = judged(s, lambda x: bnn.predict(x, **draws).softmax(-1))
    found["weight entropy"], found["weight entropy by site"] = weight_entropy(bnn)
    return found


def cells(s, found):
    """Yield seeds, nets and rows; the paper has half as many seeds of ensembles as of others."""
    for seed, kind, row in product(s.seeds, s.net, s.rows):
        if row != "STE" or not s.published or seed < 4:
            names = ["STE", "STE ensemble"] if row == "STE" else row
            yield (kind, names, seed), partial(run, s, kind, row, seed)


def of_net(record, kind, order):
    found = tables.rows(record.of(kind))
    return {row: found[row] for row in order if row in found}


def table(record):
    blocks = []
    for kind, title in TITLES.items():
        if rows := of_net(record, kind, ROWS):
            known = {row: known for row, (_, known) in ROWS.items()} if kind == "cnn" else {}
            seeds = ", ".join(sorted({str(len(found)) for found in rows.values()}))
            blocks += [f"**{title}**, seeds: {seeds}", tables.score_table(rows, FORMATS, known)]
    return "\n\n".join(blocks)


def figure(record):
    drawn, axes = tables.subplots(1, 3, figsize=(13, 4.3))
    for index, (row, seeds) in enumerate(of_net(record, "cnn", ROWS).items()):
        mean = mean_of([cell["curves"] for cell in seeds])
        pairs = [(mean["probability"], mean["frequency"]), (ENTROPIES, mean["share of OOD"])]
        for ax, pair in zip(axes, [*pairs, (CONFIDENCES, mean["accuracy above"])], strict=True):
            points = [(x, y) for x, y in zip(*pair, strict=True) if x is not None and y is not None]
            ax.plot(*zip(*points, strict=True), color=f"C{index}", label=row, marker=".")
    axes[0].plot([0, 1], [0, 1], color="black", linestyle="dashed", linewidth=1)
    axes[0].set(title="(a)", xlabel="class probability", ylabel="relative frequency")
    axes[1].set(title="(b)", xlabel="v, nats", ylabel="share of FashionMNIST, entropy at most v")
    axes[2].set(title="(c)", xlabel="c", ylabel="accuracy where confidence is at least c")
    drawn.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return drawn


by, how = ("net", "row", "seed"), {"name": "binary_mnist", "choices": {"rows": RUNS}}
experiment = runner.Experiment("binary", cells, table, figure, by, **how)

# --------------------------------------------------------------------------- behind the estimator

BASE = {"rate": 0.1, "tau": 0.001, "more steps": 1, "draws a step": 1, "guide": {}}
CHANGES = runner.SETTINGS["binary_gap"]["table"]
GAP = {"accuracy %": ".2f", "NLL": ".3f", "ECE %": ".2f", "training NLL": ".3f"}
GAP |= {"mode: NLL": ".3f", "mode: ECE %": ".2f", "many draws: NLL": ".3f", "sums: NLL": ".3f"}
GAP |= {"weight entropy": ".3f"}


def scores_of_gap(s, predict):
    (seen, labels), (x, y), _ = sets(s)
    row, half = tables.scores(predict(x), y), len(x) // 2
    return row | {"training NLL": tyxe.metrics.nll(predict(seen[:half]), labels[:half]).item()}


def run_gap(s, kind, row, seed):
    chosen, (net, loader) = BASE | CHANGES[row], real_net(s, kind, seed)
    torch.manual_seed(seed)
    how = s.epochs * chosen["more steps"], chosen["rate"], s.decays
    if "STE" in chosen:
        net = fit(by_sign_(copy.deepcopy(net)), loader, *how, clip=True)
        return scores_of_gap(s, partial(probabilities, net))
    prior = tyxe.priors.BinaryPrior(scale="radford")
    bnn = bernoulli_bnn(net, prior, s.training_images, **chosen["guide"])
    handler = nullcontext if "relaxed" in chosen["guide"] else local_reparameterization
    weighed = {"beta": chosen["tau"], "num_particles": chosen["draws a step"]}
    fit_bernoulli(bnn, loader, *how, handler, **weighed)

    def predict(x, draws=s.draws):
        return bnn.predict(x, num_predictions=draws, batch_size=500).softmax(-1)

    found = scores_of_gap(s, predict) | {"weight entropy": weight_entropy(bnn)[0]}
    ways = {"mode": (0, nullcontext), "many draws": (8 * s.draws, nullcontext)}
    x, y = sets(s)[1]
    for way, (draws, handler) in (ways | {"sums": (s.draws, local_reparameterization)}).items():
        with handler():
            own = tables.scores(predict(x, draws), y)
        found |= {f"{way}: {name}": value for name, value in own.items()}
    return found


def table_of_gap(record):
    blocks = []
    for kind, title in TITLES.items():
        if rows := of_net(record, kind, CHANGES):
            blocks += [f"**{title}**", tables.score_table(rows, GAP, count=["seeds"])]
    return "\n\n".join(blocks)


cells_of_gap = runner.every(run_gap, net="net", row="rows", seed="seeds")
gap = runner.Experiment("binary_gap", cells_of_gap, table_of_gap, choices={"rows": CHANGES})
