"""Unfamiliar and adversarial images: five predictions of an MNIST classifier [T 3.2.5].

A net 784-1024-1024-10 with ReLU, and dropout of 0.5 after the hidden layers, learns images whose
pixels are drawn anew each time, 1 with probability their intensity. Of that one net: its plain
prediction; dropout left on; draws from Laplace approximations with Kronecker factors (damped) and
with a diagonal, N and tau of both [T 3.41] by the cross-entropy of validation images ("widest": of
the pairs within 5e-4 nats of the best, that of the highest entropy; `--within` has more such
distances, a row each, and files of its own). Besides, mean fields under N(0, 1) priors, fitted by
plain draws, whose standard deviations are fitted or stay at 0.01.

Figure: entropy on notMNIST's letters [T fig. 3.4]; entropy and accuracy after one step x - eta
range sign(grad log max p) [T fig. 3.5]; accuracy and p(0) over steps towards class 0, without the
images predicted 0 before [T fig. 3.6]. A step is never judged by the draws that it followed. Not
said in [T], and our choice: the prior of the one net, N(0, 1), a weight decay of 1 / N; one sampled
label a point for the curvature; the mean field's rate and start; the grids; validation images.
"""

import copy
import math
from functools import partial
from itertools import product

import common
import runner
import tables
import torch
from torch import nn

import tyxe
from tyxe.plotting.axes import PALETTE

FAMILIES = ["deterministic", "MC dropout", "mean field", "diag", "kron"]
TOLERANCE = 5e-4  # two widths are as good within so many nats of validation cross-entropy
ACCURACY = runner.SETTINGS["adversarial"]["facts"]["published accuracy %"]


def averaged(net, x, draws):
    """Return the logarithm of the mean of class probabilities, `(n, C)`, over calls of the net."""
    # In double precision: the gradient of a prediction that is sure is what it lacks to one.
    each = torch.stack([net(x).double().log_softmax(-1) for _ in range(draws)])
    return each.logsumexp(0) - math.log(draws)


