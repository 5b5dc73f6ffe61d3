"""What `pytorch3d.renderer` has of an implicit renderer, by its documentation, in loops and sums.

For tests where PyTorch3D is not installed: rows times matrices, rays whose lengths are depths,
images whose +x is left and +y is up. It shares no code with experiments/rendering.py.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RayBundle(NamedTuple):
    """Rays `(V, ..., 3)`, depths on them `(V, ..., P)`, and points of the image `(V, ..., 2)`."""

    origins: Tensor
    directions: Tensor
    lengths: Tensor
    xys: Tensor


def ray_bundle_to_ray_points(bundle: RayBundle) -> Tensor:
    along = bundle.lengths[..., None] * bundle.directions[..., None, :]
    return bundle.origins[..., None, :] + along


class FoVPerspectiveCameras:
    """Cameras by the angle of their view, in degrees."""

    def __init__(self, R: Tensor, T: Tensor, fov: float, device: Any = "cpu") -> None:
        self.R, self.T = R.to(device), T.to(device)
        self.scale = torch.tan(torch.deg2rad(torch.tensor(fov, dtype=T.dtype)) / 2)

    def unproject(self, view: int, xy: Tensor, depth: float) -> Tensor:
        """Return the points of the world at points of the image `(n, 2)` and a depth."""
        camera = torch.cat([xy * depth * self.scale, torch.full_like(xy[:, :1], depth)], 1)
        # X_camera = X_world R + T
        return torch.linalg.solve(self.R[view].T, (camera - self.T[view]).T).T


def _bundle(cameras: FoVPerspectiveCameras, xys: Tensor, lengths: Tensor) -> RayBundle:
    """Return rays through points of the image `(V, n, 2)`."""
    one, two = (
        torch.stack([cameras.unproject(view, xy, depth) for view, xy in enumerate(xys)])
        for depth in (1.0, 2.0)
    )
    return RayBundle(2 * one - two, two - one, lengths.expand(*xys.shape[:2], -1), xys)


@dataclass(kw_only=True)
class NDCMultinomialRaysampler:
    """A ray through the centre of each pixel."""

    image_width: int
    image_height: int
    n_pts_per_ray: int
    min_depth: float
    max_depth: float

    def __call__(self, cameras: FoVPerspectiveCameras, **_: Any) -> RayBundle:
        size = height, width = self.image_height, self.image_width
        centres = [
            [1 - (2 * column + 1) / width, 1 - (2 * row + 1) / height]
            for row in range(height)
            for column in range(width)
        ]
        xys = torch.tensor(centres).expand(len(cameras.T), -1, -1)
        lengths = torch.linspace(self.min_depth, self.max_depth, self.n_pts_per_ray)
        return RayBundle(*(part.unflatten(1, size) for part in _bundle(cameras, xys, lengths)))


@dataclass(kw_only=True)
class MonteCarloRaysampler:
    """Rays through random points of a rectangle."""

    min_x: float
    max_x: float
    min_y: float
    max_y: float
    n_rays_per_image: int
    n_pts_per_ray: int
    min_depth: float
    max_depth: float

    def __call__(self, cameras: FoVPerspectiveCameras, **_: Any) -> RayBundle:
        low, high = torch.tensor([[self.min_x, self.min_y], [self.max_x, self.max_y]])
        xys = low + (high - low) * torch.rand(len(cameras.T), self.n_rays_per_image, 2)
        lengths = torch.linspace(self.min_depth, self.max_depth, self.n_pts_per_ray)
        return RayBundle(*(part[:, :, None] for part in _bundle(cameras, xys, lengths)))


class EmissionAbsorptionRaymarcher:
    """Features and opacity of rays, a depth after the other."""

    def __call__(self, rays_densities: Tensor, rays_features: Tensor, **_: Any) -> Tensor:
        left = torch.ones_like(rays_densities[..., 0, :])
        seen = torch.zeros_like(rays_features[..., 0, :])
        for depth in range(rays_densities.shape[-2]):
            seen = seen + left * rays_densities[..., depth, :] * rays_features[..., depth, :]
            left = left * (1 - rays_densities[..., depth, :])
        return torch.cat([seen, 1 - left], -1)


@dataclass
class ImplicitRenderer:
    """Samples rays, asks the function for densities and features, and marches."""

    raysampler: Any
    raymarcher: Any

    def __call__(
        self, cameras: FoVPerspectiveCameras, volumetric_function: Any
    ) -> tuple[Tensor, RayBundle]:
        bundle = self.raysampler(cameras=cameras, volumetric_function=volumetric_function)
        densities, features = volumetric_function(ray_bundle=bundle, cameras=cameras)
        return self.raymarcher(densities, features, ray_bundle=bundle), bundle
