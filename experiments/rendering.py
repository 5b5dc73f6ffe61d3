"""Views of an object from all sides, and images of a field by emission and absorption.

Cameras are in PyTorch3D's convention: row vectors, `X_cam = X_world R + T`; a camera looks along
+z, +x is left, +y is up; `x_ndc = f x / z` and `y_ndc = f y / z` with `f = 1 / tan(fov / 2)`; the
centre of pixel (i, j) of S x S is at x_ndc = 1 - (2j + 1) / S, y_ndc = 1 - (2i + 1) / S. A field is
a function of points `(n, depths, 3)` and of the directions `(n, 3)`, of length one, that n rays
have; it returns opacities in [0, 1], `(n, depths)`, and colours, `(n, depths, 3)`.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import common
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

ARRAYS = ("images", "silhouettes", "R", "T", "azimuth_deg", "fov_deg")
PARTS = ("pixels", "rotation", "translation", "azimuth")


@dataclass(frozen=True)
class Views:
    """Images of one object, `(V, 4, size, size)`, and the cameras that took them.

    Pixels are red, green, blue and coverage, in [0, 1]; `R`, `(V, 3, 3)`, and `T`, `(V, 3)`; where
    a camera stands and the angle that an image's height fills, in degrees.
    """

    pixels: Tensor
    rotation: Tensor
    translation: Tensor
    azimuth: Tensor
    fov: float

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        return replace(self, **{name: getattr(self, name)[index] for name in PARTS})

    def to(self, device):
        return replace(self, **{name: getattr(self, name).to(device) for name in PARTS})

    def __add__(self, other):
        both = {name: torch.cat([getattr(x, name) for x in (self, other)]) for name in PARTS}
        return replace(self, **both)

    @property
    def height(self):
        """Angles in degrees at which cameras stand above the object's horizon, `(V,)`."""
        place = -(self.translation[:, None] @ self.rotation.mT)[:, 0]
        return (place[:, 1] / place.norm(dim=1)).asin().rad2deg()

    def at(self, xy):
        """Return pixels `(V, n, 4)`, interpolated, at points of the image plane, `(V, n, 2)`."""
        # grid_sample counts from the left and from the top, between the outer edges of pixels.
        grid = -xy[:, :, None]
        found = F.grid_sample(self.pixels, grid, padding_mode="border", align_corners=False)
        return found[..., 0].movedim(1, -1)


def load(name):
    """Return the views in a numpy archive, by its path, or its place in the data folders."""
    if (path := Path(name) if Path(name).is_file() else common.find(name)) is None:
        raise FileNotFoundError(
            f"{common.looked(name)}. Set TYXE_DATA to a folder that has it, or name an archive of "
            "your own with --data: docs/nerf.md says which arrays it holds"
        )
    with np.load(path) as found:
        if missing := [key for key in ARRAYS if key not in found]:
            expected = f"expected {', '.join(ARRAYS)}: docs/nerf.md says of which shapes"
            raise ValueError(f"{path} has no {', '.join(missing)}; {expected}")
        images, silhouettes, *cameras, fov = (torch.from_numpy(found[key]) for key in ARRAYS)
    pixels = torch.cat([images, silhouettes[..., None]], -1).movedim(-1, 1) / 255
    return Views(pixels, *(each.float() for each in cameras), float(fov))


def rays(views, xy):
    """Return origins and directions `(V, n, 3)` of rays through points of the image plane.

    Directions have z = 1 before the camera, so that lengths are depths.
    """
    plane, back = math.tan(math.radians(views.fov) / 2) * xy, views.rotation.mT
    directions = torch.cat([plane, torch.ones_like(xy[..., :1])], -1) @ back
    return (-views.translation[:, None] @ back).expand_as(directions), directions


def pixel_centres(size):
    line = 1 - (2 * torch.arange(size) + 1) / size
    return torch.cartesian_prod(line, line).flip(-1)


def march(opacity, colour):
    """Return colour and opacity of rays, `(..., 4)`, by emission and absorption.

    `colour = sum_i a_i c_i prod_{j < i} (1 - a_j)` and `opacity = 1 - prod_i (1 - a_i)`, of
    opacities `a` from near to far, `(..., depths)`, and colours `c`, `(..., depths, 3)`.
    """
    left = (1 - opacity).cumprod(-1)
    arriving = torch.cat([torch.ones_like(left[..., :1]), left[..., :-1]], -1)
    seen = ((opacity * arriving)[..., None] * colour).sum(-2)
    return torch.cat([seen, 1 - left[..., -1:]], -1)


def in_chunks(field, points, directions, size):
    """Return what a field returns, asked for `size` points at a time: memory has its bounds."""
    count = max(1, size // points.shape[1])
    parts = zip(points.split(count), directions.split(count), strict=True)
    return tuple(map(torch.cat, zip(*(field(*part) for part in parts), strict=True)))


@dataclass(frozen=True)
class Renderer:
    """Images of `size` pixels a side, by points at `depths` equal steps, a `chunk` at a time."""

    size: int
    depths: int
    near: float
    far: float
    chunk: int

    def through(self, views, field, xy):
        """Return colour and opacity, `(V, n, 4)`, at points `xy` of the image plane."""
        origins, directions = (part.flatten(0, 1) for part in rays(views, xy))
        depths = torch.linspace(self.near, self.far, self.depths, device=xy.device)
        points = origins[:, None] + depths[:, None] * directions[:, None]
        found = in_chunks(field, points, F.normalize(directions, dim=-1), self.chunk)
        return march(*found).unflatten(0, xy.shape[:2])

    def random_rays(self, views, field, count):
        """Return colour and opacity of random rays, `(V, count, 4)`, and where, `(V, count, 2)`."""
        like = views.translation
        xy = 2 * torch.rand(len(views), count, 2, dtype=like.dtype, device=like.device) - 1
        return self.through(views, field, xy), xy

    def images(self, views, field):
        xy = pixel_centres(self.size).to(views.pixels).expand(len(views), -1, -1)
        return self.through(views, field, xy).mT.unflatten(-1, (self.size, self.size))
