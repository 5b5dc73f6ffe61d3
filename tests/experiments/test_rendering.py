"""experiments/rendering.py: cameras, marching against closed forms, and views of other layouts."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rendering import Renderer, load, march, pixel_centres, rays
from torch.nn.functional import max_pool2d

from tests.oracles.cameras import DISTANCE, FOV, pixel_grid, views_from


def ball(centre, radius):
    """Return an opaque field of one colour."""

    def field(points, directions):
        inside = (points - centre).norm(dim=-1) < radius
        colour = torch.tensor([0.2, 0.5, 0.9], dtype=points.dtype)
        return inside.to(points.dtype), colour.expand_as(points)

    return field


# --------------------------------------------------------------------------- cameras


def test_rays_pass_through_their_pixels():
    size, depth = 5, 1.7
    views = views_from([0.0, 50.0, 200.0], elevation=20.0)
    xy = pixel_centres(size).double().expand(3, -1, -1)
    x, y = pixel_grid(size)
    torch.testing.assert_close(xy[0], torch.tensor(np.stack([x, y], -1).reshape(-1, 2)))
    origins, directions = rays(views, xy)
    camera = (origins + depth * directions) @ views.rotation + views.translation[:, None]
    torch.testing.assert_close(camera[..., 2], torch.full_like(camera[..., 2], depth))
    f = 1 / math.tan(math.radians(FOV) / 2)
    torch.testing.assert_close(f * camera[..., :2] / depth, xy)
    # all leave from the camera's place, 2.7 from the origin
    a, e = torch.tensor([0.0, 50.0, 200.0]).double().deg2rad(), math.radians(20)
    place = torch.stack([math.cos(e) * a.sin(), math.sin(e) + 0 * a, math.cos(e) * a.cos()], 1)
    torch.testing.assert_close(origins[:, 0], DISTANCE * place)


@pytest.mark.parametrize("centre", [(0.0, 0.0, 0.0), (0.3, -0.2, 0.4)])
def test_silhouette_of_a_ball(centre):
    """Where a line through the camera's place comes nearer to the centre than the radius."""
    size, depths, near, far, radius = 48, 400, 1.0, 4.5, 0.6
    views = views_from([0.0, 40.0, 130.0, 260.0], elevation=30.0, size=size)
    centre = torch.tensor(centre).double()
    renderer = Renderer(size, depths, near, far, 10_000)
    found = renderer.images(views, ball(centre, radius))
    x, y = (torch.tensor(part) for part in pixel_grid(size))
    half = math.tan(math.radians(FOV) / 2)
    lines = torch.stack([half * x, half * y, torch.ones_like(x)], -1)
    step = (far - near) / (depths - 1)
    for image, rotation in zip(found, views.rotation, strict=True):
        seen = centre @ rotation + torch.tensor([0.0, 0.0, DISTANCE])
        squared = lines.square().sum(-1)
        # |t line - seen|^2 = radius^2: the roots t are the depths where the line enters and leaves
        under = (lines @ seen).square() - squared * (seen.square().sum() - radius**2)
        chord = 2 * under.clamp(min=0).sqrt() / squared
        assert bool((image[3][under <= 0] == 0).all())
        # some of the depths lie inside, unless the chord is shorter than their step
        assert bool((image[3][chord > step] == 1).all())
        assert 50 < int((chord > step).sum()) < size**2 / 2
        expected = torch.tensor([0.2, 0.5, 0.9]).double()[:, None, None] * image[3]
        torch.testing.assert_close(image[:3], expected)


def test_views_at_pixel_centres_are_their_pixels():
    views = views_from([0.0, 90.0], size=8)
    views = replace(views, pixels=torch.rand(2, 4, 8, 8).double())
    found = views.at(pixel_centres(8).double().expand(2, -1, -1))
    torch.testing.assert_close(found, views.pixels.flatten(2).mT)
    # halfway between two centres, their mean: pixels (3, 2) and (3, 3)
    halfway = torch.tensor([1 - 6 / 8, 1 - 7 / 8]).double().expand(2, 1, 2)
    expected = views.pixels[:, :, 3, 2:4].mean(-1)
    torch.testing.assert_close(views.at(halfway)[:, 0], expected)
    assert len(views[torch.tensor([1])]) == 1


def hull(views, masks):
    """Return the field that is opaque where all cameras see something."""
    f, size = 1 / math.tan(math.radians(views.fov) / 2), masks.shape[-1]

    def field(points, directions):
        inside = torch.ones(points.shape[:-1], dtype=torch.bool)
        for mask, rotation, shift in zip(masks, views.rotation, views.translation, strict=True):
            camera = points @ rotation + shift
            place = (1 - f * camera[..., :2] / camera[..., 2:]) * size / 2
            j, i = place.long().clamp(0, size - 1).unbind(-1)
            inside &= mask[i, j]
        return inside.float(), torch.ones_like(points)

    return field


@pytest.mark.parametrize("name", ["cow_views_equator", "cow_views"])
def test_cow_fills_its_silhouettes(name: str):
    """Each point of the cow is seen by all 40 cameras, so that their common hull covers all of it.

    Silhouettes are known to the pixel, and are taken one pixel wider.
    """
    try:
        views = load(f"cow/{name}.npz")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    masks = views.pixels[:, 3] > 0
    wider = max_pool2d(masks[:, None].float(), 3, 1, 1)[:, 0] > 0
    some = torch.tensor([0, 13])
    # depths that lie closer than pixels do
    renderer = Renderer(64, 80, 1.65, 3.75, 2**18)
    covered = renderer.images(views[some], hull(views, wider))[:, 3] > 0
    assert bool(covered[masks[some]].all())
    assert not bool(covered[~wider[some]].any())
    # read as R^T, the cameras have much less in common
    turned = replace(views, rotation=views.rotation.mT)
    covered = renderer.images(turned[some], hull(turned, wider))[:, 3] > 0
    assert covered[masks[some]].float().mean() < 0.9


# --------------------------------------------------------------------------- marching


def test_march_is_the_sum_over_points():
    torch.manual_seed(0)
    opacity, colour = torch.rand(3, 5).double(), torch.rand(3, 5, 3).double()
    for found, a, c in zip(march(opacity, colour), opacity, colour, strict=True):
        left, seen = 1.0, torch.zeros(3).double()
        for a_i, c_i in zip(a, c, strict=True):
            seen, left = seen + left * a_i * c_i, left * (1 - a_i)
        torch.testing.assert_close(found, torch.cat([seen, (1 - left)[None]]))


def test_field_gets_unit_directions_in_pieces():
    views, calls = views_from([0.0, 70.0], size=6), []

    def field(points, directions):
        calls.append(len(points))
        torch.testing.assert_close(directions.norm(dim=-1), torch.ones(len(points)).double())
        assert points.shape == (len(directions), 10, 3)
        return points[..., 0].sigmoid(), directions[:, None].expand_as(points)

    whole = Renderer(6, 10, 1.0, 4.0, 10_000).images(views, field)
    assert calls == [72]
    calls.clear()
    pieces = Renderer(6, 10, 1.0, 4.0, 250).images(views, field)
    assert calls == [25, 25, 22]
    torch.testing.assert_close(pieces, whole)
    found, xy = Renderer(6, 10, 1.0, 4.0, 250).random_rays(views, field, 7)
    assert found.shape == (2, 7, 4)
    assert xy.shape == (2, 7, 2)
    assert bool((xy.abs() < 1).all())
