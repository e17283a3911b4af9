"""A first guess of a predictor: the best linear one of its rank, found without iterating.

Which neurons fire is regressed on the input by least squares, and of the result the ``rank / 2``
directions of the input are kept that explain most (reduced-rank regression).  A predictor has a
ReLU between its matrices, so each direction comes twice, once with each sign.
"""

from __future__ import annotations

import numpy as np

from pi2.arrays import F32
from pi2.predictors.samples import LayerSamples

MOST_TOKENS = 65536
"""More do not change the guess."""
_PIECE = 4096
_RIDGE = 1e-2
"""Share of the mean variance that is added to every direction's variance."""
_GAIN = 0.5
"""Share of the guess to begin with: least squares is surer of itself than the loss allows."""
_SPARE = 16
"""Directions beyond those that are wanted, for the search to settle."""
_ROUNDS = 3


def guess_weights(samples: LayerSamples, tokens: int, rank: int, seed: int) -> tuple[F32, F32]:
    """``inner`` [rank, hidden] and ``outer`` [neurons, rank] from the first ``tokens`` tokens."""
    covariance, shared, shares = _sum_moments(samples, min(tokens, MOST_TOKENS))
    hidden = len(covariance)
    covariance += np.eye(hidden, dtype=np.float32) * (_RIDGE * np.trace(covariance) / hidden)
    root = np.linalg.cholesky(covariance)
    # Rare neurons count as much as frequent ones.
    spread = np.sqrt(np.maximum(shares * (1 - shares), 1e-4))
    response = np.linalg.solve(root, shared / spread).astype(np.float32)
    directions, answers = _find_directions(response, rank // 2, seed)
    inner = np.linalg.solve(root.T, directions).T.astype(np.float32)
    outer = np.float32(_GAIN) * answers.T
    return (
        np.ascontiguousarray(np.concatenate([inner, -inner])),
        np.ascontiguousarray(np.concatenate([outer, -outer], axis=1)),
    )


def _sum_moments(samples: LayerSamples, tokens: int) -> tuple[F32, F32, F32]:
    """Means of u u^T [hidden, hidden], of u with what fires [hidden, neurons], and of that."""
    hidden = samples.inputs.shape[1]
    covariance = np.zeros((hidden, hidden), np.float32)
    shared = np.zeros((hidden, samples.neurons), np.float32)
    fired = np.zeros(samples.neurons, np.float32)
    for start in range(0, tokens, _PIECE):
        inputs, active = samples.read(slice(start, min(start + _PIECE, tokens)))
        covariance += inputs.T @ inputs
        shared += inputs.T @ active.astype(np.float32)
        fired += active.sum(axis=0)
    count = np.float32(tokens)
    return covariance / count, shared / count, fired / count


def _find_directions(response: F32, wanted: int, seed: int) -> tuple[F32, F32]:
    """The ``wanted`` left directions [hidden, wanted] of ``response`` [hidden, neurons] with the
    largest singular values, and their answers [wanted, neurons]; by subspace iteration."""
    hidden = len(response)
    random = np.random.default_rng(seed)
    width = min(hidden, wanted + _SPARE)
    basis = random.standard_normal((hidden, width), np.float32)
    for _ in range(_ROUNDS):
        basis, _ = np.linalg.qr(response @ (response.T @ basis))
    answers = basis.T @ response
    _, turned = np.linalg.eigh(answers @ answers.T)
    best = turned[:, ::-1][:, :wanted]
    directions, kept = basis @ best, best.T @ answers
    if wanted <= hidden:
        return directions, kept
    # More than there are: the rest begins as noise, small beside the others.
    extra = random.standard_normal((hidden, wanted - width), np.float32)
    noise = random.standard_normal((wanted - width, response.shape[1]), np.float32)
    scale = np.float32(0.1 * np.abs(kept).mean())
    return np.concatenate([directions, extra], axis=1), np.concatenate([kept, scale * noise])
