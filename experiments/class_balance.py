"""Old classes against new, of tasks that share one output layer: remedies, and what they mend.

While a task's classes are learned, the outputs of the others get probabilities near zero, and so
does their curvature: nothing keeps the next task from raising them. One remedy gives them a
curvature, one leaves them alone.
"""

from functools import partial

import common
import torch
from torch import nn


class OwnClasses(nn.Module):
    """A net whose outputs are those of `classes` alone, where that is not None."""

    def __init__(self, net):
        super().__init__()
        self.net, self.classes = net, None

    def forward(self, x):
        outputs = self.net(x)
        if self.classes is None:
            return outputs
        others = torch.ones(outputs.shape[-1], dtype=torch.bool)
        others[self.classes] = False
        return outputs.masked_fill(others, -1e4)  # probability 0, and no infinities in gradients


@torch.no_grad()
def flat_labels(net, x, share):
    """Return labels drawn from the net's probabilities, or for that share of images from all."""
    drawn = torch.distributions.Categorical(logits=net(x)).sample()
    anew = torch.rand(len(x)) < share
    return torch.where(anew, torch.randint(net(x[:1]).shape[-1], (len(x),)), drawn)


def retake_curvature(bnn, batches, share):
    """Take the curvature of a task again, by such labels in place of the net's own."""
    labels, usual = flat_labels(bnn.to_module(), batches.x, share), bnn._curvature
    bnn._curvature = "empirical"
    bnn.fit_curvature(common.Batches(batches.x, labels, batches.size), progress=False)
    bnn._curvature = usual


@torch.no_grad()
def own_classes(net, x, y):
    """Return the accuracy among the classes of these labels."""
    own = y.unique()
    return (own[net(x)[:, own].argmax(-1)] == y).double().mean().item()


@torch.no_grad()
def with_offset(net, old, new, chosen=500):
    """Return the accuracies on two tasks with one number added to the outputs of the first's.

    It is the one with the best mean accuracy on some training images of both, which no method of
    continual learning has: a measure of what is lost by that one number.

    Args:
        net: returns outputs of all classes.
        old: `part(index)` of the first task: training data (0) and test data (1).
        new: those of the second.
        chosen: number of training images of each.
    """
    classes = old(0)[1].unique()

    def accuracies(offset, pairs):
        shift = torch.zeros(net(pairs[0][0][:1]).shape[-1])
        shift[classes] = offset
        return [((net(x) + shift).argmax(-1) == y).double().mean().item() for x, y in pairs]

    known = [common.first(part(0), chosen) for part in (old, new)]
    offsets = torch.linspace(-10, 30, 161).tolist()
    best = max(offsets, key=lambda offset: sum(accuracies(offset, known)))
    return {"offset": best, "with offset": accuracies(best, [part(1) for part in (old, new)])}


def of(net, tasks, part):
    """Return what a record holds of a net after two tasks besides its accuracies."""
    own = {"own classes": [own_classes(net, *part(task, 1)) for task in tasks]}
    return own | with_offset(net, *(partial(part, task) for task in tasks))
