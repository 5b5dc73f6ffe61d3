"""Random combinations of net, prior, likelihood, guide, handler, wrapper and options.

`run(count, seed)` tries many, and `reproduce(seed, index)` one of them again. Where parts do not go
together, an error has to help.
"""

import copy
import io
import random
import signal
import warnings
from collections import Counter
from typing import Any

import pyro
import torch
from torch import nn

import tyxe
from tests.oracles.architectures import N
from tests.soak import nets, parts, uses
from tests.soak.verdict import KINDS, Trial, classify
from tyxe.errors import UNREAD
from tyxe.threads import exclusive, handlers
from tyxe.util import call_with

WRAPPERS = ("VariationalBNN",) * 5 + ("LaplaceBNN",) * 2 + ("PytorchBNN", "MCMC_BNN")


class Choices:
    """The random choices of one combination, and what was chosen."""

    def __init__(self, seed: int, index: int) -> None:
        self.random = random.Random(f"{seed}/{index}")
        self.wrapper = self.random.choice(WRAPPERS)
        self.taken: dict[str, str] = {"wrapper": self.wrapper}

    def of(self, what: str, table: dict[str, Any]) -> Any:
        """Return an entry of a table."""
        self.taken[what] = self.random.choice(list(table))
        return table[self.taken[what]]

    def option(self, name: str, values: list[Any]) -> Any:
        """Return a value of an option."""
        value = self.random.choice(values)
        self.taken[name] = repr(value) if not callable(value) else "function"
        return value

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def __str__(self) -> str:
        return ", ".join(f"{name}: {value}" for name, value in self.taken.items())


class Session:
    """One combination: its parts, the BNN that they make, and what the checks find."""

    def __init__(self, seed: int, index: int) -> None:
        self.choices = choices = Choices(seed, index)
        pyro.set_rng_seed(choices.random.randrange(2**31))
        self.wrong: list[str] = []
        self.bnn: Any = None
        self.has_new_prior = False
        likely = choices.chance(0.9)
        for _ in range(50):
            self._choose()
            if not likely or parts.suits(choices.taken):
                break

    def _choose(self) -> None:
        of, wrapper = self.choices.of, self.choices.wrapper
        self.make_net, self.make_inputs = of("net", nets.NETS)
        self.data = of("likelihood", parts.LIKELIHOODS)
        self.make_prior = of("prior", parts.PRIORS)
        if wrapper == "MCMC_BNN":
            self.guide = of("guide", parts.KERNELS)
        elif wrapper == "LaplaceBNN":
            self.guide, self.choices.taken["guide"] = None, "Laplace"
        else:
            self.guide = of("guide", parts.GUIDES)
        self.handler = of("handler", parts.HANDLERS)
        self.structure = uses.structure(self) if wrapper == "LaplaceBNN" else {}

    # ------------------------------------------------------------------ the combination

    def run(self) -> None:
        """Build, fit, use and check; an error ends it."""
        self.net = self.make_net(self.data.width)
        self.given = copy.deepcopy(self.net)
        self.inputs = self.make_inputs()
        self.bnn = self.build(self.net)
        self.resting = {n: (t, t.detach().clone()) for n, t in self.bnn._in_places().items()}
        self.modes = [part.training for part in self.bnn.net.modules()]
        with torch.no_grad():
            self.outputs = call_with(copy.deepcopy(self.given).eval(), self.inputs)
        self.targets = self.data.targets(self.outputs.shape)
        with self.handler():
            self.fit()
            inside = self.choices.chance(0.4)
            if inside:
                self.act()
        if not inside:
            self.act()
        try:
            self.check_again()
        except Exception:
            # What has worked once has to work again.
            self.wrong.append("it could not be saved, loaded or repeated")
            raise

    def build(self, net: nn.Module) -> Any:
        wrapper, prior = self.choices.wrapper, self.make_prior(net)
        if wrapper == "PytorchBNN":
            return tyxe.PytorchBNN(net, prior, self.guide)
        likelihood = self.data.likelihood(N)
        if wrapper == "LaplaceBNN":
            return tyxe.LaplaceBNN(net, prior, likelihood, **self.structure)
        if wrapper == "MCMC_BNN":
            return tyxe.MCMC_BNN(net, prior, likelihood, self.guide)
        second = tyxe.guides.AutoNormal if "inferred" in self.choices.taken["likelihood"] else None
        return tyxe.VariationalBNN(net, prior, likelihood, self.guide, second)

    # ------------------------------------------------------------------ uses

    def fit(self) -> None:
        """Fit by the wrapper's own method."""
        uses.FITS[self.choices.wrapper](self)

    def act(self) -> None:
        """Use the BNN in a few random ways."""
        actions = uses.ACTIONS[self.choices.wrapper]
        for name in self.choices.random.sample(list(actions), 2):
            self.choices.taken["used"] = name
            actions[name](self)

    def expect(self, holds: Any, otherwise: str) -> None:
        """Note what is wrong unless a condition holds."""
        if not holds:
            self.wrong.append(otherwise)

    # ------------------------------------------------------------------ checks

    def check_again(self) -> None:
        """Compare predictions of one seed: of the BNN, of a copy, and of another with its state."""
        first = uses.with_seed(self.bnn, self.inputs)
        uses.check_finite(self, first, "a prediction")
        for what, other in (("the same BNN", self.bnn), ("a copy", copy.deepcopy(self.bnn))):
            same = uses.equal(first, uses.with_seed(other, self.inputs))
            self.expect(same, f"{what} predicts something else")
        other = self.build(copy.deepcopy(self.given))
        torch.save(self.bnn.state_dict(), file := io.BytesIO())
        file.seek(0)
        if not self.has_new_prior:
            other.load_state_dict(torch.load(file, weights_only=True))
            same = uses.equal(first, uses.with_seed(other, self.inputs))
            self.expect(same, "a BNN with its state predicts something else")

    def check_left(self) -> None:
        """Look for draws in the net, and for changes of its modes and of the given net."""
        if self.bnn is None or not hasattr(self, "modes"):
            return
        for name, value in self.bnn._in_places().items():
            as_before = value is self.resting[name][0] and uses.equal(value, self.resting[name][1])
            self.expect(as_before, f"{name} is not as it was")
        modes = [part.training for part in self.bnn.net.modules()]
        self.expect(modes == self.modes, "a module has another mode")
        given, now = self.given.state_dict(), self.net.state_dict()
        same = all(uses.equal(given[name], now[name]) for name in given)
        self.expect(same, "the net that was given has changed")


