"""Variational Laplace, variational inference and MAP on image classifiers [GR tab. 1, VL fig. 2].

Softplus nets, Adam, the prior N(0, 1 / fan_in), standard deviations that start at `log s - 3` and
have ten times the learning rate. Variational Laplace (VL), predicted by the mean network and by 10
draws; variational inference by one plain draw a step (VI), likewise; MAP, whose log-prior is
weighted by beta as the KL is for the others. For each row beta is the one with the lowest negative
log-likelihood (NLL, nats) of validation images with the first seed; other seeds run at that beta
only. ECE in 15 bins, AUROC of the maximal probability against another set.
Early stopping [VL fig. 2]: the first set, first seed, with the learning rate of scales multiplied.

Stated nowhere, and ours: the prior, means that start at the net's own values, no augmentation, that
beta weights MAP's prior, bins of the ECE. `cifar10` by `--published` is the paper's own,
PreactResNet-18, for a GPU.
"""

import statistics
import time
from contextlib import nullcontext
from functools import cache, partial
from itertools import product

import common
import pyro
import runner
import tables
import torch
from torch import nn

import tyxe

HANDLERS = {"VL": tyxe.poutine.variational_laplace, "VI": nullcontext, "MAP": nullcontext}
DRAWS, LOG_RATIO, MULTIPLIER = 10, -3.0, 10.0
TITLES = {"fashion_mnist": "FashionMNIST", "mnist": "MNIST", "cifar10": "CIFAR-10"}
ROWS = {"VL, mean network": ("VL", "mean"), "VL, 10 draws": ("VL", "draws")}
ROWS |= {"VI, mean network": ("VI", "mean"), "VI, 10 draws": ("VI", "draws")}
ROWS["MAP"] = ("MAP", "mean")
# NLL, accuracy and ECE of [GR] table 1, PreactResNet-18 on the whole sets.
PUBLISHED = runner.SETTINGS["variational_laplace_images"]["facts"]["[GR] tab. 1"]


