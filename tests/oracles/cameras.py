"""Cameras in PyTorch3D's convention, by the axes that they must have."""

import math

import numpy as np
import torch
from rendering import Views

DISTANCE, FOV = 2.7, 60.0


def cameras(azimuths, elevation=0.0):
    """Return `R` and `T` of cameras that look at the origin, by the axes that they must have."""
    rotations = []
    for azimuth in azimuths:
        a, e = math.radians(azimuth), math.radians(elevation)
        place = np.array([math.cos(e) * math.sin(a), math.sin(e), math.cos(e) * math.cos(a)])
        ahead = -place
        left = np.cross([0, 1, 0], ahead)
        left /= np.linalg.norm(left)
        # Row vectors: the columns of R are the camera's axes in the world.
        rotations.append(np.stack([left, np.cross(ahead, left), ahead], 1))
    translation = np.tile([0, 0, DISTANCE], (len(azimuths), 1))
    return torch.tensor(np.stack(rotations)), torch.tensor(translation)


def views_from(azimuths, elevation=0.0, size=16):
    rotation, translation = cameras(azimuths, elevation)
    pixels = torch.zeros(len(azimuths), 4, size, size).double()
    return Views(pixels, rotation, translation, torch.tensor(azimuths).double(), FOV)


def pixel_grid(size):
    """Return x and y of pixel centres, `(size, size)`, as the data's description has them."""
    i, j = np.mgrid[:size, :size]
    return 1 - (2 * j + 1) / size, 1 - (2 * i + 1) / size
