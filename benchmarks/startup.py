"""Time until something happens: importing the library, making a BNN of a ResNet-50, its first step.

Every contestant is a fresh interpreter that goes one stage further than the one before, for what
is imported or cached by one would be a present to the next. The time of a stage is the difference
between neighbours.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping

import torch
from _harness import Case, Contestant, Numbers, difference, run

IMPORT = "import torch, pyro"
TYXE = "import tyxe"
MAKE_NET = """
    from torchvision.models import resnet50
    net = resnet50()
    x, y = torch.randn(2, 3, 32, 32), torch.randint(1000, (2,))
"""
MAKE_SMALL_NET = """
    net = torch.nn.Linear(3, 2)
    x, y = torch.randn(2, 3), torch.randint(2, (2,))
"""
MAKE_BNN = """
    import functools
    import pyro.distributions as dist
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[torch.nn.BatchNorm2d])
    guide = functools.partial(
        tyxe.guides.AutoNormal, init_loc_fn=tyxe.guides.PretrainedInitializer.from_net(net)
    )
    bnn = tyxe.VariationalBNN(net, prior, tyxe.likelihoods.Categorical(2), guide)
"""
FIT = """
    import warnings
    warnings.simplefilter("ignore", tyxe.TyxeWarning)  # one step leaves the bound far from the data
    bnn.fit([(x, y)], pyro.optim.Adam({"lr": 1e-3}), num_epochs=1)
"""


def fresh(*stages: str) -> Callable[[], None]:
    """Return a run of some stages in an interpreter of its own, on as many threads as here."""
    threads = f"torch.set_num_threads({torch.get_num_threads()})"
    code = "\n".join([stages[0], threads, *map(textwrap.dedent, stages[1:])])

    def run_fresh() -> None:
        subprocess.run([sys.executable, "-c", code], check=True)

    return run_fresh


def stages_of(found: list[Contestant]) -> Callable[[Numbers], Mapping[str, dict[str, float]]]:
    """Return what each contestant takes beyond the one before, in seconds."""

    def findings(numbers: Numbers) -> Mapping[str, dict[str, float]]:
        return {
            f"{c.name}, beyond the line above, in seconds": difference(numbers, c.name, before.name)
            for before, c in itertools.pairwise(found)
        }

    return findings


def import_case(smoke_test: bool) -> Case:
    """Return the import, which is the same in a smoke test."""
    found = [
        Contestant("import torch and pyro", fresh(IMPORT), "plain"),
        Contestant("import tyxe", fresh(IMPORT, TYXE), "ours"),
    ]
    title = "Importing, in a fresh interpreter"
    return Case("import", title, "run", 15, found, not smoke_test, findings=stages_of(found))


def resnet50_case(smoke_test: bool) -> Case:
    """Return torchvision's ResNet-50, with 1,000 classes; its step sees two images of 32 x 32."""
    make_net = MAKE_SMALL_NET if smoke_test else MAKE_NET
    stages = [IMPORT, TYXE, make_net]
    found = [
        Contestant("imports and the net", fresh(*stages), "plain"),
        Contestant("VariationalBNN(net, ...)", fresh(*stages, MAKE_BNN), "ours"),
        Contestant("first step of fit", fresh(*stages, MAKE_BNN, FIT), "ours"),
    ]
    title = "BNN of torchvision's ResNet-50, in a fresh interpreter"
    return Case("resnet50", title, "run", 7, found, not smoke_test, findings=stages_of(found))


if __name__ == "__main__":
    run(
        "Seconds of fresh interpreters that import the library, make a BNN of a ResNet-50 and fit "
        "it for one step, and differences between them.",
        {"import": import_case, "resnet50": resnet50_case},
    )
