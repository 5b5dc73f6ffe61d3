"""Figures of nerf.py: images of some views, and curves of the record."""

import tables
import torch
from nerf_scores import colour_error

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
