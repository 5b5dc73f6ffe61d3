"""Nets of other libraries on stand-ins: the nets at their draws."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bnn.test_standin import assert_is_the_net_at_its_draws


class Logits(nn.Module):
    """Picks the predictions out of what a net of another library returns."""

    def __init__(self, net: nn.Module, pick: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.net, self.pick = net, pick

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        return self.pick(self.net(*inputs, **named))


def test_a_vision_transformer() -> None:
    vision = pytest.importorskip("torchvision", reason="it is the extra 'vision'")
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 8}
    net = vision.models.VisionTransformer(**sizes, mlp_dim=16, num_classes=3).double()
    with torch.no_grad():
        net.heads.head.weight.normal_()
    assert_is_the_net_at_its_draws(net, torch.randn(2, 3, 8, 8).double())


@pytest.mark.parametrize("kind", ["GCN", "GAT", "GraphSAGE"])
def test_graph_nets(kind: str) -> None:
    nets = pytest.importorskip("torch_geometric.nn", reason="it is the extra 'pyg'")
    torch.manual_seed(0)
    ring = torch.arange(8)
    edges = torch.stack([torch.cat([ring, (ring + 1) % 8]), torch.cat([(ring + 1) % 8, ring])])
    net = getattr(nets, kind)(3, 8, 2, 2).double()
    assert_is_the_net_at_its_draws(net, (torch.randn(8, 3).double(), edges))


# Of transformers 5, in a property that peft reads.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_lora() -> None:
    peft = pytest.importorskip("peft", reason="it is the extra 'huggingface'")
    pytest.importorskip("transformers", reason="it is the extra 'huggingface'")
    from tests.integrations import texts

    options = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    net = peft.get_peft_model(texts.bert().eval(), options).double()
    for name, parameter in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    tokens = {"input_ids": torch.arange(12).view(2, 6)}
    assert_is_the_net_at_its_draws(Logits(net, lambda found: found.logits), tokens)
