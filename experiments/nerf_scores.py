"""Scores of images and of their standard deviations, for nerf.py.

The error of a pixel is the length of the difference of two colours, and its standard deviation the
root of the sum of the variances of the three: where draws are like the truth their mean squares
agree. Both are looked at on the object, where the truth's coverage is above one half.
"""

import tables
import torch


def huber(prediction, target):
    """Return the mean of a smooth absolute error, `0.1 (sqrt(1 + d^2 / 0.01) - 1)`."""
    return (0.1 * ((1 + (prediction - target).square() / 0.01).sqrt() - 1)).mean()


def image_loss(rendered, target):
    """Return the error of colours plus that of coverage; both are `(..., 4)`."""
    return huber(rendered[..., :3], target[..., :3]) + huber(rendered[..., 3], target[..., 3])


def errors(images, views):
    """Return errors of images `(V, 4, size, size)`, colours' peak signal-to-noise ratio in dB."""
    pixels, found = (part.movedim(1, -1) for part in (views.pixels, images))
    return {
        "colour": huber(found[..., :3], pixels[..., :3]).item(),
        "colour + silhouette": image_loss(found, pixels).item(),
        "PSNR": -10 * (found - pixels)[..., :3].square().mean().log10().item(),
    }


def uncertainty(draws):
    """Return `sqrt(sum of the variances of colours)` of draws `(S, V, 4, ...)`: `(V, ...)`."""
    return draws[:, :, :3].var(0).sum(1).sqrt()


def colour_error(images, views):
    """Return the root of the sum of squared errors of colours, `(V, size, size)`."""
    return (images - views.pixels)[:, :3].square().sum(1).sqrt()


def on_object(views):
    return views.pixels[:, 3] > 0.5


def rms(x):
    return x.square().mean().sqrt().item()


def rank_correlation(x, y):
    ranks = torch.stack([part.argsort().argsort().double() for part in (x, y)])
    return ranks.corrcoef()[0, 1].item()


def reliability(sd, images, views, bins=10):
    """Return how standard deviations of the object's pixels go with errors of the mean.

    The mean sd of all pixels and of the object's, the rank correlation of sd and error on the
    object, root mean squares of both in bins of the same number of pixels, and `sparsification`.
    """
    mask = on_object(views)
    error, found = colour_error(images, views)[mask], sd[mask]
    order = found.argsort().tensor_split(bins)
    return {
        "sd": sd.mean().item(),
        "sd on the object": found.mean().item(),
        "error on the object": rms(error),
        "rank correlation": rank_correlation(found, error),
        "bins": [[rms(x[part]) for x in (found, error)] for part in order],
        "sparsification": sparsification(found, error),
    }


def sparsification(sd, error, steps=20):
    """Return root mean square errors of the pixels left when more and more are dropped.

    Those of the largest sd first, and, as the best order there is, those of the largest error; a
    random order changes nothing. `gain` is the mean fall of the error below that of all pixels by
    the first order over that by the second: 1 for the best order, 0 for a random one.
    """
    dropped = [step / steps for step in range(steps)]
    left = [len(error) - int(share * len(error)) for share in dropped]
    curves = {}
    for name, key in (("by sd", sd), ("by error", error)):
        sums = error[key.argsort()].double().square().cumsum(0)
        curves[name] = torch.stack([(sums[n - 1] / n).sqrt() for n in left])
    fall, best = (curves[name][0] - curves[name].mean() for name in curves)
    rounded = {name: tables.rounded(curve, 5) for name, curve in curves.items()}
    return {"dropped": dropped, **rounded, "gain": (fall / best).item()}


def by_view(images, views, draws=None):
    """Return root mean squares of a view's errors, and, of draws, of its standard deviations.

    Those of colours are of the object's pixels, those of silhouettes of all.
    """

    def each(pixels, mask):
        squares = pixels.square() * mask
        return tables.rounded((squares.sum((1, 2)) / mask.sum((1, 2))).sqrt(), 5)

    mask = on_object(views)
    everywhere = torch.ones_like(mask)
    found = {
        "azimuth": tables.rounded(views.azimuth, 2),
        "height": tables.rounded(views.height, 2),
        "error": each(colour_error(images, views), mask),
        "silhouette error": each((images - views.pixels)[:, 3], everywhere),
    }
    if draws is not None:
        found["sd"] = each(uncertainty(draws), mask)
        found["silhouette sd"] = each(draws[:, :, 3].std(0), everywhere)
    return found
