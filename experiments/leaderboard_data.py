"""The data sets of the leaderboard with their nets, and the scores of predictions on them.

scikit-learn's digits 0 to 7 (8 and 9 are what is not known) and FashionMNIST (notMNIST) by a small
CNN, Cora by a graph net of two layers, UCI regression by two layers of 50 tanh units (all within
5,000 rows), CIFAR-10 (SVHN) by a narrow ResNet-18.
"""

import math
from functools import cache, partial

import common
import cora
import resnet
import tables
import torch
from leaderboard_methods import Problem
from torch import nn
from torch.distributions import Normal

import tyxe
from tyxe.predictive.scores import mutual_information

IMAGES, UCI = (
    ["digits", "fashion", "cifar10"],
    [*("yacht", "energy", "concrete", "airfoil", "bikesharing", "protein")],
)
LEVELS = torch.linspace(0.1, 0.9, 9)  # of intervals
NOISES = torch.logspace(-2, 0.5, 51)  # to choose from, of standardised targets


def small_cnn(channels, width, side, classes, dropout=0.0):
    conv = partial(nn.Conv2d, kernel_size=3, padding=1)
    return nn.Sequential(
        *(conv(channels, width, stride=2), nn.ReLU(), nn.Dropout(dropout)),
        *(conv(width, 2 * width), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(dropout)),
        nn.Linear(2 * width * (side // 4) ** 2, classes),
    )


def small_resnet(width, device, dropout=0.0):
    net = resnet.make_net(width, "strided", device)
    net.fc = nn.Sequential(nn.Dropout(dropout), net.fc)
    return net


class NodeNet(cora.GCN):
    """The net at nodes of one graph, given by their numbers, or of blocks with their features."""

    def __init__(self, graph, *sizes, dropout=0.0):
        super().__init__(graph.features.shape[1], *sizes, cora.backend("torch")[1])
        self.act, self.dropout = nn.ReLU(), nn.Dropout(dropout)
        self.whole = lambda: graph  # a function, so that copies of the net share it

    def forward(self, inputs, features=None):
        blocks = (self.whole().edges,) * 2 if features is None else inputs
        features = self.whole().features if features is None else features
        hidden = self.dropout(self.act(self.first(self.sum_neighbours(blocks[0], features))))
        if blocks is inputs:
            return self.second(self.sum_neighbours(blocks[1], hidden))
        return self.second(self.sum_neighbours(blocks[1], hidden)[inputs])


def images(s, name, seed):
    """Return a problem: the seed draws images to train and to validate."""
    known, test, unknown = common.known_and_unknown({"fashion": "fashion_mnist"}.get(name, name))
    if name == "fashion":
        unknown = common.images("notmnist", "test")[0]
    if name == "cifar10" and len(unknown) < 1_000:  # of a local subset, all
        unknown = torch.cat([unknown, common.images("svhn_subset", "train")[0]])
    order = torch.randperm(len(known[1]), generator=torch.Generator().manual_seed(seed))
    count = min(s.training_images, round(0.8 * len(order)))
    rows = {"train": order[:count], "validation": order[count:][: s.validation_images]}
    pairs = {part: [each[own] for each in known] for part, own in rows.items()}
    pairs["test"] = [common.thinned(each, s.test_images) for each in test]
    pairs["unknown"] = [common.thinned(unknown, s.test_images), torch.empty(0)]
    like = common.standardised(pairs["train"][0])
    pairs = {part: (like(x).to(s.device), y.to(s.device)) for part, (x, y) in pairs.items()}
    x, y = pairs.pop("train")
    change, rules = None, {}
    make = partial(small_cnn, x.shape[1], s.width, x.shape[-1], int(y.max()) + 1)
    if name == "cifar10":
        change, rules = common.crops, {"hide_module_types": [nn.BatchNorm2d]}
        make = partial(small_resnet, s.resnet_width, s.device)
    loader = common.Batches(x, y, s.batch, change)
    parts = {part: ((x,), y) for part, (x, y) in pairs.items()}
    likelihood = tyxe.likelihoods.Categorical(count)
    return Problem(loader, parts, make, likelihood, s.epochs[name], rules=rules)


def nodes_of_graph(s):
    """Return the problem of Cora, all of whose labelled nodes make a batch."""
    graph, names = cora.cora(reduced=s.smoke_test), {"validation": "val", "test": "test"}
    rows = {part: mask.nonzero().squeeze(1) for part, mask in graph.masks.items()}
    pairs = {part: (own, graph.labels[own]) for part, own in rows.items()}

    def by_nodes(count):
        how = {"graph_of": lambda edges: edges, "batch_size": count}
        loaders = {
            n: cora.NeighborLoader(graph, (-1, -1), m, **how) for n, m in graph.masks.items()
        }
        parts = {part: ((loaders[name],), pairs[name][1]) for part, name in names.items()}
        return loaders["train"], parts

    loader = common.Batches(*pairs["train"], len(rows["train"]))
    parts = {part: ((pairs[name][0],), pairs[name][1]) for part, name in names.items()}
    likelihood = tyxe.likelihoods.Categorical(len(rows["train"]))
    make = partial(NodeNet, graph, s.graph_units, int(graph.labels.max()) + 1)
    return Problem(loader, parts, make, likelihood, s.epochs["cora"], by_nodes=by_nodes)


def regression(s, name, seed, noise):
    """Return a problem: 64 % to train, 16 % to validate and 20 % to test, standardised."""
    x, y = common.uci_regression(name)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    order = order[: s.regression_rows]
    sizes = [round(share * len(order)) for share in (0.64, 0.16)]
    rows = order.split([*sizes, len(order) - sum(sizes)])
    x, y = (common.standardised_columns(part, rows[0]) for part in (x, y))
    train, *others = ((x[own].to(s.device), y[own].to(s.device)) for own in rows)
    parts = dict(zip(("validation", "test"), (((x,), y) for x, y in others), strict=True))
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(sizes[0], scale=noise)
    sizes = x.shape[1], s.hidden_units, s.hidden_units, 1
    make = partial(common.mlp, *sizes, act=nn.Tanh, dropout=0.0)
    loader = common.Batches(*train, s.batch)
    return Problem(loader, parts, make, likelihood, s.epochs[name], unit=noise**2)


@cache
def problem(s, name, seed, noise=1.0):
    """Return a data set; the noise is that of training, where targets are numbers."""
    if name == "cora":
        return nodes_of_graph(s)
    return regression(s, name, seed, noise) if name in UCI else images(s, name, seed)


def mixture_nll(outputs, targets, noise=None):
    """Return the NLL of draws of outputs, with a noise where they are no logits, by their logs."""
    if noise is None:  # a probability that is 0 in float32 has a logarithm
        logs = outputs.double().log_softmax(-1)
        logs = logs.gather(-1, targets.expand(len(logs), -1)[..., None]).squeeze(-1)
    else:
        logs = Normal(outputs, noise).log_prob(targets).double()
    return (math.log(len(logs)) - logs.logsumexp(0)).mean().item()


def validated(outputs, targets):
    """Return the NLL of draws of outputs `(S, n, ...)`, of numbers by the noise of the lowest."""
    if not targets.is_floating_point():
        return {"validation NLL": mixture_nll(outputs, targets)}
    found = {noise: mixture_nll(outputs, targets, noise) for noise in NOISES.tolist()}
    noise = min(found, key=found.get)
    return {"validation NLL": found[noise], "noise": noise}


def scores(outputs, targets, noise=None):
    """Return scores of draws of outputs by part; numbers have the mixture of as many Gaussians."""
    if noise is None:
        probs = {part: draws.softmax(-1).mean(0) for part, draws in outputs.items()}
        found = tables.scores(probs["test"], targets)
        row = {"NLL": mixture_nll(outputs["test"], targets)}
        row |= {"error %": 100 - found["accuracy %"], "ECE %": found["ECE %"]}
        if "unknown" in probs:
            row["OOD AUROC"] = tables.by_entropy(probs["test"], probs["unknown"])[-1]
            if len(outputs["test"]) > 1:
                # In double precision, where certain images differ.
                pair = (-mutual_information(outputs[p].double()) for p in ("test", "unknown"))
                row["AUROC by MI"] = tyxe.metrics.ood_auroc(*pair).item()
        return row
    draws = outputs["test"]
    ranks = Normal(draws, noise).cdf(targets).mean(0)
    covered = ((ranks - 0.5).abs() <= 0.5 * LEVELS).double().mean(0)
    return {
        "NLL": mixture_nll(draws, targets, noise),
        "RMSE": tyxe.metrics.rmse(draws.mean(0), targets).item(),
        "interval error %": 100 * (covered - LEVELS).abs().mean().item(),
    }
