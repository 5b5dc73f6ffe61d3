"""Your own loss and loop: quantile regression, with `PytorchBNN` instead of the net.

`PytorchBNN` is a module whose forward is one draw of the weights. You write loss and loop, and add
the KL of the guide to the loss. Here a net predicts three quantiles of a patient's disease
progression after a year (scikit-learn's diabetes set), by the pinball loss.

For your own loss mind two things. If it is a mean over points, divide the KL by the number of
training points, as below. And the loss decides how strongly data count against the prior: it should
be in nats, like a negative log-likelihood. The pinball loss over its typical size is that of an
asymmetric Laplace distribution.

Needs the extra `examples`: pip install -e ".[examples]". About 10 seconds.
"""

import argparse
from functools import partial

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tyxe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--smoke-test", action="store_true", help="few epochs, in seconds: no result")
epochs = 2 if parser.parse_args().smoke_test else 200
torch.manual_seed(0)
torch.set_num_threads(1)  # such a net is too small to share

bunch = load_diabetes()
order = torch.randperm(len(bunch.target))
x, y = torch.tensor(bunch.data).float()[order], torch.tensor(bunch.target).float()[order, None]
x, y = ((part - part[:200].mean(0)) / part[:200].std(0) for part in (x, y))
x_test, y_test = x[200:], y[200:]
loader = DataLoader(TensorDataset(x[:200], y[:200]), batch_size=50, shuffle=True)
levels = torch.tensor([0.1, 0.5, 0.9])


def pinball(quantiles, targets):
    above = targets - quantiles
    return torch.maximum(levels * above, (levels - 1) * above)


typical = pinball(y[:200].quantile(levels), y[:200]).mean()  # of the same quantiles for everybody
net = nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 3))
guide = partial(tyxe.guides.AutoNormal, init_scale=0.05)
bnn = tyxe.PytorchBNN(net, tyxe.priors.LayerwiseNormalPrior("radford"), guide)
for model in (net, bnn):
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(epochs):
        for inputs, targets in loader:
            loss = pinball(model(inputs), targets).sum(-1).mean() / typical
            if model is bnn:
                loss = loss + bnn.cached_kl_loss / 200  # as of the latest forward
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

with torch.no_grad():
    draws, plain = bnn.predict(x_test, num_predictions=100), net(x_test)  # (draws, patients, 3)
print(f"{'test patients':20}{'pinball loss':>14}{'% between 0.1 and 0.9':>24}")
for name, quantiles in {"plain net": plain, "mean of draws": draws.mean(0)}.items():
    loss = pinball(quantiles, y_test).mean()
    inside = (quantiles[:, :1] <= y_test) & (y_test <= quantiles[:, 2:])
    print(f"{name:20}{loss:14.3f}{100 * inside.float().mean():24.0f}")
