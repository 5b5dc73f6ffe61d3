"""What the rest of the package needs to know of distributions, open by registration."""

from tyxe.distributions.moments import center, independent_moments, is_factorized
from tyxe.distributions.stored import StoredDistribution

__all__ = ["StoredDistribution", "center", "independent_moments", "is_factorized"]
