"""Digits by a small CNN: microcanonical Langevin ensembles, MILE, beside other posteriors.

Scikit-learn's digits 0 to 7, half of them to test; 8 and 9 are unknown. A net of two convolutions
and two linear maps, 4,824 weights, each N(0, 1) before. Rows: MAP, full batches; a deep ensemble,
whose members stop early; MILE, chains that start at these members; mean field, from the MAP;
Laplace by Kronecker factors there, linearised. OOD AUROC is by the entropy of predictions; seconds
include the members' or the MAP's training.
"""

import time

import common
import runner
import tables
import torch
from mile import METHODS, trained
from torch import nn

import tyxe

ROWS = [name for name in METHODS if name != "NUTS"]
FORMATS = {"accuracy %": ".1f", "NLL": ".3f", "ECE %": ".1f", "OOD AUROC": ".3f", "seconds": ".0f"}


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
    common.keep_members(bnn, members)
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
        how = 1e-2, s.descent_steps, 1e-5, tyxe.poutine.local_reparameterization
        return common.fit_by_cosine(bnn, [pair], *how), time.process_time() - start

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
experiment = runner.Experiment("mile_digits", runner.every(run, seed="seeds"), table)
