"""GPT-2 and BERT as transformers has them: every linear map is seen."""

import pyro.distributions as dist
import pytest
import torch
import torch.nn as nn

import tyxe
from tests.oracles.laplace import laplace_bnn
from tyxe.distributions.param_blocks import LinearBlock

transformers = pytest.importorskip(
    "transformers", reason="the nets are those of transformers, which is not installed"
)
SIZES = {"vocab_size": 20}
GPT2 = {"n_positions": 4, "n_embd": 8, "n_layer": 1, "n_head": 2}
BERT = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 4,
}


class Classifier(nn.Module):
    """A linear layer on the mean of the last hidden states."""

    def __init__(self, body):
        super().__init__()
        self.body, self.head = body, nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.body(input_ids=tokens).last_hidden_state.mean(1))


def gpt2():
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2Model(transformers.GPT2Config(**SIZES, **GPT2, **ends))


def bert():
    config = transformers.BertConfig(**SIZES, **BERT)
    return transformers.BertModel(config, add_pooling_layer=False)


NETS = {"gpt2": (gpt2, 4), "bert": (bert, 6)}
LINEAR = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.Embedding, nn.LayerNorm])
TOKENS = torch.randint(20, (5, 4), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("handler", [tyxe.poutine.local_reparameterization, tyxe.poutine.flipout])
@pytest.mark.parametrize("name", NETS)
def test_handlers_treat_every_site(name, handler):
    bnn = tyxe.VariationalBNN(
        Classifier(NETS[name][0]()),
        LINEAR,
        tyxe.likelihoods.Categorical(5),
        tyxe.guides.AutoNormal,
    )
    with tyxe.poutine.report() as rows, handler():
        bnn.predict(TOKENS)
    assert {row.treatment for row in rows} == {handler().treatment}


@pytest.mark.parametrize("name", NETS)
def test_every_layer_has_kronecker_factors(name):
    make, layers = NETS[name]
    bnn = laplace_bnn(Classifier(make()), LINEAR, tyxe.likelihoods.Categorical(5), structure="kron")
    bnn.fit_curvature([(TOKENS, torch.arange(5) % 3)], progress=False)
    blocks = bnn.state.curvature.blocks
    assert len(blocks) == layers + 1
    assert all(isinstance(block, LinearBlock) and block.bias for block in blocks)
    assert bool(bnn.functional_variance(TOKENS).isfinite().all())
