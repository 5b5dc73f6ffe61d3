"""Bayesian LoRA: adapters of peft as sites, under every kind of inference; merged and unloaded."""

import functools
import os

import pyro.distributions as dist
import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers", reason="it is of the extra 'huggingface'")
pytest.importorskip("peft", reason="it is of the extra 'huggingface'")

import peft

import tyxe
from tests.integrations import texts
from tests.oracles.bnns import mean_field
from tyxe.integrations.huggingface import unpack

ADAM = functools.partial(torch.optim.Adam, lr=1e-2)
LORA = tyxe.priors.IIDPrior(dist.Normal(0, 1), expose=["*lora_*"])
# Of transformers 5, in a property that peft reads.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
NETS = {"bert": (texts.bert, ["query", "value"]), "gpt2": (texts.gpt2, ["c_attn"])}


def adapted(name="bert"):
    make, modules = NETS[name]
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=modules, fan_in_fan_out=name == "gpt2"
    )
    return peft.get_peft_model(make(), config).eval()


def likelihood():
    return tyxe.likelihoods.Categorical(texts.SIZE)


@pytest.mark.parametrize("name", NETS)
def test_factors_are_sites_and_the_body_is_frozen(name):
    bnn = mean_field(adapted(name), likelihood(), LORA, output="logits")
    sites = [*bnn._in_places()]
    assert len(sites) == (8 if name == "bert" else 4)
    assert all("lora_" in site for site in sites)
    body = {n: p.clone() for n, p in bnn.net.named_parameters() if not p.requires_grad}
    before = bnn.evaluate(texts.batches(), num_predictions=40, unpack=unpack)[1]
    with tyxe.poutine.local_reparameterization():
        bnn.fit(texts.batches(), ADAM, 20, unpack=unpack, lr_multipliers={"scale": 3})
    after = bnn.evaluate(texts.batches(), num_predictions=40, unpack=unpack)[1]
    assert after > before + 2
    for place, parameter in bnn.net.named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(parameter, body[place]), place


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_merged_nets_give_the_same_outputs(name, sample):
    guide = functools.partial(tyxe.guides.AutoNormal, init_scale=0.5)
    bnn = tyxe.VariationalBNN(adapted(name), LORA, likelihood(), guide, output="logits")
    bnn.fit(texts.batches(), ADAM, 5, unpack=unpack)
    inputs, _ = unpack(texts.batches()[0])
    net = bnn.to_module(sample=sample)
    assert isinstance(net, peft.PeftModel)
    with torch.no_grad():
        before = net(**inputs).logits
        another = bnn.to_module(sample=sample)(**inputs).logits
        assert torch.equal(another, before) != sample
        merged = net.merge_and_unload()
        assert not any("lora_" in key for key in merged.state_dict())
        torch.testing.assert_close(merged(**inputs).logits, before, rtol=1e-4, atol=1e-5)
    if not sample:
        centre = bnn.predict(inputs, num_predictions=0)
        torch.testing.assert_close(centre, before.log_softmax(-1), rtol=1e-4, atol=1e-5)
