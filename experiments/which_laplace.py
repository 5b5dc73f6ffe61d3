"""Laplace approximations beside each other: which structure, over which weights.

They are rows of the leaderboard, in its harness and by its settings, and start at the same net of
MAP. Besides Kronecker products and the last layer there are the 100 largest eigenpairs, and the
full covariance of the 500 weights with the largest variances under the diagonal.
"""

import leaderboard
import runner

by, choices = leaderboard.by, leaderboard.choices
experiment = runner.Experiment(
    "which_laplace", leaderboard.cells, leaderboard.table, by=by, choices=choices
)
