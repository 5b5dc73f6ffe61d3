"""What the largest eigenpairs of a curvature leave of the dense structure's answers, by rank.

  digits      1,000 of scikit-learn's images, a net of 64, 20 and 10 units (1,510 weights)
  regression  a sine with noise, 200 points, a net of 1, 40, 40 and 1 units (1,761 weights)

Each net is fitted once, and its curvature taken in every structure at the precision of largest
evidence by the dense one. Columns: the log evidence, and `tyxe.estimate_evidence`, minus the dense
structure's; the largest ratio of a predictive standard deviation of the linearised net to the dense
one's; the log-likelihood of a test point; and passes through the data, with four vectors each.
"""

import common
import runner
import tables
import torch

import tyxe

MODELS = ["digits", "regression"]
OTHERS = ["full", "kron", "diag"]
COLUMNS = ["evidence", "estimate", "its error", "largest ratio", "log-likelihood", "passes"]


def problem(model):
    """Return data to train and to test, a net, and the likelihood."""
    if model == "digits":
        x, y = common.all_digits()
        x = x.flatten(1).double()
        sizes, likelihood = (64, 20, 10), tyxe.likelihoods.Categorical(1_000)
        return (x[:1_000], y[:1_000]), (x[1_000:], y[1_000:]), sizes, likelihood
    generator = torch.Generator().manual_seed(0)
    x = (4 * torch.rand(300, 1, generator=generator) - 2).double()
    y = torch.sin(3 * x) + 0.2 * torch.randn(300, 1, generator=generator).double()
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(200, scale=0.2)
    return (x[:200], y[:200]), (x[200:], y[200:]), (1, 40, 40, 1), likelihood


class Data(list):
    """Batches that count how often they are iterated."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return super().__iter__()


def run(s, model, seed):
    torch.manual_seed(seed)
    train, test, sizes, likelihood = problem(model)
    net = common.mlp(*sizes, act=torch.nn.Tanh).double()
    prior = common.normal(1.0)
    first = tyxe.LaplaceBNN(net, prior, likelihood, structure="full")
    common.fit_by_cosine(first, [train], s.rate, s.epochs)
    precision = float(first.optimize_prior_precision())
    rows, dense = {}, None
    for name in [*OTHERS, *map(str, s.ranks)]:
        structure = name if name in OTHERS else "lowrank"
        options = tyxe.LaplaceOptions(rank=int(name)) if structure == "lowrank" else None
        own = common.normal(precision**-0.5), likelihood
        bnn = tyxe.LaplaceBNN(first.to_module(), *own, structure=structure, options=options)
        data = Data([train])
        bnn.fit_curvature(data, progress=False)
        passes = data.passes
        evidence = float(bnn.log_marginal_likelihood())
        variance = bnn.functional_variance(test[0]).diagonal(dim1=1, dim2=2)
        dense = (evidence, variance) if dense is None else dense
        torch.manual_seed(seed)
        how = {"num_probes": s.probes, "num_steps": s.steps}
        estimate, error = tyxe.estimate_evidence(bnn, data, **how)
        score = bnn.evaluate(*test, num_predictions=s.draws, reduction="mean")[1]
        ratio = (variance / dense[1]).sqrt().max()
        found = evidence - dense[0], float(estimate) - dense[0], float(error), float(ratio)
        rows[name] = dict(zip(COLUMNS, (*found, float(score), passes), strict=True))
    return {"rows": rows}


def table(record):
    parts = []
    for model in record.names():
        lines = []
        for name, row in next(iter(record.of(model).values()))["rows"].items():
            kind = name if name in OTHERS else f"rank {name}"
            texts = [f"{round(row[column], 2) + 0.0:.2f}" for column in COLUMNS[:4]]
            texts.append(f"{row['log-likelihood']:.3f}")
            lines.append([kind, *texts, str(row["passes"] or "")])
        parts += [f"**{model}**", tables.markdown(["", *COLUMNS], lines)]
    return "\n\n".join(parts)


cells = runner.every(run, model="models", seed="seeds")
experiment = runner.Experiment("low_rank", cells, table)
