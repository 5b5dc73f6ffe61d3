"""What experiments share: data sets, batches, and the priors, guides and callbacks of their fits.

Data come from a local folder, TYXE_DATA if it is set, or are downloaded by torchvision.
"""

import os
import sys
from contextlib import nullcontext
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.infer.autoguide import AutoDelta
from pyro.infer.mcmc import HMC
from pyro.ops.stats import effective_sample_size
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import tyxe

ROOT = Path(__file__).resolve().parents[1]
# torchvision's names of what local files hold, the last two perhaps in part; it has no notMNIST.
TORCHVISION = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}
TORCHVISION |= {"cifar10_subset": "CIFAR10", "svhn_subset": "SVHN"}
OTHER = {"mnist": "fashion_mnist", "fashion_mnist": "mnist", "cifar10": "svhn_subset"}


def folders():
    """List where files are looked for, in this order."""
    given = [Path(os.environ["TYXE_DATA"])] if "TYXE_DATA" in os.environ else []
    return [*given, ROOT.parent / "shared" / "data", ROOT / "data"]


def find(name):
    return next((path for folder in folders() if (path := folder / name).is_file()), None)


def looked(name):
    return f"no {name} in {', '.join(str((folder / name).parent) for folder in folders())}"


def arrays(name):
    if (path := find(name)) is None:
        raise FileNotFoundError(f"{looked(name)}; set TYXE_DATA")
    with np.load(path) as found:
        return {name: torch.from_numpy(found[name]) for name in found}


def images(name, split):
    """Return images `(n, channels, height, width)` in [0, 1] and labels `(n,)`.

    The name is that of an archive: `notmnist`, or one that `TORCHVISION` has; the split is `train`
    or `test`. Where the file is in no folder, and cannot be downloaded, it is a FileNotFoundError.
    """
    missing, known, is_svhn = looked(f"{name}.npz"), TORCHVISION.get(name), name == "svhn_subset"
    if find(f"{name}.npz"):
        found = arrays(f"{name}.npz")
        x, y = found[f"x_{split}"], found[f"y_{split}"]
    elif known is None:
        raise FileNotFoundError(f"{missing}, which torchvision has not; set TYXE_DATA")
    else:
        try:
            import torchvision

            part = {"split": split} if is_svhn else {"train": split == "train"}
            found = getattr(torchvision.datasets, known)(str(ROOT / "data"), download=True, **part)
        except (ImportError, OSError, RuntimeError) as error:
            raise FileNotFoundError(
                f"{missing}, and torchvision could not download {known}: {error}. "
                "Set TYXE_DATA to a folder that has it"
            ) from error
        x, y = map(torch.as_tensor, (found.data, found.labels if is_svhn else found.targets))
    x = x[:, None] if x.dim() == 3 else x if x.shape[1] == 3 else x.movedim(-1, 1)
    return x / 255, y.long()


def uci_regression(name):
    """Return inputs `(n, d)` and targets `(n, 1)` of a set of UCI regression."""
    found = arrays(f"regression/{name}.npz")
    return found["X"].float(), found["y"].float()


def all_digits():
    """Return images of scikit-learn's digits, `(1797, 8, 8)` in [0, 1], and labels."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16).view(-1, 8, 8), torch.tensor(y)


def known_and_unknown(name):
    """Return pairs to train and to test, and images of another set; of `digits` 8 and 9."""
    if name == "digits":
        x, y = all_digits()
        x, y, unknown = x[y <= 7, None].float(), y[y <= 7], x[y > 7, None].float()
        return (x[::2], y[::2]), (x[1::2], y[1::2]), unknown
    own = "cifar10_subset" if name == "cifar10" else name
    return images(own, "train"), images(own, "test"), images(OTHER[name], "test")[0]


def standardised(like):
    """Return a function of images, by the mean and the deviation of each channel of some."""
    mean, scale = (part((0, 2, 3), keepdim=True) for part in (like.mean, like.std))
    return lambda x: (x - mean) / scale


def standardised_columns(x, rows):
    """Return columns in standard deviations of some rows from their mean; constant ones as 0."""
    scale = x[rows].std(0)
    return (x - x[rows].mean(0)) / torch.where(scale > 0, scale, 1.0)


def first(pair, count):
    return tuple(part[:count] for part in pair)


def thinned(part, count):
    """Return so many of the rows of a tensor, evenly spaced, or all."""
    return part[:: max(len(part) // count, 1)][:count]


class Batches:
    """Batches of inputs and targets, in a new order at every pass; `change` inputs anew."""

    def __init__(self, x, y, size, change=None):
        self.x, self.y, self.size, self.change = x, y, size, change

    def __len__(self):
        return -(-len(self.x) // self.size)

    def __iter__(self):
        for rows in torch.randperm(len(self.x), device=self.x.device).split(self.size):
            yield self.change(self.x[rows]) if self.change else self.x[rows], self.y[rows]


def crops(x, mode="reflect"):
    """Return random windows of images padded by 4 pixels (`F.pad`), half of them flipped."""
    (height, width), n = x.shape[-2:], len(x)
    padded = F.pad(x, (4, 4, 4, 4), mode=mode)
    top, left = torch.randint(9, (2, n, 1, 1, 1), device=x.device)
    rows = (top + torch.arange(height, device=x.device)[:, None]).expand(-1, x.shape[1], -1, 1)
    columns = left + torch.arange(width, device=x.device)
    each = torch.arange(n, device=x.device).view(-1, 1, 1, 1)
    channels = torch.arange(x.shape[1], device=x.device)[:, None, None]
    found = padded[each, channels, rows, columns]
    return torch.where(torch.rand(n, 1, 1, 1, device=x.device) < 0.5, found, found.flip(-1))


def normal(scale=1.0, **rules):
    """Return the prior N(0, scale^2) of the weights that rules choose, of all without any."""
    return tyxe.priors.IIDPrior(dist.Normal(0.0, scale), **rules)


def mean_field(net, **how):
    """Return a builder of mean fields, or by `guide` of others, whose means start at a net."""
    start, guide = tyxe.guides.PretrainedInitializer.from_net(net), tyxe.guides.AutoNormal
    return partial(how.pop("guide", guide), init_loc_fn=start, **how)


def point(net):
    """Return a builder of point masses that start at a net: MAP."""
    return mean_field(net, guide=AutoDelta)


def widen(bnn, points, precision):
    """Give a Laplace approximation [T 3.41]'s N, in place of the points seen, and its tau."""
    bnn.temperature = bnn.likelihood.dataset_size / points
    bnn.update_prior(normal(precision**-0.5))


