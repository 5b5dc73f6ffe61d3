"""Your own handler: which layer does the uncertainty come from?

A handler changes how linear maps with random weights are computed, without changes to net, prior,
likelihood or guide. Subclass `LinearMapMessenger` and implement `answer`: return the map's output,
or None to leave it to the next handler, or to the plain draw. This one runs every layer except one
at the posterior's mean, and the table says how much the draws still disagree: on digits like those
trained on (scikit-learn's 0 to 7), and on the unfamiliar 8 and 9.

For your own idea change `answer`. A handler that should not change the distribution of outputs has
to pass `tyxe.testing.check_handler`; this one removes noise, so it does not.

Needs the extra `examples`: pip install -e ".[examples]". About 10 seconds.
"""

import argparse
from contextlib import nullcontext
from functools import partial

import pyro.distributions as dist
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tyxe
from tyxe import metrics
from tyxe.poutine import Draw, LinearMapMessenger

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--smoke-test", action="store_true", help="one epoch, in seconds: no result")
epochs = 1 if parser.parse_args().smoke_test else 60
torch.manual_seed(0)
torch.set_num_threads(1)  # such a net is too small to share


class RandomOnlyIn(LinearMapMessenger):
    """Run all linear maps at the posterior's mean, but for that of one layer."""

    name, treatment = "RandomOnlyIn", "mean"

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def answer(self, event):
        # `event.draws` are those of weight and bias that are random; names are "net.0.weight".
        if any(draw.name_of_site.startswith(f"net.{self.layer}.") for draw in event.draws):
            return None
        parts = (event.weight, event.bias)
        means = (part.center() if isinstance(part, Draw) else part for part in parts)
        return event.function(event.input, *means)


pixels, digits = (torch.tensor(part) for part in load_digits(return_X_y=True))
order = torch.randperm(len(digits))
x, y = pixels[order].float() / 16, digits[order]
known, unknown = torch.where(y < 8)[0], torch.where(y >= 8)[0]
train, test = known[:800], known[800:]
loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=100, shuffle=True)

net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU())
net.append(nn.Linear(100, 8))
guide = partial(tyxe.guides.AutoNormal, init_scale=0.05)
prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
bnn = tyxe.VariationalBNN(net, prior, tyxe.likelihoods.Categorical(len(train)), guide)
with tyxe.poutine.local_reparameterization():
    bnn.fit(loader, partial(torch.optim.Adam, lr=3e-3), epochs, beta=0.1)


def disagreement(inputs):
    """Mutual information of label and weights, in nats: what more data could take away."""
    probs = bnn.predict(inputs, num_predictions=64, aggregate=False).softmax(-1)
    each = [metrics.predictive_entropy(draw) for draw in probs]
    return metrics.predictive_entropy(probs.mean(0)) - torch.stack(each).mean(0)


print(f"{'random':20}{'digits 0-7':>12}{'digits 8-9':>12}{'AUROC':>8}")
handlers = {"all layers": nullcontext()}
handlers |= {f"layer {i} only": RandomOnlyIn(i) for i in (0, 2, 4)}
for name, handler in handlers.items():
    with handler:
        at_known, at_unknown = disagreement(x[test]), disagreement(x[unknown])
    auroc = metrics.ood_auroc(-at_known, -at_unknown)  # higher has to mean more familiar
    print(f"{name:20}{at_known.mean():12.3f}{at_unknown.mean():12.3f}{auroc:8.3f}")
