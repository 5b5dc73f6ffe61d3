"""Contract suites: functions that assert what the package relies on for each kind of part.

Run them on parts of your own: a part that passes works with every other part, and one that breaks a
rule is an AssertionError that names the rule. The tables hold the package's own parts, each as a
function that makes one; a new class adds a line.

Example:
    >>> import functools, tyxe
    >>> check_guide(functools.partial(tyxe.guides.AutoNormal, init_scale=1e-2))
"""

from tyxe.testing.guides import GUIDES, check_guide
from tyxe.testing.handlers import HANDLERS, check_handler
from tyxe.testing.joints import JOINTS, check_joint
from tyxe.testing.kernels import KERNELS, check_kernel
from tyxe.testing.likelihoods import LIKELIHOODS, LikelihoodCase, check_likelihood
from tyxe.testing.operators import OPERATORS, check_operator
from tyxe.testing.priors import PRIORS, check_prior
from tyxe.testing.wrappers import WRAPPERS, check_wrapper

__all__ = [
    "GUIDES",
    "HANDLERS",
    "JOINTS",
    "KERNELS",
    "LIKELIHOODS",
    "OPERATORS",
    "PRIORS",
    "WRAPPERS",
    "LikelihoodCase",
    "check_guide",
    "check_handler",
    "check_joint",
    "check_kernel",
    "check_likelihood",
    "check_operator",
    "check_prior",
    "check_wrapper",
]