def choose_width(bnn, sizes, precisions, score):
    """Give it the N and tau of the lowest score of the BNN, and return them by name."""
    found = {}
    for pair in product(sizes, precisions):
        widen(bnn, *pair)
        found[pair] = score(bnn)
    widen(bnn, *(best := min(found, key=found.get)))
    return dict(zip(("N", "tau"), best, strict=True))


def hmc(s, net, likelihood, pair, **how):
    """Return a BNN of samples by HMC, under a N(0, 1) prior, and the chain."""
    kernel = partial(HMC, trajectory_length=s.hmc_trajectory, **how)
    bnn, quiet = tyxe.MCMC_BNN(net, normal(), likelihood, kernel), not sys.stderr.isatty()
    warmup = {"warmup_steps": s.hmc_warmup, "disable_progbar": quiet}
    return bnn, bnn.fit([pair], s.hmc_samples, **warmup)


def chain_worth(bnn, samples, inputs):
    """Return effective sample sizes of `f(x)` at inputs; a chain's halves are two chains."""
    kept = 2 * (min(samples, 2_000) // 2)
    inputs = torch.as_tensor(inputs).view(-1, 1)
    functions = bnn.predict(inputs, num_predictions=kept, aggregate=False)
    return effective_sample_size(functions.reshape(2, kept // 2, -1)).tolist()


def mlp(*sizes, act=nn.ReLU, bias=True, dropout=None):
    """Return linear maps from each size to the next; between them an act and, if any, dropout."""
    layers = []
    for pair in pairwise(sizes):
        layers += [nn.Linear(*pair, bias=bias), act()]
        layers += [] if dropout is None else [nn.Dropout(dropout)]
    return nn.Sequential(*layers[: -1 if dropout is None else -2])


def annealed(free, growing):
    """Return the KL's weight by epoch: none in the free ones, then growing to one."""
    return lambda epoch: min(max((epoch - free + 1) / (growing + 1), 0.0), 1.0)


def descend(net, loader, epochs, optimizer, schedule, clip=False):
    """Minimise the cross-entropy; `clip` keeps parameters in [-1, 1]."""
    net.train()
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            for parameter in net.parameters() if clip else ():
                parameter.data.clamp_(-1, 1)
        schedule.step()
    return net


def scheduled(module, rate, kind, *how):
    """Return Adam of a first rate, and a callback of `fit` for torch's schedule of that kind."""
    adam = torch.optim.Adam(module.parameters(), lr=rate)
    schedule = kind(adam, *how)
    return adam, lambda *_: schedule.step()


def fit_by_cosine(bnn, loader, rate, epochs, last=0.0, handler=nullcontext, **how):
    """Fit by Adam, whose rate falls as a cosine to a last one; return the BNN."""
    adam, step = scheduled(bnn, rate, CosineAnnealingLR, epochs, last)
    with handler():
        bnn.fit(loader, adam, epochs, step, progress=False, **how)
    return bnn


def keep_members(bnn, members):
    """Give a BNN of chains the members of an ensemble as its samples, one in each chain."""
    bnn.samples.replace({name: value[:, None] for name, value in members.items()})


def cut_at(*epochs):
    """Return a callback of `fit` that divides all rates by ten after these epochs."""

    def cut(bnn, epoch, loss):
        if epoch + 1 in epochs:
            for group in bnn.optimizer.param_groups:
                group["lr"] /= 10

    return cut
