"""For adversarial.py: binarised images, attacks on averaged predictions, and the figure."""

import math

import matplotlib.pyplot as plt
import torch

from tyxe import metrics
from tyxe.plotting import PALETTE


class Binarised:
    """Batches of images, each pixel drawn anew in every pass: 1 with probability its intensity.

    Args:
        x: intensities in [0, 1], `(n, pixels)`.
        y: labels, `(n,)`.
        batch_size: images in a batch.
    """

    def __init__(self, x, y, batch_size):
        self.x, self.y, self.batch_size = x, y, batch_size

    def __len__(self):
        return math.ceil(len(self.x) / self.batch_size)

    def __iter__(self):
        for rows in torch.randperm(len(self.x)).split(self.batch_size):
            yield self.x[rows].bernoulli(), self.y[rows]


def averaged(net, x, draws):
    """Return the logarithm of the mean of class probabilities, `(n, C)`.

    Args:
        net: draws its weights (or its dropout) anew at every call.
        x: inputs.
        draws: number of calls.
    """
    # In double precision: the gradient of a prediction that is sure is what it lacks to one.
    each = torch.stack([net(x).double().log_softmax(-1) for _ in range(draws)])
    return each.logsumexp(0) - math.log(draws)


def untargeted(net, x, span, etas, draws):
    """Step away from the predicted class, once: `x - eta span sign(grad log max_y p(y))`.

    Args:
        net: as in `averaged`.
        x: inputs `(n, pixels)`.
        span: range of each pixel, `(pixels,)`.
        etas: lengths of the step, each from `x`.
        draws: for the gradient, and as many others for the predictions.

    Returns:
        Log-probabilities after the step, `(len(etas), n, C)`.
    """
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(averaged(net, x, draws).amax(-1).sum(), x)
    moved = torch.cat([x.detach() - eta * span * gradient.sign() for eta in etas])
    with torch.no_grad():
        return averaged(net, moved, draws).unflatten(0, (len(etas), -1))


def targeted(net, x, span, eta, steps, draws):
    """Step towards class 0 again and again: `x + eta span sign(grad log p(0))`.

    Args:
        net: as in `averaged`; every step has draws of its own, as an attacker would face them.
        x: inputs `(n, pixels)`.
        span: range of each pixel, `(pixels,)`.
        eta: length of a step.
        steps: their number.
        draws: for each gradient, and the prediction that goes with it.

    Returns:
        Log-probabilities before the first step and after each, `(steps + 1, n, C)`.
    """
    path = []
    for _ in range(steps + 1):
        x = x.detach().requires_grad_()
        log_probs = averaged(net, x, draws)
        path.append(log_probs.detach())
        (gradient,) = torch.autograd.grad(log_probs[:, 0].sum(), x)
        x = x + eta * span * gradient.sign()
    return torch.stack(path)


def in_parts(attack, net, x, *args):
    """Attack some images at a time, for the memory of gradients; return all, `(..., n, C)`."""
    return torch.cat([attack(net, part, *args) for part in x.split(1_000)], 1)


def untargeted_curves(log_probs, y):
    """Return accuracy (%) and mean entropy (nats) for each length of the step."""
    probs = log_probs.exp()
    return {
        "accuracy %": [100 * metrics.accuracy(p, y).item() for p in probs],
        "entropy": [metrics.predictive_entropy(p).mean().item() for p in probs],
    }


def targeted_curves(log_probs, y):
    """Return accuracy (%) and the mean of p(0), without the images predicted 0 at the start."""
    kept = log_probs[0].argmax(-1) != 0
    probs = log_probs[:, kept].exp()
    return {
        "accuracy %": [100 * metrics.accuracy(p, y[kept]).item() for p in probs],
        "p(0)": probs[..., 0].mean(-1).tolist(),
        "images": int(kept.sum()),
    }


def plot(content):
    """Draw the five panels from what the JSON file holds."""
    settings, curves = content["settings"], content["curves"]
    size = (11, 6.6)
    figure, axes = plt.subplots(2, 3, figsize=size, layout="constrained")
    (above, entropy, accuracy), (targeted_accuracy, target, last) = axes
    for (name, found), color in zip(curves.items(), PALETTE, strict=False):
        look = {"color": color, "label": name}
        quantiles = found["notMNIST entropy quantiles"]
        above.plot(quantiles, torch.linspace(1, 0, len(quantiles)), **look)
        for ax, column in ((entropy, "entropy"), (accuracy, "accuracy %")):
            ax.plot(settings["step lengths"], found["untargeted"][column], **look)
        for ax, column in ((targeted_accuracy, "accuracy %"), (target, "p(0)")):
            ax.plot(found["targeted"][column], **look)
    above.set(title="notMNIST", xlabel="predictive entropy (nats)", ylabel="fraction above")
    entropy.set(title="one step from the prediction", ylabel="mean entropy (nats)")
    accuracy.set(title="one step from the prediction", ylabel="accuracy (%)")
    targeted_accuracy.set(title="steps towards class 0", ylabel="accuracy (%)")
    target.set(title="steps towards class 0", ylabel="mean p(0)")
    for ax in (entropy, accuracy):
        ax.set_xscale("symlog", linthresh=0.1)
        ax.set(xlabel=r"length $\eta$ (ranges of a pixel)", xlim=(0, settings["step lengths"][-1]))
    for ax in (targeted_accuracy, target):
        ax.set(xlabel=f"steps of {settings['targeted step']:g}")
    last.axis("off")
    last.legend(*above.get_legend_handles_labels(), loc="center", frameon=False)
    return figure