def cnn(side=28, channels=1):
    """Return two strided convolutions and two linear layers; 27,338 weights on 28 x 28 pixels."""
    kernel, stride = (6, 4) if side >= 28 else (3, 2)
    positions = (-(-side // stride) + 1) // 2
    return nn.Sequential(
        *(nn.Conv2d(channels, 8, kernel, stride, padding=1), nn.Softplus()),
        *(nn.Conv2d(8, 24, 3, stride=2, padding=1), nn.Softplus()),
        *(nn.Flatten(), nn.Linear(24 * positions**2, 64), nn.Softplus(), nn.Linear(64, 10)),
    )


class PreactBlock(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(out)
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        is_same = stride == 1 and channels == out
        self.shortcut = None if is_same else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x):
        first = nn.functional.softplus(self.norm1(x))
        short = x if self.shortcut is None else self.shortcut(first)
        return short + self.conv2(nn.functional.softplus(self.norm2(self.conv1(first))))


def preact_resnet18(width=64):
    """Return the PreactResNet-18 for small images, with Softplus; `width` is 64 in the paper."""
    layers, channels = [nn.Conv2d(3, width, 3, padding=1, bias=False)], width
    for stage in range(4):
        for stride in (1 if stage == 0 else 2, 1):
            layers.append(PreactBlock(channels, width * 2**stage, stride))
            channels = width * 2**stage
    head = [nn.BatchNorm2d(channels), nn.Softplus(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(channels, 10))


def settings_of(s, name):
    return s.colour if name == "cifar10" else s.small


@cache
def load(s, name):
    """Return pairs to train, to validate and to test, and others, by the first's statistics."""
    (x, y), test, other = common.known_and_unknown(name)
    chosen = settings_of(s, name)
    held_out, count = chosen["validation images"], chosen["test images"]
    train = min(chosen["training images"] or len(x), len(x) - held_out)
    standardised = common.standardised(x[:train])
    pairs = (x[:train], y[:train]), (x[-held_out:], y[-held_out:]), common.first(test, count)
    pairs = [(standardised(x).to(s.device), y.to(s.device)) for x, y in pairs]
    return *pairs, standardised(other[:count]).to(s.device)


def scores(bnn, validation, test, other, draws):
    predict = partial(bnn.predict, num_predictions=draws, batch_size=1_000)
    seen, logits, unknown = (predict(x) for x in (validation[0], test[0], other))
    probs = logits.softmax(-1)
    found = {
        "validation NLL": nn.functional.cross_entropy(seen, validation[1]),
        "NLL": nn.functional.cross_entropy(logits, test[1]),
        "accuracy": tyxe.metrics.accuracy(probs, test[1]),
        "ECE": tyxe.metrics.expected_calibration_error(probs, test[1]),
        "AUROC": tyxe.metrics.ood_auroc(probs.amax(-1), unknown.softmax(-1).amax(-1)),
    }
    return {key: round(value.item(), 5) for key, value in found.items()}


def run(s, name, method, beta, multiplier, seed):
    chosen, (train, *others) = settings_of(s, name), load(s, name)
    pyro.set_rng_seed(seed)
    channels, side = train[0].shape[1:3]
    net = preact_resnet18(chosen["width"]) if chosen["width"] else cnn(side, channels)
    points, epochs, is_map = len(train[0]), chosen["epochs"], method == "MAP"
    scale = tyxe.guides.scale_below_prior(LOG_RATIO)
    guide = common.point(net) if is_map else common.mean_field(net, init_scale=scale)
    # Norms have no posterior.
    prior = tyxe.priors.LayerwiseNormalPrior("radford", hide_module_types=[nn.BatchNorm2d])
    bnn = tyxe.VariationalBNN(net, prior, tyxe.likelihoods.Categorical(points), guide).to(s.device)
    guide = bnn.net_guide
    sites = [] if is_map else guide.get_detached_distributions()
    before = {name: guide.get_scale(name).detach().clone() for name in sites}
    change = partial(common.crops, mode="constant") if chosen["augmentation"] else None
    batches = common.Batches(*train, chosen["batch size"], change)
    adam = partial(torch.optim.Adam, lr=chosen["learning rate"])
    how = {"lr_multipliers": None if is_map else {"scale": multiplier}, "beta": beta}
    clock, cut = time.process_time(), common.cut_at(epochs // 2, 3 * epochs // 4)
    with HANDLERS[method]():
        history = bnn.fit(batches, adam, epochs, cut, progress=False, **how)
    found = {
        "weights": sum(p.numel() for p in net.parameters()),
        "steps": epochs * len(batches),
        "seconds": round(time.process_time() - clock, 1),
        "ELBO by epoch": [round(-loss / points, 5) for loss in history.loss],
        "log-likelihood": round(history.log_likelihood[-1] / points, 5),
        "KL": round(history.kl[-1] / points, 5),
        "scores": {"mean": scores(bnn, *others, 0)},
    }
    if not is_map:
        found["scores"]["draws"] = scores(bnn, *others, DRAWS)
        # The mean over images and draws of the log-likelihood, and of log sigma - log s by site.
        draws = {"num_predictions": DRAWS, "aggregate": False, "batch_size": 1_000}
        logits = bnn.predict(train[0], **draws).flatten(0, 1)
        by_draws = -nn.functional.cross_entropy(logits, train[1].repeat(DRAWS)).item()
        growth = {n: (guide.get_scale(n) / scale).log().mean() for n, scale in before.items()}
        grown = {n: round(value.item() + LOG_RATIO, 3) for n, value in growth.items()}
        found |= {"log-likelihood by draws": round(by_draws, 5), "log sigma over prior": grown}
    return found


def jobs(cells, name):
    """Return the cells of a set by method, beta, multiplier and seed, as numbers."""
    own = {key[1:]: cell for key, cell in cells.items() if key[0] == name}
    return {(k[0], float(k[1]), float(k[2]), int(k[3])): cell for k, cell in own.items()}


def best_beta(cells, method, way):
    """Return the beta with the lowest validation NLL with the first seed."""
    seed = min(job[3] for job in cells)
    swept = {job: c for job, c in cells.items() if (job[0], *job[2:]) == (method, MULTIPLIER, seed)}
    return min(swept, key=lambda job: swept[job]["scores"][way]["validation NLL"])[1]


def cells(s, found):
    """Yield a sweep of betas, the other seeds at the best beta of each row, and early stopping."""

    def cell(*key):
        return key, partial(run, s, *key)

    first, *others = s.seeds
    for name in s.sets:
        for beta, method in product(s.betas, HANDLERS):
            yield cell(name, method, beta, MULTIPLIER, first)
        for seed, method in product(others, HANDLERS):
            ways = ("mean",) if method == "MAP" else ("mean", "draws")
            for beta in dict.fromkeys(best_beta(jobs(found, name), method, w) for w in ways):
                yield cell(name, method, beta, MULTIPLIER, seed)
        stopping = s.stopping_betas if name == s.sets[0] else ()
        for beta, multiplier, method in product(stopping, s.multipliers, ("VL", "VI")):
            yield cell(name, method, beta, multiplier, first)


def row_tables(name, cells):
    """Return every method at its best beta, the paper beside it; and NLL and ECE by beta."""
    published, best, sweep = PUBLISHED.get(name, []), [], []
    forms = {"NLL": (".3f", 1), "accuracy": (".1f", 100), "ECE": (".3f", 1), "AUROC": (".3f", 1)}
    seed = min(job[3] for job in cells)
    betas = sorted({job[1] for job in cells if job[2:] == (MULTIPLIER, seed)}, reverse=True)
    for index, (title, (method, way)) in enumerate(ROWS.items()):
        beta = best_beta(cells, method, way)
        own = [c["scores"][way] for j, c in cells.items() if j[:3] == (method, beta, MULTIPLIER)]
        texts = [tables.over_seeds([row[c] for row in own], *form) for c, form in forms.items()]
        best.append([title, f"{beta:g}", *texts, str(len(own)), *published[index : index + 1]])
        scores = [cells[method, beta, MULTIPLIER, seed]["scores"][way] for beta in betas]
        sweep.append([title, *(f"{s['NLL']:.3f} / {s['ECE']:.3f}" for s in scores)])
    columns = ["", "beta", "NLL", "accuracy %", "ECE", "AUROC", "seeds"]
    columns += ["[GR] tab. 1: NLL / accuracy / ECE"] if published else []
    swept = tables.markdown(["NLL / ECE", *(f"beta {beta:g}" for beta in betas)], sweep)
    return tables.markdown(columns, best), "By beta, first seed:", swept


def elbo(job, cell, by_draws):
    """Return the objective of the last epoch, nats an image; its data term may be by draws."""
    return cell["log-likelihood by draws" if by_draws else "log-likelihood"] - job[1] * cell["KL"]


def stopping(record):
    """Return VL and VI with the first seed, at betas that several multipliers ran with."""
    for name in record.names():
        cells = jobs(record.cells, name)
        seed = min(job[3] for job in cells)
        several = {job[1] for job in cells if job[2] != MULTIPLIER}
        kept = [job for job in cells if job[0] != "MAP" and job[3] == seed and job[1] in several]
        if kept:
            return {j: cells[j] for j in sorted(kept, key=lambda j: (j[0], -j[1], j[2]))}
    return {}


def table(record):
    parts = []
    for name in record.names():
        cells, settings = jobs(record.cells, name), record.content["settings"]
        chosen, first = settings["colour" if name == "cifar10" else "small"], next(iter(cells))
        seconds = {m: [c["seconds"] for c in record.of(name, m).values()] for m in HANDLERS}
        middle = [f"{m} {statistics.median(found):.0f}" for m, found in seconds.items() if found]
        parts += [
            f"**{TITLES.get(name, name)}**, {chosen['training images'] or 'all'} training images, "
            f"{cells[first]['weights']:,} weights, {cells[first]['steps']:,} steps of "
            f"{chosen['batch size']} images; mean ± standard error over seeds:",
            *row_tables(name, cells),
            f"Processor seconds of a fit (median): {', '.join(middle)}.",
        ]
    lines = []
    for (method, beta, multiplier, _), cell in (found := stopping(record)).items():
        mean, draws = cell["scores"]["mean"], cell["scores"]["draws"]
        numbers = [statistics.fmean(cell["log sigma over prior"].values())]
        numbers += [elbo((method, beta), cell, by_draws) for by_draws in (False, True)]
        texts = [f"{number:.3f}" for number in (*numbers, -mean["NLL"], -draws["NLL"])]
        texts += [f"{100 * row['accuracy']:.1f}" for row in (mean, draws)]
        lines.append([method, f"{beta:g}", f"{multiplier:g}", *texts])
    columns = ["", "beta", "multiplier", "mean log sd / prior sd", "ELBO", "ELBO by draws"]
    columns += ["test LL", "by draws", "accuracy %", "by draws"]
    pages = {"": parts} | ({"_early_stopping": [tables.markdown(columns, lines)]} if found else {})
    return {ending: "\n\n".join([*page, measured(record)]) for ending, page in pages.items()}


def measured(record):
    content, machine = record.content, record.content["machine"]
    listed = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    threads = "one thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    seed = min(int(key[-1]) for key in record.cells)
    return (
        f"Last run on {content['date']}: {machine['processor']}, {machine['cores']} cores, "
        f"{threads}; {listed}; first seed {seed}. Commands: {record.commands()}."
    )


def figure(record):
    if not (found := stopping(record)):
        return {}
    betas, ticks = (sorted({job[place] for job in found}) for place in (1, 2))
    size = {"figsize": (17, 3.3 * len(betas) + 0.5), "squeeze": False}
    drawn, grid = tables.subplots(len(betas), 5, **size)
    shades = ("#7ad151", "#22a884", "#34618d", "#482475")  # of viridis
    colours, lines = {"VL": "tab:blue", "VI": "tab:orange"}, {"mean": "-", "draws": "--"}
    final = {
        "test log-likelihood": lambda _, cell, way: -cell["scores"][way]["NLL"],
        "accuracy": lambda _, cell, way: cell["scores"][way]["accuracy"],
        "ELBO / image": lambda job, cell, way: elbo(job, cell, way == "draws"),
    }
    for axes, beta in zip(grid, reversed(betas), strict=True):
        own = {m: {j: c for j, c in found.items() if j[:2] == (m, beta)} for m in colours}
        ends = [c["ELBO by epoch"][-1] for cells in own.values() for c in cells.values()]
        for ax, method in zip(axes, ("VI", "VL"), strict=False):
            for shade, (job, cell) in zip(shades, own[method].items(), strict=False):
                curve, look = cell["ELBO by epoch"], {"color": shade, "label": f"{job[2]:g}"}
                ax.plot(range(1, len(curve) + 1), curve, **look)
            ax.set(title=f"{method}, beta {beta:g}", xlabel="epoch", ylabel="ELBO / image")
            # The start is far below, and would hide where lines end.
            ax.set_ylim(3 * min(ends), 0.5 * max(ends))
        for ax, (title, value) in zip(axes[2:], final.items(), strict=True):
            for (method, cells), (way, line) in product(own.items(), lines.items()):
                points = [(job[2], value(job, cell, way)) for job, cell in cells.items()]
                look = {"color": colours[method], "marker": "o", "markersize": 4}
                ax.plot(*zip(*points, strict=True), line, **look)
            ax.set(xscale="log", xlabel="multiplier", ylabel=title, title=f"beta {beta:g}")
            ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            ax.minorticks_off()
    grid[0, 0].legend(title="multiplier", fontsize="small")
    names = [f"{m}, {w}" for m in colours for w in ("mean network or objective", "10 draws")]
    drawn.legend(grid[0, 2].lines, names, loc="outside lower center", ncols=4)
    return {"_early_stopping": drawn}


by = ("set", "method", "beta", "multiplier", "seed")
experiment = runner.Experiment("variational_laplace_images", cells, table, figure, by)
