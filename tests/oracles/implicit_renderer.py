"""What `pytorch3d.renderer` has of an implicit renderer, by its documentation, in loops and sums.

Written from the conventions of PyTorch3D's documentation, for tests where it is not installed:
rows times matrices, rays whose lengths are depths, images whose +x is left and +y is up. It shares
no code with experiments/rendering.py.
"""

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
    return (
        bundle.origins[..., None, :] + bundle.lengths[..., None] * bundle.directions[..., None, :]
    )


class FoVPerspectiveCameras:
    """Cameras by the angle of their view, in degrees."""

    def __init__(self, R: Tensor, T: Tensor, fov: float, device: Any = "cpu") -> None:
        self.R, self.T = R.to(device), T.to(device)
        self.scale = torch.tan(torch.deg2rad(torch.tensor(fov, dtype=T.dtype)) / 2)

    def unproject(self, view: int, xy: Tensor, depth: float) -> Tensor:
        """Return the point of the world at a point of the image and a depth."""
        camera = torch.stack(
            [xy[0] * depth * self.scale, xy[1] * depth * self.scale, xy[0] * 0 + depth]
        )
        # X_camera = X_world R + T
        return torch.linalg.solve(self.R[view].T, camera - self.T[view])


def _bundle(cameras: FoVPerspectiveCameras, xys: Tensor, lengths: Tensor) -> RayBundle:
    """Return rays through points of the image `(V, n, 2)`."""
    origins, directions = torch.empty(*xys.shape[:2], 3), torch.empty(*xys.shape[:2], 3)
    for view, points in enumerate(xys):
        for ray, xy in enumerate(points):
            one, two = (cameras.unproject(view, xy, depth) for depth in (1.0, 2.0))
            directions[view, ray], origins[view, ray] = two - one, 2 * one - two
    return RayBundle(origins, directions, lengths.expand(*xys.shape[:2], -1), xys)


class NDCMultinomialRaysampler:
    """A ray through the centre of each pixel."""

    def __init__(
        self,
        *,
        image_width: int,
        image_height: int,
        n_pts_per_ray: int,
        min_depth: float,
        max_depth: float,
    ) -> None:
        self.size = image_height, image_width
        self.lengths = torch.linspace(min_depth, max_depth, n_pts_per_ray)

    def __call__(self, cameras: FoVPerspectiveCameras, **_: Any) -> RayBundle:
        height, width = self.size
        xys = torch.tensor(
            [
                [1 - (2 * column + 1) / width, 1 - (2 * row + 1) / height]
                for row in range(height)
                for column in range(width)
            ]
        )
        found = _bundle(cameras, xys.expand(len(cameras.T), -1, -1), self.lengths)
        return RayBundle(*(part.unflatten(1, self.size) for part in found))


class MonteCarloRaysampler:
    """Rays through random points of a rectangle."""

    def __init__(
        self,
        min_x: float,
        max_x: float,
        min_y: float,
        max_y: float,
        n_rays_per_image: int,
        n_pts_per_ray: int,
        min_depth: float,
        max_depth: float,
    ) -> None:
        self.low, self.high = torch.tensor([min_x, min_y]), torch.tensor([max_x, max_y])
        self.count = n_rays_per_image
        self.lengths = torch.linspace(min_depth, max_depth, n_pts_per_ray)

    def __call__(self, cameras: FoVPerspectiveCameras, **_: Any) -> RayBundle:
        xys = self.low + (self.high - self.low) * torch.rand(len(cameras.T), self.count, 2)
        return RayBundle(*(part[:, :, None] for part in _bundle(cameras, xys, self.lengths)))


class EmissionAbsorptionRaymarcher:
    """Features and opacity of rays, a depth after the other."""

    def __call__(self, rays_densities: Tensor, rays_features: Tensor, **_: Any) -> Tensor:
        left, seen = (
            torch.ones_like(rays_densities[..., 0, :]),
            torch.zeros_like(rays_features[..., 0, :]),
        )
        for depth in range(rays_densities.shape[-2]):
            seen = seen + left * rays_densities[..., depth, :] * rays_features[..., depth, :]
            left = left * (1 - rays_densities[..., depth, :])
        return torch.cat([seen, 1 - left], -1)


class ImplicitRenderer:
    """Samples rays, asks the function for densities and features, and marches."""

    def __init__(self, raysampler: Any, raymarcher: Any) -> None:
        self.raysampler, self.raymarcher = raysampler, raymarcher

    def __call__(
        self, cameras: FoVPerspectiveCameras, volumetric_function: Any
    ) -> tuple[Tensor, RayBundle]:
        bundle = self.raysampler(cameras=cameras, volumetric_function=volumetric_function)
        densities, features = volumetric_function(ray_bundle=bundle, cameras=cameras)
        return self.raymarcher(densities, features, ray_bundle=bundle), bundle
