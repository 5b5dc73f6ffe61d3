"""Posteriors over the sites of a net."""

from tyxe.guides.base import Guide
from tyxe.guides.bernoulli import AutoBernoulli
from tyxe.guides.inducing import AutoInducing
from tyxe.guides.inducing_families import InducingOptions
from tyxe.guides.init import (
    PretrainedInitializer,
    init_to_constant,
    init_to_median,
    init_to_net,
    init_to_normal,
    init_to_normal_kaiming,
    init_to_normal_radford,
    init_to_normal_xavier,
    init_to_sample,
    init_to_zero,
    scale_below_net,
    scale_below_prior,
)
from tyxe.guides.normal import AutoNormal, AutoRadial, MeanField, SWAGGuide
from tyxe.guides.prune import parameter_count, prune_, prune_inducing_
from tyxe.guides.pyro_guide import PyroGuide

__all__ = [
    "AutoBernoulli",
    "AutoInducing",
    "AutoNormal",
    "AutoRadial",
    "Guide",
    "InducingOptions",
    "MeanField",
    "PretrainedInitializer",
    "PyroGuide",
    "SWAGGuide",
    "init_to_constant",
    "init_to_median",
    "init_to_net",
    "init_to_normal",
    "init_to_normal_kaiming",
    "init_to_normal_radford",
    "init_to_normal_xavier",
    "init_to_sample",
    "init_to_zero",
    "parameter_count",
    "prune_",
    "prune_inducing_",
    "scale_below_net",
    "scale_below_prior",
]