def process_state() -> dict[str, Any]:
    """Return what belongs to the process, and has to be the same after any call."""
    allocator: Any = pyro.poutine.runtime._DIM_ALLOCATOR
    return {
        "handlers": handlers(),
        "plates": [frame for frame in allocator._stack if frame is not None],
        "parameter store": sorted(pyro.get_param_store().keys()),
        "modes of functions": len(torch.overrides._get_current_function_mode_stack()),
        "gradients recorded": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "validation": torch.distributions.Distribution._validate_args,
        "unread numbers": UNREAD.get(),
        "module_local_params": pyro.settings.get("module_local_params"),
        "attention kernels": torch.backends.cuda.flash_sdp_enabled(),
        "handler of interrupts": signal.getsignal(signal.SIGINT),
        "lock": exclusive()._is_owned(),
    }


def attempt(seed: int, index: int) -> tuple[str, Trial]:
    """Try one combination, and return its description and what was seen."""
    before, session, error = process_state(), Session(seed, index), None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            session.run()
    except Exception as caught:
        error = caught
    after = process_state()
    left = [f"left behind: {name}" for name in before if before[name] != after[name]]
    session.check_left()
    return str(session.choices), Trial(error, (*session.wrong, *left))


def run(count: int, seed: int = 0, first: int = 0) -> dict[str, Any]:
    """Try combinations, and return their numbers by outcome, and those that went wrong."""
    outcomes: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    found = []
    for index in range(first, first + count):
        description, trial = attempt(seed, index)
        kind, why = classify(trial)
        outcomes[kind] += 1
        if kind in ("obscure", "silent"):
            found.append({"index": index, "kind": kind, "what": description, "why": why})
    return {"seed": seed, "combinations": count, **outcomes, "found": found}


def reproduce(seed: int, index: int) -> None:
    """Try one combination again: print it and what was found, and raise its error."""
    description, trial = attempt(seed, index)
    print(description, *classify(trial), sep="\n")
    if trial.error is not None:
        raise trial.error
