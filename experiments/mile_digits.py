"""Digits by a small CNN: microcanonical Langevin ensembles, MILE, beside other posteriors.

No paper's. Scikit-learn's digits 0 to 7, half of them to test; 8 and 9 are unknown. A net of two
convolutions and two linear maps, 4,824 weights, each N(0, 1) before. Rows: MAP, full batches; a
deep ensemble, whose members stop early; MILE, chains that start at these members; mean field, from
the MAP; Laplace by Kronecker factors there, linearised. Columns: accuracy; NLL, nats a point;
expected calibration error, 15 bins; area under the ROC curve of known and unknown digits by the
entropy of predictions; seconds of processor time, the members' or the MAP's training included.
Reduced: half of the digits for training, a tenth of the steps that MILE takes in its paper.
"""

import time

import common
import runner
import tables
import torch
from mile import METHODS, trained
from runner import setting, settings, which
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import tyxe

ROWS = [name for name in METHODS if name != "NUTS"]
FORMATS = {"accuracy %": ".1f", "NLL": ".3f", "ECE %": ".1f", "OOD AUROC": ".3f", "seconds": ".0f"}


@settings
class Settings(runner.Settings):
    seeds: list[int] = which([0, 1, 2], "of digits and fits", smoke=[0])
    images: int = setting(360, "to train", smoke=40)
    members: int = setting(8, "of the ensemble, as many chains", smoke=2)
    epochs: int = setting(500, "of a member at most", smoke=2)
    patience: int = setting(10, "epochs without a lower validation loss")
    rate: float = setting(1e-3, "of AdamW, and its weight decay")
    warmup_steps: int = setting(5_000, "of MILE", published=50_000, smoke=20)
    steps: int = setting(1_000, "of MILE after it", published=10_000, smoke=20)
    thinning: int = setting(10, "of these")
    descent_steps: int = setting(2_000, "full batches for MAP and mean field, each", smoke=10)
    draws: int = setting(100, "of mean field and Laplace", smoke=4)


def make_net():
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()),
        *common.mlp(64, 32, 8),
    )


def load(s, seed):
    """Return pairs to train and to test, and images of other digits."""
    known, test, unknown = common.known_and_unknown("digits")
    order = torch.randperm(len(known[0]), generator=torch.Generator().manual_seed(seed))
    return tuple(part[order[: s.images]] for part in known), test, unknown


def ensembles(s, pair):
    """Yield the members and the chains from them: a name, a BNN, its draws and seconds."""
    likelihood = tyxe.likelihoods.Categorical(len(pair[0]))
    bnn = tyxe.MCMC_BNN(make_net(), common.normal(), likelihood, tyxe.samplers.MCLMC())
    how = {"num_epochs": s.epochs, "patience": s.patience}
    members, seconds = trained(bnn, pair, s.members, s.rate, s.rate, **how)
    bnn.samples.replace({name: value[:, None] for name, value in members.items()})
    yield "deep ensemble", bnn, s.members, seconds
    start, kept = time.process_time(), s.steps // s.thinning
    how = {"warmup_steps": s.warmup_steps, "thinning": s.thinning, "progress": False}
    bnn.fit([pair], kept, num_chains=s.members, init=members, **how)
    yield "MILE", bnn, s.members * kept, seconds + time.process_time() - start


def gaussians(s, pair):
    """Yield the MAP, mean field and Laplace likewise."""
    net, likelihood = make_net(), tyxe.likelihoods.Categorical(len(pair[0]))

    def fitted(guide):
        start = time.process_time()
        bnn = tyxe.VariationalBNN(net, common.normal(), likelihood, guide)
        adam, step = common.scheduled(bnn, 1e-2, CosineAnnealingLR, s.descent_steps, 1e-5)
        with tyxe.poutine.local_reparameterization():
            bnn.fit([pair], adam, s.descent_steps, step, progress=False)
        return bnn, time.process_time() - start

    bnn, before = fitted(common.point(net))
    yield "MAP", bnn, 1, before
    net = bnn.to_module()
    bnn, seconds = fitted(common.mean_field(net, init_scale=1e-2))
    yield "mean field", bnn, s.draws, before + seconds
    start = time.process_time()
    bnn = tyxe.LaplaceBNN(net, common.normal(), likelihood, structure="kron")
    bnn.fit_curvature([pair], progress=False)
    yield "Laplace", bnn, s.draws, before + time.process_time() - start


def run(s, seed):
    pair, test, unknown = load(s, seed)
    found = {}
    for kind in (gaussians, ensembles):
        torch.manual_seed(seed)
        for name, bnn, draws, seconds in kind(s, pair):
            probs = [bnn.predict(x, num_predictions=draws).softmax(-1) for x in (test[0], unknown)]
            row = tables.scores(probs[0], test[1])
            row["OOD AUROC"] = tables.by_entropy(*probs)[2]
            found[name] = row | {"seconds": seconds, "draws": draws}
    return {"rows": {name: found[name] for name in ROWS}}


table = tables.of(FORMATS)
cells = runner.every(run, "seeds")
experiment = runner.Experiment("mile_digits", Settings, cells, ("seed",), table)
