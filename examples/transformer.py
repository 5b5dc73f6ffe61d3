"""PyTorch's own transformer, Bayesian in the part that a glob on parameters' names selects.

Scikit-learn's digits are read as sequences of eight rows by PyTorch's own `nn.TransformerEncoder`.
It is trained as usual; then the projections in its attention, or all of its linear maps, get a
posterior about the trained weights, without changes to the net's code. Little is gained on data as
easy as these. AUROC is for digits whose rows are out of order.

For your own transformer change the net, the sequences and the globs, and look once at `report`.
Positions and LayerNorm are best left out: weights outside linear maps cannot be sampled cheaply.

Needs the extra `examples`: pip install -e ".[examples]". About 40 seconds.
"""

import argparse
from functools import partial

import pyro.distributions as dist
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tyxe
from tyxe import metrics

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--smoke-test", action="store_true", help="one epoch, in seconds: no result")
epochs, *sizes = (1, 60, 10, 10) if parser.parse_args().smoke_test else (40, 900, 200, 697)
torch.manual_seed(0)
torch.set_num_threads(1)  # such a net is too small to share

bunch = load_digits()
x, y = torch.tensor(bunch.images).float() / 16, torch.tensor(bunch.target)
parts = [(x[part], y[part]) for part in torch.randperm(len(x))[: sum(sizes)].split(sizes)]
train, validation, (x_test, y_test) = parts
loader = DataLoader(TensorDataset(*train), batch_size=100, shuffle=True)
unfamiliar = x_test[:, torch.randperm(8)]


class RowTransformer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(0.02 * torch.randn(8, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(width, 10)

    def forward(self, rows):
        return self.head(self.encoder(self.embed(rows) + self.position).mean(1))


net = RowTransformer()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for _ in range(2 * epochs):
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()


@torch.no_grad()
def report(name, predict):
    probs, other = (predict(images).softmax(-1) for images in (x_test, unfamiliar))
    error, nll = 100 - 100 * metrics.accuracy(probs, y_test), metrics.nll(probs, y_test)
    ece = 100 * metrics.expected_calibration_error(probs, y_test)
    auroc = metrics.ood_auroc(probs.amax(-1), other.amax(-1))
    print(f"{name:28}{error:8.1f}{nll:8.3f}{ece:8.1f}{auroc:8.3f}")


print(f"{'test digits':28}{'error %':>8}{'NLL':>8}{'ECE %':>8}{'AUROC':>8}")
report("trained", net.eval())
likelihood, adam = tyxe.likelihoods.Categorical(len(train[0])), partial(torch.optim.Adam, lr=1e-3)
guide = partial(tyxe.guides.AutoNormal, init_scale=1e-2)
selections = {"attention": {"expose": ["*self_attn*"]}}
selections["linear maps"] = {"hide": ["position", "*norm*"]}
for which, rules in selections.items():
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), **rules)
    bnn = tyxe.VariationalBNN(net, prior, likelihood, guide)
    with tyxe.poutine.report() as uses, tyxe.poutine.local_reparameterization():
        # 18,000 weights outweigh 900 digits: the KL's weight was chosen by validation digits.
        bnn.fit(loader, adam, epochs, beta=1e-3, lr_multipliers={"scale": 10})
    report(f"mean field, {which}", bnn.predict)

    bnn = tyxe.LaplaceBNN(net, prior, likelihood)
    bnn.fit_curvature(loader)
    bnn.optimize_prior_precision(loader=[validation])
    report(f"Laplace, {which}", partial(bnn.predict, batch_size=60))
projection = "encoder.layers.0.self_attn.in_proj_weight"
print(f"{projection} was sampled by {uses.treatments(projection)}")
