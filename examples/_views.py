"""For nerf.py: views of an object from all sides, with the cameras that took them.

Cameras are in PyTorch3D's convention: row vectors, `X_cam = X_world R + T`; a camera looks along
+z, +x is left, +y is up; `x_ndc = f x / z` and `y_ndc = f y / z` with `f = 1 / tan(fov / 2)`; the
centre of pixel (i, j) of S x S is at x_ndc = 1 - (2j + 1) / S, y_ndc = 1 - (2i + 1) / S.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import is_zipfile

import numpy as np
import torch
from _data import folders
from torch import Tensor
from torch.nn import functional as F

SHAPES = {
    "images": ("V", "S", "S", "3"),
    "silhouettes": ("V", "S", "S"),
    "R": ("V", "3", "3"),
    "T": ("V", "3"),
    "azimuth_deg": ("V",),
    "fov_deg": (),
}


@dataclass(frozen=True)
class Views:
    """Images of one object, and the cameras that took them.

    Attributes:
        pixels: red, green, blue and coverage, in [0, 1], `(V, 4, size, size)`.
        rotation: `R`, `(V, 3, 3)`.
        translation: `T`, `(V, 3)`.
        azimuth: where a camera stands, in degrees, `(V,)`.
        fov: the angle that an image's height fills, in degrees.
    """

    pixels: Tensor
    rotation: Tensor
    translation: Tensor
    azimuth: Tensor
    fov: float

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        names = ("pixels", "rotation", "translation", "azimuth")
        return replace(self, **{name: getattr(self, name)[index] for name in names})

    def to(self, device):
        """Return the same views on another device."""
        names = ("pixels", "rotation", "translation", "azimuth")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def at(self, xy):
        """Return pixels `(V, n, 4)`, interpolated, at points of the image plane, `(V, n, 2)`."""
        # grid_sample counts from the left and from the top, between the outer edges of pixels.
        grid = -xy[:, :, None]
        found = F.grid_sample(self.pixels, grid, padding_mode="border", align_corners=False)
        return found[..., 0].movedim(1, -1)


def load(name):
    """Return the views in a numpy archive.

    Args:
        name: of a file, or of one in the data folders.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no archive, or has other arrays, or other shapes.
    """
    places = [path / name for path in (Path(), *folders())]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"no {name} in {', '.join(str(place.parent) for place in places)}. Set TYXE_DATA to a "
            "folder that has it, or name an archive of your own with --data: docs/nerf.md says "
            "which arrays it holds"
        )
    found = _arrays(path)
    _check(path, found)
    colour, silhouettes = (torch.from_numpy(found[n]) for n in ("images", "silhouettes"))
    return Views(
        torch.cat([colour, silhouettes[..., None]], -1).movedim(-1, 1) / 255,
        *(torch.from_numpy(found[n]).float() for n in ("R", "T", "azimuth_deg")),
        float(found["fov_deg"]),
    )


def _arrays(path):
    """Return the arrays of an archive by name; none of them may be pickled objects."""
    if not is_zipfile(path):
        raise ValueError(f"{path} is no archive of numpy (.npz); expected {_wanted()}")
    with np.load(path) as arrays:
        try:
            return {key: arrays[key] for key in arrays}
        except ValueError as error:
            raise ValueError(f"{path}: {error}; expected {_wanted()}") from error


def _wanted():
    wanted = [f"{key} ({', '.join(names)})" for key, names in SHAPES.items()]
    return f"{', '.join(wanted)} of V views of S x S pixels, images and silhouettes as uint8"


def _check(path, found):
    """Refuse a file of another layout."""
    views, size = (*found.get("images", np.empty(0)).shape, 0, 0)[:2]
    sizes = {"V": views, "S": size, "3": 3}
    expected = {key: tuple(sizes[name] for name in names) for key, names in SHAPES.items()}
    is_like = all(key in found and found[key].shape == shape for key, shape in expected.items())
    pixels = [found[key].dtype for key in ("images", "silhouettes") if key in found]
    if not is_like or pixels != [np.uint8, np.uint8]:
        listed = [f"{key} {array.shape} {array.dtype}" for key, array in found.items()]
        held = ", ".join(listed) or "no arrays"
        raise ValueError(f"{path} holds {held}; expected {_wanted()}")