def untargeted(net, x, span, etas, draws):
    """Step away from the predicted class; return log-probabilities `(len(etas), n, C)`."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(averaged(net, x, draws).amax(-1).sum(), x)
    moved = torch.cat([x.detach() - eta * span * gradient.sign() for eta in etas])
    with torch.no_grad():
        return averaged(net, moved, draws).unflatten(0, (len(etas), -1))


def targeted(net, x, span, eta, steps, draws):
    """Step towards class 0, by new draws each time; return log-probabilities before and after."""
    path = []
    for _ in range(steps + 1):
        x = x.detach().requires_grad_()
        log_probs = averaged(net, x, draws)
        path.append(log_probs.detach())
        (gradient,) = torch.autograd.grad(log_probs[:, 0].sum(), x)
        x = x + eta * span * gradient.sign()
    return torch.stack(path)


def load(s):
    """Return intensities and labels to train on; binarised ones to validate, to test, letters."""
    (x, y), test = common.images("mnist", "train"), common.images("mnist", "test")
    order = torch.randperm(len(test[0]))
    sets = (x[50_000:], y[50_000:]), [part[order] for part in test]
    sets = [(x.flatten(1).bernoulli(), y) for x, y in (*sets, common.images("notmnist", "test"))]
    return (x[: s.training_images].flatten(1), y[: s.training_images]), *sets


def fit_net(s, loader):
    net = common.mlp(784, s.hidden_units, s.hidden_units, 10, dropout=0.5)
    how = {"lr": s.first_rate, "momentum": 0.9, "weight_decay": 1 / len(loader.x)}
    optimizer = torch.optim.SGD(net.parameters(), **how)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, s.epochs, s.last_rate)
    return common.descend(net, loader, s.epochs, optimizer, schedule).eval()


def tune(s, seed, bnn, x, y, letters):
    """Choose N and tau by validation images; the entropy of the letters is not looked at."""
    rows = [{"N": n, "tau": tau} for n, tau in product(s.N, s.tau)]
    for row in rows:
        common.widen(bnn, *row.values())
        torch.manual_seed(seed)  # the same random numbers for all
        how = {"num_predictions": s.validation_draws, "predictive": "bnn"}
        seen, unknown = bnn.predict(torch.cat([x, letters]), **how).tensor_split([len(x)])
        row["cross-entropy"] = nn.functional.cross_entropy(seen, y).item()
        for name, logits in (("entropy", seen), ("notMNIST entropy", unknown)):
            row[name] = tyxe.metrics.predictive_entropy(logits.softmax(-1)).mean().item()
    best = min(rows, key=lambda row: row["cross-entropy"])
    good = within(rows, TOLERANCE)
    common.widen(bnn, best["N"], best["tau"])
    return {"best": best, "widest": widest(good), "as good": len(good), "all": rows}


def within(rows, nats):
    limit = min(row["cross-entropy"] for row in rows) + nats
    return [row for row in rows if row["cross-entropy"] < limit]


def widest(rows):
    return max(rows, key=lambda row: row["entropy"])


def look(s, net, test, letters, span, is_fixed):
    counts = (s.draws, s.untargeted_draws, s.targeted_draws)
    draws, of_one, of_many = (1 if is_fixed else count for count in counts)

    def in_parts(attack, x, *how):  # for the memory of gradients
        return torch.cat([attack(net, part, span, *how) for part in x.split(1_000)], 1)

    x, y = common.first(test, s.test_images)
    with torch.no_grad():
        known, unknown = (averaged(net, images, draws).exp() for images in (x, letters))
    inside, outside, auroc = tables.by_entropy(known, unknown)
    row = tables.scores(known, y)
    del row["ECE %"]
    row |= {"entropy": inside.mean().item(), "notMNIST entropy": outside.mean().item()}
    row["notMNIST AUROC"] = auroc
    quantiles = outside.quantile(torch.linspace(0, 1, 101, dtype=outside.dtype)).tolist()
    x, y = common.first(test, s.untargeted_images)
    probs = in_parts(untargeted, x, s.step_lengths, of_one).exp()
    once = {"accuracy %": [100 * tyxe.metrics.accuracy(p, y).item() for p in probs]}
    once["entropy"] = [tyxe.metrics.predictive_entropy(p).mean().item() for p in probs]
    x, y = common.first(test, s.targeted_images)
    path = in_parts(targeted, x, s.targeted_step, s.targeted_steps, of_many)
    kept = path[0].argmax(-1) != 0
    probs = path[:, kept].exp()
    often = {"accuracy %": [100 * tyxe.metrics.accuracy(p, y[kept]).item() for p in probs]}
    often |= {"p(0)": probs[..., 0].mean(-1).tolist(), "images": int(kept.sum())}
    return row, {"notMNIST entropy quantiles": quantiles, "untargeted": once, "targeted": often}


def run(s, seed):
    train, validation, test, (letters, _) = load(s)
    held_out = *common.first(validation, s.validation_images), letters[:500]
    loader, chosen = common.Batches(*train, 100, torch.bernoulli), {}
    likelihood = tyxe.likelihoods.Categorical(len(train[0]))
    net = fit_net(s, loader)
    methods = {"deterministic": net, "MC dropout": copy.deepcopy(net).train()}
    methods = {name: made for name, made in methods.items() if name in s.families}
    fields = {"mean field": True, "mean field, sd 0.01": False}
    for name, fitted in fields.items() if "mean field" in s.families else ():
        start = common.mlp(784, s.hidden_units, s.hidden_units, 10)
        adam = partial(torch.optim.Adam, lr=1e-3)
        guide = common.mean_field(start, init_scale=1e-2, train_scale=fitted)
        methods[name] = bnn = tyxe.VariationalBNN(start, common.normal(), likelihood, guide)
        bnn.fit(loader, adam, s.mean_field_epochs, progress=False)
        bnn.eval()
    for structure in (name for name in ("diag", "kron") if name in s.families):
        passes = s.binarisations_for_the_curvature
        options = tyxe.LaplaceOptions(num_passes=passes, damping=structure == "kron")
        how = {"structure": structure, "curvature": "fisher", "options": options}
        bnn = tyxe.LaplaceBNN(net, common.normal(), likelihood, **how)
        bnn.fit_curvature(loader, progress=False)
        chosen[structure] = tune(s, seed, bnn, *held_out)
        methods[f"Laplace, {structure}"] = bnn.eval()
    for nats in s.within if "kron" in s.families else ():
        name = "widest" if nats == TOLERANCE else f"within {nats:g}"
        methods[f"Laplace, kron, {name}"] = wide = copy.deepcopy(bnn)
        found = widest(within(chosen["kron"]["all"], nats))
        common.widen(wide, found["N"], found["tau"])
    # A pixel is 0 or 1, but for those that no training image has.
    span, rows, curves = (train[0].amax(0) > 0).float(), {}, {}
    for name, net in methods.items():
        rows[name], curves[name] = look(s, net, test, letters, span, name == "deterministic")
    return {"rows": rows, "chosen": chosen, "curves": curves}


def table(record):
    rows = tables.rows(record.cells)
    for name, found in rows.items():
        paths = (cell["curves"][name]["targeted"]["accuracy %"] for cell in record.cells.values())
        after = ({f"after {n} steps %": p[n] for n in (10, 20) if n < len(p)} for p in paths)
        rows[name] = [row | steps for row, steps in zip(found, after, strict=True)]
    forms = {"accuracy %": ".1f", "NLL": ".3f", "entropy": ".2f", "notMNIST entropy": ".2f"}
    forms |= {"notMNIST AUROC": ".3f", "after 10 steps %": ".0f", "after 20 steps %": ".0f"}
    known = {row: [f"{value:.2f}"] for row, value in ACCURACY.items()}
    return tables.score_table(rows, forms, known)


def figure(record):
    chosen, curves = record.content["settings"], next(iter(record.cells.values()))["curves"]
    drawn, axes = tables.subplots(2, 3, figsize=(11, 6.6))
    (above, entropy, accuracy), (targeted_accuracy, target, last) = axes
    for (name, found), color in zip(curves.items(), PALETTE, strict=False):
        look, once, often = {"color": color, "label": name}, found["untargeted"], found["targeted"]
        above.plot(found["notMNIST entropy quantiles"], torch.linspace(1, 0, 101), **look)
        entropy.plot(chosen["step lengths"], once["entropy"], **look)
        accuracy.plot(chosen["step lengths"], once["accuracy %"], **look)
        targeted_accuracy.plot(often["accuracy %"], **look)
        target.plot(often["p(0)"], **look)
    above.set(title="notMNIST", xlabel="predictive entropy (nats)", ylabel="fraction above")
    for ax, label in ((entropy, "mean entropy (nats)"), (accuracy, "accuracy (%)")):
        ax.set_xscale("symlog", linthresh=0.1)
        ax.set(title="one step from the prediction", ylabel=label)
        ax.set(xlabel=r"length $\eta$ (ranges of a pixel)", xlim=(0, chosen["step lengths"][-1]))
    for ax, label in ((targeted_accuracy, "accuracy (%)"), (target, "mean p(0)")):
        steps = f"steps of {chosen['targeted step']:g}"
        ax.set(title="steps towards class 0", xlabel=steps, ylabel=label)
    last.axis("off")
    last.legend(*above.get_legend_handles_labels(), loc="center", frameon=False)
    return drawn


experiment = runner.Experiment(
    "adversarial",
    runner.every(run, seed="seeds"),
    table,
    figure,
    ending=lambda s: "" if s.within == [TOLERANCE] else "_widths",
    choices={"families": FAMILIES},
)
