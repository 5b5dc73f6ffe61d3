"""Image sets for the examples: from a local folder, or downloaded by torchvision."""

import os
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
# The names that torchvision has for what the local files hold; notMNIST has none there.
TORCHVISION = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}


def folders():
    """List where files are looked for, in this order."""
    given = [Path(os.environ["TYXE_DATA"])] if "TYXE_DATA" in os.environ else []
    return [*given, ROOT.parent / "shared" / "data", ROOT / "data"]


def images(name, split):
    """Return images `(n, 1, height, width)` in [0, 1] and labels `(n,)`.

    Args:
        name: `mnist`, `fashion_mnist` or `notmnist`.
        split: `train` or `test`.

    Raises:
        FileNotFoundError: the file is in no folder, and could not be downloaded.
    """
    for folder in folders():
        if (path := folder / f"{name}.npz").exists():
            with np.load(path) as arrays:
                x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
            return torch.from_numpy(x)[:, None] / 255, torch.from_numpy(y).long()
    return _downloaded(name, split)


def _downloaded(name, split):
    if name not in TORCHVISION:
        raise FileNotFoundError(f"{_looked(name)}, and torchvision has no {name}; set TYXE_DATA")
    found = _fetched(name, TORCHVISION[name], train=split == "train")
    return found.data[:, None] / 255, found.targets.long()


def colour(local, download, split):
    """Return images `(n, 3, 32, 32)` in [0, 1] and labels: a local subset, or torchvision's set.

    Args:
        local: name of the local file, such as `cifar10_subset`.
        download: torchvision's name, `CIFAR10` or `SVHN`.
        split: `train` or `test`.

    Raises:
        FileNotFoundError: the file is in no folder, and the set could not be downloaded.
    """
    if any((folder / f"{local}.npz").exists() for folder in folders()):
        x, y = images(local, split)
        return x[:, 0].movedim(-1, 1), y
    which = {"split": split} if download == "SVHN" else {"train": split == "train"}
    found = _fetched(local, download, **which)
    pixels, labels = (found.data, getattr(found, "targets", getattr(found, "labels", None)))
    x = torch.from_numpy(pixels) / 255
    return (x if x.shape[1] == 3 else x.movedim(-1, 1)), torch.as_tensor(labels).long()


def _fetched(local, download, **which):
    try:
        import torchvision

        dataset = getattr(torchvision.datasets, download)
        return dataset(str(ROOT / "data"), download=True, **which)
    except (ImportError, OSError, RuntimeError) as error:
        raise FileNotFoundError(
            f"{_looked(local)}, and torchvision could not download {download}: {error}. "
            "Set TYXE_DATA to a folder that has it"
        ) from error


def _looked(name):
    return f"no {name}.npz in {', '.join(str(folder) for folder in folders())}"
