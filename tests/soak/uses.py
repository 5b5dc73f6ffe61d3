"""How a combination of the fuzz is fitted and used, and what its results have to be."""

import copy
import pickle
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import tyxe
from tests.oracles.architectures import N
from tests.soak import parts
from tyxe.bnn.batches import take_rows
from tyxe.util import call_with

# A `Session` of `tests.soak.fuzz`.
Session = Any


# --------------------------------------------------------------------------- comparisons


def equal(one: Any, other: Any) -> bool:
    """Whether tensors, or containers of them, are the same to the bit, NaN included."""
    if isinstance(one, dict):
        return equal(tuple(one.values()), tuple(other.values()))
    if isinstance(one, tuple):
        return all(equal(a, b) for a, b in zip(one, other, strict=True))
    return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))


def with_seed(bnn: Any, inputs: Any) -> Any:
    """Predict with two draws of a seed."""
    pyro.set_rng_seed(1)
    return bnn.predict(*arguments(inputs), num_predictions=2)


def arguments(inputs: Any) -> tuple[Any, ...]:
    """Return inputs as the arguments of a wrapper's methods."""
    return inputs if isinstance(inputs, tuple) else (inputs,)


def check_finite(session: Session, values: Any, what: str) -> None:
    """Note numbers that are not finite."""
    values = tuple(values.values()) if isinstance(values, dict) else values
    values = values if isinstance(values, tuple) else (values,)
    finite = all(bool(torch.isfinite(value).all()) for value in values)
    session.expect(finite, f"{what} is not finite")


def check_shape(session: Session, values: Any, shape: tuple[int, ...], what: str) -> None:
    """Note another shape, of a tensor or of each tensor of a pair."""
    for value in values if isinstance(values, tuple) else (values,):
        given = tuple(value.shape)
        session.expect(given == tuple(shape), f"{what} has shape {given} instead of {shape}")
    check_finite(session, values, what)


# --------------------------------------------------------------------------- fits


def loader(session: Session, inputs: Any, targets: Any) -> Any:
    """Return the data in one of the forms that a loader may have."""
    forms = ["one batch", "one batch", "batches", "tuple", "DataLoader", "generator"]
    form = session.choices.option("loader", forms)
    pieces = [(inputs, targets)]
    # A mask has as many entries as one batch has points.
    can_split = not _masks() and targets.dim() and len(targets) == N
    if form in ("batches", "tuple") and can_split:
        pieces = [(take_rows(inputs, r), targets[r]) for r in (slice(0, 3), slice(3, N))]
    if form == "DataLoader" and can_split and isinstance(inputs, Tensor):
        return DataLoader(TensorDataset(inputs, targets), batch_size=3)
    if form == "generator":
        return (piece for piece in pieces)
    return tuple(pieces) if form == "tuple" else pieces


def structure(session: Session) -> dict[str, Any]:
    """Return the arguments of a `LaplaceBNN`."""
    option = session.choices.option
    return {
        "structure": option("structure", ["kron", "diag", "full"]),
        "curvature": option("curvature", ["ggn", "fisher", "empirical"]),
    }


def _fit_options(session: Session) -> dict[str, Any]:
    option = session.choices.option
    return {
        "clip_norm": option("clip_norm", parts.CLIPS),
        "lr_multipliers": None
        if session.choices.taken["optim"] == "an instance"
        else option("lr_multipliers", parts.MULTIPLIERS),
        "callback": option("callback", [None, lambda bnn, epoch, loss: epoch > 0]),
        "progress": False,
    }


def _optim(session: Session) -> Any:
    return session.choices.of("optim", parts.OPTIMISERS)(session.bnn)


def fit_variational(session: Session) -> None:
    option, optim = session.choices.option, _optim(session)
    epochs = option("num_epochs", [0, 1, 2, 2])
    history = session.bnn.fit(
        loader(session, session.inputs, session.targets),
        optim,
        epochs,
        num_particles=option("num_particles", [1, 2]),
        closed_form_kl=option("closed_form_kl", [True, True, False]),
        beta=option("beta", parts.BETAS),
        **_fit_options(session),
    )
    check_finite(session, torch.tensor(history.loss + history.kl), "the history")


