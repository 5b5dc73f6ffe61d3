"""Scores of images and of their standard deviations, and figures of them, for nerf.py.

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


def by_part(draws, views, parts):
    """Return the scores of images `(S, V, 4, size, size)` in each part of the views."""
    mean, found = draws.mean(0), {"errors": {}, "views": {}}
    for part, some in parts.items():
        found["errors"][part] = errors(mean[some], views[some])
        own = draws[:, some] if len(draws) > 1 else None
        found["views"][part] = by_view(mean[some], views[some], own)
        if own is not None:
            told = reliability(uncertainty(own), mean[some], views[some])
            found.setdefault("uncertainty", {})[part] = told
    if len(draws) > 1:
        # What few draws cost: the same score by the first 2, 4, 8 and so on.
        seen, own = views[parts["held out"]], draws[:, parts["held out"]]
        mask, ranks = on_object(seen), {}
        for n in (2**k for k in range(1, len(own).bit_length())):
            error = colour_error(own[:n].mean(0), seen)[mask]
            ranks[str(n)] = rank_correlation(uncertainty(own[:n])[mask], error)
        found["rank correlation by draws"] = ranks
    return found


# --------------------------------------------------------------------------- figures

UNSEEN = {"color": "0.9", "zorder": 0}


def images_of_views(views, titles, pictures):
    """Draw truth, images, and errors beside standard deviations on one scale of colours.

    `titles` are of some of the views by number, `pictures` have the `images` of methods and, where
    they have draws, the `sd` and the silhouettes' (`coverage sd`).
    """
    columns = [*titles]
    rows, scaled = {"truth": views.pixels}, {}
    for name, found in pictures.items():
        rows[name] = found["images"]
        if "sd" in found:
            scaled[f"{name},\nerror"] = colour_error(found["images"], views)
            scaled[f"{name},\nsd"] = found["sd"]
    of_draws = next(name for name, found in pictures.items() if "sd" in found)
    scaled[f"{of_draws},\nsd of silhouette"] = pictures[of_draws]["coverage sd"]
    limit = torch.stack([*scaled.values()])[:, columns].quantile(0.995).item()
    ticks, count = {"xticks": [], "yticks": []}, len(rows) + len(scaled)
    size = (1.4 * len(columns), 1.32 * count + 0.3)
    how = {"figsize": size, "subplot_kw": ticks, "squeeze": False}
    panels, axes = tables.subplots(count, len(columns), **how)
    for line, view in zip(axes.T, columns, strict=True):
        for ax, images in zip(line, rows.values(), strict=False):
            ax.imshow(images[view, :3].movedim(0, -1).clamp(0, 1).numpy())
        for ax, values in zip(line[len(rows) :], scaled.values(), strict=True):
            shown = ax.imshow(values[view].numpy(), vmin=0, vmax=limit)
        line[0].set_title(titles[view], fontsize=9)
    for ax, title in zip(axes[:, 0], [*rows, *scaled], strict=True):
        ax.set_ylabel(title, fontsize=9)
    panels.colorbar(shown, ax=axes[len(rows) :], shrink=0.6, aspect=30)
    return panels


def gap(found):
    """Return the azimuths where the gap of the held-out views begins and ends."""
    seen = found["train"]["azimuth"]
    return max(seen), min(seen) + 360


def around(methods):
    """Draw errors and standard deviations against where the camera stands.

    `methods` have, by name, what the record has of the views of each part.
    """
    shape, share = (2, len(methods)), {"sharex": "col", "sharey": "row", "squeeze": False}
    drawn, axes = tables.subplots(*shape, figsize=(4.6 * len(methods), 5.4), **share)
    for column, (name, found) in zip(axes.T, methods.items(), strict=True):
        parts = [found["train"], found["held out"]]
        azimuth = [a for part in parts for a in part["azimuth"]]
        for ax, kind in zip(column, ("", "silhouette "), strict=True):
            ax.axvspan(*gap(found), label="no training views", **UNSEEN)
            for what, look in ((f"{kind}error", "C3o-"), (f"{kind}sd", "C0s-")):
                values = [value for part in parts for value in part[what]]
                ax.plot(azimuth, values, look, label=what.split()[-1], markersize=3)
        column[0].set_title(name)
        column[1].set_xlabel("azimuth of the camera (degrees)")
    for ax, label in zip(axes[:, 0], ("colours of the object", "silhouettes"), strict=True):
        ax.set_ylabel(f"{label} (rms)")
        ax.set_ylim(bottom=0)  # at the end: a limit ends the search for the others
    axes[0, -1].legend(loc="upper left")
    return drawn


def over_and_under(methods):
    """Draw the same against the height of cameras on another path, beside those of training."""
    shape, share = (1, len(methods)), {"sharey": True, "squeeze": False}
    drawn, axes = tables.subplots(*shape, figsize=(4.6 * len(methods), 3.4), **share)
    for ax, (name, found) in zip(axes[0], methods.items(), strict=True):
        part = found["over and under"]
        for what, look in (("error", "C3o"), ("sd", "C0s")):
            ax.plot(part["height"], part[what], look, label=what, markersize=4)
            seen = found["train"][what]
            level = (sum(x * x for x in seen) / len(seen)) ** 0.5
            how = {"color": look[:2], "linestyle": "dashed", "linewidth": 0.8}
            ax.axhline(level, label=f"{what}, training views", **how)
        ax.set(title=name, xlabel="height of the camera (degrees)")
    axes[0, 0].set_ylabel("colours of the object (rms)")
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].legend(fontsize=8)
    return drawn


def sparsifications(methods):
    """Draw errors of the pixels left against the share dropped, for each part of the views."""
    parts = [*next(iter(methods.values()))]
    drawn, axes = tables.subplots(1, len(parts), figsize=(4 * len(parts), 3.6), sharey=True)
    for ax, part in zip(axes, parts, strict=True):
        for i, (name, found) in enumerate(methods.items()):
            curve = found[part]["sparsification"]
            dropped = [100 * share for share in curve["dropped"]]
            color, best = f"C{i}", f"{name}, largest errors first"
            ax.plot(dropped, curve["by sd"], color=color, label=f"{name}, largest sd first")
            ax.plot(dropped, curve["by error"], ":", color=color, label=best)
            level, at_random = [curve["by sd"][0]] * 2, f"{name}, at random"
            ax.plot([0, 95], level, "--", color=color, linewidth=0.8, label=at_random)
        ax.set(title=part, xlabel="pixels dropped (%)")
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("error of those left (rms)")
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return drawn


def reliabilities(methods, curves):
    """Draw errors against standard deviations in bins, and the errors while training."""
    parts = [*next(iter(methods.values()))]
    drawn, axes = tables.subplots(1, len(methods) + 1, figsize=(4.2 * len(methods) + 4.2, 3.6))
    for ax, (name, found) in zip(axes, methods.items(), strict=False):
        for part in parts:
            ax.plot(*zip(*found[part]["bins"], strict=True), "o-", label=part, markersize=4)
        limit = max(ax.get_xlim()[1], ax.get_ylim()[1])
        ax.plot([0, limit], [0, limit], color="black", linestyle="dashed", linewidth=0.8)
        ax.set(title=name, xlabel="standard deviation of a pixel's colour (rms)")
    axes[0].set_ylabel("error of the mean (rms)")
    for name, curve in curves.items():
        axes[-1].plot(*zip(*curve, strict=True), label=name, linewidth=0.8)
    axes[-1].set(xlabel="step", ylabel="error of colours and silhouettes", yscale="log")
    for ax in (axes[0], axes[-1]):
        ax.legend(fontsize=8)
    return drawn


def one_view(views, view, found):
    """Draw truth, mean and standard deviation of a view, without a word."""
    drawn, axes = tables.subplots(1, 3, figsize=(3.2, 1.1), subplot_kw={"xticks": [], "yticks": []})
    mean, sd = found["images"][view, :3], found["sd"][view]
    for ax, image in zip(axes, (views.pixels[view, :3], mean), strict=False):
        ax.imshow(image.movedim(0, -1).clamp(0, 1).numpy())
    axes[2].imshow(sd.numpy(), cmap="gray")
    return drawn
