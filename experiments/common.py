"""What experiments share: data sets, batches, and the priors, guides and callbacks of their fits.

Data come from a local folder, TYXE_DATA if it is set, or are downloaded by torchvision.
"""

import os
from functools import partial
from pathlib import Path

import numpy as np
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoDelta
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import tyxe

ROOT = Path(__file__).resolve().parents[1]
# torchvision's names of what local files hold, the last two perhaps in part; it has no notMNIST.
TORCHVISION = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}
TORCHVISION |= {"cifar10_subset": "CIFAR10", "svhn_subset": "SVHN"}


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
    if find(f"{name}.npz") is not None:
        found = arrays(f"{name}.npz")
        x, y = found[f"x_{split}"], found[f"y_{split}"].long()
    elif name not in TORCHVISION:
        raise FileNotFoundError(
            f"{looked(f'{name}.npz')}, which torchvision has not; set TYXE_DATA"
        )
    else:
        which = {"split": split} if name == "svhn_subset" else {"train": split == "train"}
        try:
            import torchvision

            dataset = getattr(torchvision.datasets, TORCHVISION[name])
            found = dataset(str(ROOT / "data"), download=True, **which)
        except (ImportError, OSError, RuntimeError) as error:
            raise FileNotFoundError(
                f"{looked(f'{name}.npz')}, and torchvision could not download {TORCHVISION[name]}: "
                f"{error}. Set TYXE_DATA to a folder that has it"
            ) from error
        labels = found.labels if name == "svhn_subset" else found.targets
        x, y = torch.as_tensor(found.data), torch.as_tensor(labels).long()
    if x.dim() == 3:
        return x[:, None] / 255, y
    return (x if x.shape[1] == 3 else x.movedim(-1, 1)) / 255, y


def all_digits():
    """Return images of scikit-learn's digits, `(1797, 8, 8)` in [0, 1], and labels."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return torch.tensor(bunch.images / 16), torch.tensor(bunch.target)


def digits():
    """Return images `(n, 1, 8, 8)` and labels of digits 0 to 7, and images of 8 and 9."""
    x, y = all_digits()
    return (x[y <= 7, None].float(), y[y <= 7]), x[y > 7, None].float()


def first(pair, count):
    return tuple(part[:count] for part in pair)


def thinned(part, count):
    """Return so many of the rows of a tensor, evenly spaced, or all."""
    return part[:: max(len(part) // count, 1)][:count]


def loader(x, y, size):
    """Return a DataLoader of shuffled batches, each taken at once."""
    dataset = TensorDataset(x, y)
    sampler = BatchSampler(RandomSampler(dataset), size, drop_last=False)
    return DataLoader(dataset, sampler=sampler, batch_size=None)


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


def cut_at(*epochs):
    """Return a callback of `fit` that divides all rates by ten after these epochs."""

    def cut(bnn, epoch, loss):
        if epoch + 1 in epochs:
            for group in bnn.optimizer.param_groups:
                group["lr"] /= 10

    return cut