def fit_laplace(session: Session) -> None:
    data, optim = loader(session, session.inputs, session.targets), _optim(session)
    epochs = session.choices.option("num_epochs", [0, 1, 2, 2])
    if session.choices.chance(0.5):
        session.choices.taken["fit"] = "curvature alone"
        session.bnn.fit_curvature(data, progress=False)
    else:
        session.bnn.fit(data, optim, epochs, **_fit_options(session))
    check_finite(session, session.bnn.log_marginal_likelihood(), "the evidence")


def fit_pytorch(session: Session) -> None:
    bnn = session.bnn
    optimizer = torch.optim.Adam(bnn.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        output = (
            bnn(**session.inputs)
            if isinstance(session.inputs, dict)
            else bnn(*arguments(session.inputs))
        )
        if not isinstance(output, Tensor):
            return  # a loss of the user's own takes it
        loss = output.square().mean() + bnn.cached_kl_loss / N
        loss.backward()
        optimizer.step()
    check_finite(session, loss.detach(), "the loss")


def fit_mcmc(session: Session) -> None:
    option, more = session.choices.option, {}
    if session.choices.taken["guide"].startswith("samplers"):
        more["num_chains"] = option("num_chains", [1, 2])
        more["thinning"] = option("thinning", [1, 2])
        more["init"] = option("init", ["prior", "net"])
    session.bnn.fit(
        loader(session, session.inputs, session.targets),
        option("num_samples", [2, 3]),
        warmup_steps=option("warmup_steps", [1, 2]),
        progress=False,
        **more,
    )


FITS = {
    "VariationalBNN": fit_variational,
    "LaplaceBNN": fit_laplace,
    "PytorchBNN": fit_pytorch,
    "MCMC_BNN": fit_mcmc,
}


# --------------------------------------------------------------------------- uses


def _options(session: Session) -> dict[str, Any]:
    option = session.choices.option
    predictives = parts.PREDICTIVES
    return {
        "num_predictions": option("num_predictions", parts.DRAWS),
        "aggregate": option("aggregate", [True, True, False]),
        "vectorize": option("vectorize", [None, None, False, True]),
        "batch_size": option("batch_size", parts.SIZES),
        "predictive": option("predictive", predictives),
        "link": option("link", parts.LINKS),
    }


def _masks() -> list[Tensor]:
    found = tyxe.threads.handlers()
    return [h.mask for h in found if isinstance(h, tyxe.poutine.selective_mask)]


def predict(session: Session) -> None:
    options, shape = _options(session), tuple(session.outputs.shape)
    found = session.bnn.predict(*arguments(session.inputs), **options)
    draws = max(options["num_predictions"], 1)
    expected = shape if options["aggregate"] else (draws, *shape)
    check_shape(session, found, expected, "predict")


def evaluate(session: Session) -> None:
    options = _options(session)
    reduction = session.choices.option("reduction", parts.REDUCTIONS)
    inputs, targets = session.inputs, session.targets
    if session.choices.chance(0.3):
        found = session.bnn.evaluate([(inputs, targets)], reduction=reduction, **options)
    else:
        found = session.bnn.evaluate(inputs, targets, reduction=reduction, **options)
    rows = int(_masks()[0].sum()) if _masks() else N
    points = (rows,) if reduction == "none" else ()
    default = session.bnn._default_predictive
    gaussian = (options["predictive"] or default) != "bnn" and options["num_predictions"]
    draws = () if options["aggregate"] or gaussian else (max(options["num_predictions"], 1),)
    check_shape(session, found, draws + points, "evaluate")


def sample_predictive(session: Session) -> None:
    samples = session.bnn.sample_predictive(*arguments(session.inputs), num_samples=3)
    check_shape(session, samples, (3, *session.targets.shape), "sample_predictive")


def interval(session: Session) -> None:
    lower, upper = session.bnn.interval(*arguments(session.inputs), level=0.5, num_samples=5)
    check_shape(session, (lower, upper), tuple(session.targets.shape), "interval")
    session.expect((lower <= upper).all(), "an interval ends before it starts")


def forward(session: Session) -> None:
    inputs = session.inputs
    found = session.bnn(**inputs) if isinstance(inputs, dict) else session.bnn(*arguments(inputs))
    if isinstance(found, Tensor):
        check_shape(session, found.detach(), tuple(session.outputs.shape), "forward")


def to_module(session: Session) -> None:
    net = session.bnn.to_module(sample=session.choices.chance(0.5))
    # A symbolic trace has a class of its own.
    kind = type(session.net) if not isinstance(net, torch.fx.GraphModule) else torch.fx.GraphModule
    session.expect(isinstance(net, kind), "to_module returns another class")
    with torch.no_grad():
        found = tyxe.util.call_with(net, session.inputs)
    check_shape(session, found, tuple(session.outputs.shape), "a module's output")


def update_prior(session: Session) -> None:
    if session.bnn.net_guide is None:
        return
    posterior = session.bnn.net_guide.get_detached_distributions()
    session.has_new_prior = True
    session.bnn.update_prior(tyxe.priors.DictPrior(posterior))
    if session.choices.wrapper == "VariationalBNN":
        fit_variational(session)


def resume(session: Session) -> None:
    checkpoint = copy.deepcopy(session.bnn.checkpoint())
    session.bnn.load_checkpoint(checkpoint)


def pickled(session: Session) -> None:
    try:
        pickle.dumps((session.net, session.bnn.prior, session.bnn.net_prior))
    except (AttributeError, RuntimeError, pickle.PicklingError):
        return  # parts of the combination that cannot be pickled themselves
    other = pickle.loads(pickle.dumps(session.bnn))
    same = equal(with_seed(session.bnn, session.inputs), with_seed(other, session.inputs))
    session.expect(same, "a pickled BNN predicts something else")


def evidence(session: Session) -> None:
    method = session.choices.option("method", ["evidence", "grid"])
    data = [(session.inputs, session.targets)]
    session.bnn.optimize_prior_precision(method, data, grid=[0.1, 1.0], num_steps=3)
    check_finite(session, session.bnn.log_marginal_likelihood(), "the evidence")


def functional_variance(session: Session) -> None:
    found = session.bnn.functional_variance(*arguments(session.inputs))
    shape = tuple(session.outputs.shape)
    expected = (*shape, *shape[-1:]) if len(shape) > 1 else (*shape, 1, 1)
    check_shape(session, found, expected, "functional_variance")


def gaussian_process(session: Session) -> None:
    session.bnn.fit_gp([(session.inputs, session.targets)], 4)
    found = session.bnn.predict(*arguments(session.inputs), num_predictions=2, predictive="gp")
    check_shape(session, found, tuple(session.outputs.shape), "predict with 'gp'")


def refine(session: Session) -> None:
    method = session.choices.option("method", ["laplace", "variational"])
    data = [(session.inputs, session.targets)]
    refined = session.bnn.refine(data, method, num_steps=3)
    check_finite(session, refined.predict(*arguments(session.inputs)), "a refined prediction")


def hold_sample(session: Session) -> None:
    bnn = session.bnn
    modes = {part: part.training for part in bnn.modules()}
    with torch.no_grad(), bnn.hold_sample():
        bnn.eval()
        draws = [call_with(bnn, session.inputs) for _ in range(2)]
    for part, mode in modes.items():
        part.training = mode
    session.expect(equal(*draws), "a held draw differs")


def predict_pytorch(session: Session) -> None:
    count = session.choices.option("num_predictions", [1, 2])
    found = session.bnn.predict(*arguments(session.inputs), num_predictions=count)
    check_shape(session, found, (count, *session.outputs.shape), "predict")


_EVERYWHERE = {"forward": forward, "to_module": to_module, "pickle": pickled}
_SUPERVISED = {
    **_EVERYWHERE,
    "predict": predict,
    "evaluate": evaluate,
    "sample_predictive": sample_predictive,
    "interval": interval,
}
ACTIONS = {
    "VariationalBNN": {
        **_SUPERVISED,
        "update_prior": update_prior,
        "fit again": fit_variational,
        "checkpoint": resume,
    },
    "LaplaceBNN": {
        **_SUPERVISED,
        "update_prior": update_prior,
        "evidence": evidence,
        "functional_variance": functional_variance,
        "gp": gaussian_process,
        "refine": refine,
    },
    "MCMC_BNN": _SUPERVISED,
    "PytorchBNN": {
        **_EVERYWHERE,
        "predict": predict_pytorch,
        "update_prior": update_prior,
        "hold_sample": hold_sample,
        "fit again": fit_pytorch,
    },
}
