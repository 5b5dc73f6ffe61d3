"""Contract suites: functions that assert what the package relies on for each kind of part.

Run them on your own parts. A part that passes works with every other part; one that breaks a rule
raises an AssertionError that names the rule. The tables hold the package's own parts, each as a
function that makes one; a new class adds a line.

Example:
    >>> import functools, tyxe
    >>> check_guide(functools.partial(tyxe.guides.AutoNormal, init_scale=1e-2))
"""

from tyxe.testing.guides import GUIDES, PRIORS, check_guide, check_prior
from tyxe.testing.handlers import HANDLERS, check_handler
from tyxe.testing.likelihoods import LIKELIHOODS, LikelihoodCase, check_likelihood

__all__ = [
    "GUIDES",
    "HANDLERS",
    "LIKELIHOODS",
    "PRIORS",
    "LikelihoodCase",
    "check_guide",
    "check_handler",
    "check_likelihood",
    "check_prior",
]
