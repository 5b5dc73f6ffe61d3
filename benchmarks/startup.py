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
import warnings
from collections.abc import Callable, Mapping
from functools import partial

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
    import pyro.distributions as dist
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[torch.nn.BatchNorm2d])
    likelihood = tyxe.likelihoods.Categorical(2)
    bnn = tyxe.VariationalBNN(net, prior, likelihood, tyxe.guides.AutoNormal)
"""
FIT = """
    import warnings
    warnings.simplefilter("ignore", tyxe.TyxeWarning)  # one step leaves the bound far from the data
    bnn.fit([(x, y)], pyro.optim.Adam({"lr": 1e-3}), num_epochs=1)
"""


def program(*stages: str) -> str:
    """Return the code of some stages, on as many threads as here."""
    threads = f"torch.set_num_threads({torch.get_num_threads()})"
    return "\n".join([stages[0], threads, *map(textwrap.dedent, stages[1:])])


def fresh(code: str) -> None:
    """Run code in an interpreter of its own."""
    subprocess.run([sys.executable, "-c", code], check=True)


def here(code: str) -> None:
    """Run code in this interpreter, names apart: what it imports may be there already."""
    with warnings.catch_warnings():
        exec(code, {})


def stage(name: str, who: str, smoke_test: bool, *stages: str) -> Contestant:
    """Return a run of some stages, in this interpreter for a smoke test."""
    return Contestant(name, partial(here if smoke_test else fresh, program(*stages)), who)


def stages_of(found: list[Contestant]) -> Callable[[Numbers], Mapping[str, dict[str, float]]]:
    """Return what each contestant takes beyond the one before, in seconds."""

    def findings(numbers: Numbers) -> Mapping[str, dict[str, float]]:
        return {
            f"{c.name}, beyond the line above, in seconds": difference(numbers, c.name, before.name)
            for before, c in itertools.pairwise(found)
        }

    return findings


def import_case(smoke_test: bool) -> Case:
    """Return the imports."""
    found = [
        stage("import torch and pyro", "plain", smoke_test, IMPORT),
        stage("import tyxe", "ours", smoke_test, IMPORT, TYXE),
    ]
    title = "Importing, in a fresh interpreter"
    return Case("import", title, "run", 15, found, findings=stages_of(found))


def resnet50_case(smoke_test: bool) -> Case:
    """Return torchvision's ResNet-50, with 1,000 classes; its step sees two images of 32 x 32."""
    make_net = MAKE_SMALL_NET if smoke_test else MAKE_NET
    stages = [IMPORT, TYXE, make_net]
    found = [
        stage("imports and the net", "plain", smoke_test, *stages),
        stage("VariationalBNN(net, ...)", "ours", smoke_test, *stages, MAKE_BNN),
        stage("first step of fit", "ours", smoke_test, *stages, MAKE_BNN, FIT),
    ]
    title = "BNN of torchvision's ResNet-50, in a fresh interpreter"
    return Case("resnet50", title, "run", 7, found, findings=stages_of(found))


if __name__ == "__main__":
    run(
        "Seconds of fresh interpreters that import the library, make a BNN of a ResNet-50 and fit "
        "it for one step, and differences between them.",
        {"import": import_case, "resnet50": resnet50_case},
    )
