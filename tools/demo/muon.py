"""Muon: momentum with orthogonalised updates, for matrices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(grad: Tensor) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrices of a batch.

    It works on the small Gram matrix only: X_k = P_k X with P_k a polynomial of X X^T, which
    costs about half of the usual form.
    """
    a, b, c = NEWTON_SCHULZ
    tall = grad.shape[1] > grad.shape[2]
    x = grad.transpose(1, 2) if tall else grad
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    gram = x @ x.transpose(1, 2)
    eye = torch.eye(gram.shape[1])
    total = None
    for turn in range(5):
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c) + a * eye
        total = poly if total is None else poly @ total
        if turn < 4:
            gram = poly @ gram @ poly
    assert total is not None
    x = total @ x
    return x.transpose(1, 2) if tall else x


class Muon:
    """Momentum with orthogonalised updates, for the matrices of attention and FFN."""

    def __init__(self, params: list[Tensor], momentum: float, decay: float) -> None:
        shapes = sorted({tuple(p.shape) for p in params})
        self.groups = [[p for p in params if tuple(p.shape) == s] for s in shapes]
        self.buffers = [torch.zeros(len(g), *g[0].shape) for g in self.groups]
        self.momentum, self.decay = momentum, decay
        self.factors: dict[Tensor, float] = {}

    def by_parameter(self) -> dict[Tensor, Tensor]:
        """The momentum of every matrix."""
        return {
            param: momentum
            for group, buffer in zip(self.groups, self.buffers, strict=True)
            for param, momentum in zip(group, buffer, strict=True)
        }

    def step(self, rate: float, pool: ThreadPoolExecutor) -> None:
        """One update of every matrix, four at a time."""
        tasks = [
            pool.submit(self.update, group[i : i + 4], buffer[i : i + 4], rate)
            for group, buffer in zip(self.groups, self.buffers, strict=True)
            for i in range(0, len(group), 4)
        ]
        for task in tasks:
            task.result()

    @torch.no_grad()
    def update(self, params: list[Tensor], buffer: Tensor, rate: float) -> None:
        """One update of matrices of equal shape."""
        grads = torch.stack([p.grad for p in params if p.grad is not None])
        buffer.lerp_(grads, 1 - self.momentum)
        grads.lerp_(buffer, self.momentum)
        # A parameter may be several matrices, those of experts.
        update = orthogonalise(grads.flatten(0, -3)).view_as(grads)
        scale = max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
        for param, change in zip(params, update, strict=True):
            own = rate * self.factors.get(param, 1.0)
            param.mul_(1 - own * self.decay)
            param.add_(change, alpha=-own * scale)
