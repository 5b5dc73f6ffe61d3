"""For nerf.py: images of a field, by our own renderer or by PyTorch3D's.

Both march along rays, with emission and absorption, and have the same methods. Cameras and points
of the image plane are those of `_views.py`. A field is a function of points `(n, depths, 3)` and
of the directions `(n, 3)`, of length one, that n rays have; it returns opacities in [0, 1],
`(n, depths)`, and colours, `(n, depths, 3)`.
"""

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

# --------------------------------------------------------------------------- our renderer


def rays(views, xy):
    """Return origins and directions `(V, n, 3)` of rays through points of the image plane.

    Directions have z = 1 before the camera, so that lengths are depths.
    """
    ahead = torch.cat(
        [math.tan(math.radians(views.fov) / 2) * xy, torch.ones_like(xy[..., :1])], -1
    )
    back = views.rotation.mT
    return -views.translation[:, None] @ back, ahead @ back


def pixel_centres(size):
    """Return points of the image plane, row by row, `(size * size, 2)`."""
    line = 1 - (2 * torch.arange(size) + 1) / size
    return torch.cartesian_prod(line, line).flip(-1)


def march(opacity, colour):
    r"""Return colour and opacity of rays, `(..., 4)`, by emission and absorption.

    `colour = sum_i a_i c_i prod_{j < i} (1 - a_j)` and `opacity = 1 - prod_i (1 - a_i)`.

    Args:
        opacity: `a`, from near to far, `(..., depths)`.
        colour: `c`, `(..., depths, 3)`.
    """
    left = (1 - opacity).cumprod(-1)
    arriving = torch.cat([torch.ones_like(left[..., :1]), left[..., :-1]], -1)
    seen = ((opacity * arriving)[..., None] * colour).sum(-2)
    return torch.cat([seen, 1 - left[..., -1:]], -1)


def in_chunks(field, points, directions, size):
    """Return what a field returns, asked for `size` points at a time: memory has its bounds."""
    count = max(1, size // points.shape[1])
    parts = [
        field(*part) for part in zip(points.split(count), directions.split(count), strict=True)
    ]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


@dataclass(frozen=True)
class TorchRenderer:
    """Emission and absorption along rays, at equal steps of depth.

    Attributes:
        size: of images, in pixels.
        depths: points on a ray.
        near: depth of the first.
        far: depth of the last.
        chunk: points that the field gets at a time.
    """

    size: int
    depths: int
    near: float
    far: float
    chunk: int

    def through(self, views, field, xy):
        """Return colour and opacity, `(V, n, 4)`, at points `xy` of the image plane."""
        origins, directions = (part.flatten(0, 1) for part in self._rays(views, xy))
        depths = torch.linspace(self.near, self.far, self.depths, device=xy.device)
        points = origins[:, None] + depths[:, None] * directions[:, None]
        found = in_chunks(field, points, F.normalize(directions, dim=-1), self.chunk)
        return march(*found).unflatten(0, xy.shape[:2])

    def _rays(self, views, xy):
        origins, directions = rays(views, xy)
        return origins.expand_as(directions), directions

    def random_rays(self, views, field, count):
        """Return colour and opacity of random rays, `(V, count, 4)`, and where, `(V, count, 2)`."""
        like = views.translation
        xy = 2 * torch.rand(len(views), count, 2, dtype=like.dtype, device=like.device) - 1
        return self.through(views, field, xy), xy

    def images(self, views, field):
        """Return whole images, `(V, 4, size, size)`."""
        xy = pixel_centres(self.size).to(views.pixels).expand(len(views), -1, -1)
        return self.through(views, field, xy).mT.unflatten(-1, (self.size, self.size))


# --------------------------------------------------------------------------- PyTorch3D's


class Pytorch3dRenderer:
    """The same by PyTorch3D's `ImplicitRenderer`; arguments and methods are the same.

    Raises:
        ModuleNotFoundError: PyTorch3D is not installed.
    """

    def __init__(self, size, depths, near, far, chunk):
        try:
            from pytorch3d import renderer
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"--renderer pytorch3d needs {error.name}, which is not on the package index: pip "
                'install "git+https://github.com/facebookresearch/pytorch3d.git", or leave the '
                "option out"
            ) from error
        self.p3d, self.chunk = renderer, chunk
        along = {"n_pts_per_ray": depths, "min_depth": near, "max_depth": far}
        self._along = along
        grid = renderer.NDCMultinomialRaysampler(image_width=size, image_height=size, **along)
        self._grid = self._renderer(grid)

    def _renderer(self, raysampler):
        marcher = self.p3d.EmissionAbsorptionRaymarcher()
        return self.p3d.ImplicitRenderer(raysampler=raysampler, raymarcher=marcher)

    def _render(self, renderer, views, field):
        cameras = self.p3d.FoVPerspectiveCameras(
            R=views.rotation, T=views.translation, fov=views.fov, device=views.pixels.device
        )

        def volume(ray_bundle, **_):
            points = self.p3d.ray_bundle_to_ray_points(ray_bundle)
            directions = F.normalize(ray_bundle.directions, dim=-1)
            flat = points.reshape(-1, *points.shape[-2:]), directions.reshape(-1, 3)
            opacity, colour = in_chunks(field, *flat, self.chunk)
            return opacity.reshape(*points.shape[:-1], 1), colour.reshape(points.shape)

        return renderer(cameras=cameras, volumetric_function=volume)

    def random_rays(self, views, field, count):
        """Return colour and opacity of random rays, `(V, count, 4)`, and where, `(V, count, 2)`."""
        edges = {"min_x": -1.0, "max_x": 1.0, "min_y": -1.0, "max_y": 1.0}
        sampler = self.p3d.MonteCarloRaysampler(**edges, n_rays_per_image=count, **self._along)
        found, ray_bundle = self._render(self._renderer(sampler), views, field)
        return (part.reshape(len(views), count, -1) for part in (found, ray_bundle.xys))

    def images(self, views, field):
        """Return whole images, `(V, 4, size, size)`."""
        return self._render(self._grid, views, field)[0].movedim(-1, 1)


RENDERERS = {"torch": TorchRenderer, "pytorch3d": Pytorch3dRenderer}
