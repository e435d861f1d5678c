"""Optimizers of the dense part and of the tables, with their implementation named, never left to a default."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from perfcore.design.design import Design
from perfcore.design.training import Launches, Optimizer, OptimizerFusion
from perfcore.errors import UnsupportedError

LEARNING_RATE = 0.01
ROWWISE_EPS = 1e-8


def dense_optimizer(params: Iterable[nn.Parameter], design: Design) -> torch.optim.Optimizer:
    """The dense part's optimizer, `foreach` and `fused` as the design's fusion says."""
    fusion = design.fusion.optimizer
    flags: dict[str, Any] = {
        "lr": LEARNING_RATE,
        "foreach": fusion is OptimizerFusion.FOREACH,
        "fused": fusion is OptimizerFusion.FUSED,
    }
    params = list(params)
    match design.training.optimizer:
        case Optimizer.SGD:
            return torch.optim.SGD(params, **flags)
        case Optimizer.ADAGRAD:
            return torch.optim.Adagrad(params, **flags)
        case Optimizer.ADAM:
            captured = params[0].is_cuda and design.fusion.launches is Launches.CUDA_GRAPH
            return torch.optim.Adam(params, capturable=captured, **flags)
        case Optimizer.ROWWISE_ADAGRAD:
            raise UnsupportedError("Row-wise Adagrad is an optimizer of tables, not of the dense part.")


def table_optimizer(params: Iterable[nn.Parameter], design: Design) -> torch.optim.Optimizer:
    """The tables' optimizer."""
    return rows_optimizer(params, design.training.table_optimizer)


def rows_optimizer(params: Iterable[nn.Parameter], optimizer: Optimizer) -> torch.optim.Optimizer:
    """An optimizer of tables: their gradients are sparse, so there is one implementation of each."""
    # The default, said aloud: torch warns when a sparse tensor is made and nobody has said it.
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    match optimizer:
        case Optimizer.SGD:
            return torch.optim.SGD(params, lr=LEARNING_RATE, foreach=False, fused=False)
        case Optimizer.ADAGRAD:
            return torch.optim.Adagrad(params, lr=LEARNING_RATE, foreach=False, fused=False)
        case Optimizer.ADAM:
            return torch.optim.SparseAdam(list(params), lr=LEARNING_RATE)
        case Optimizer.ROWWISE_ADAGRAD:
            return RowwiseAdagrad(params, lr=LEARNING_RATE)


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator per row: `s += mean(g^2)`, `w -= lr g / (sqrt(s) + eps)`."""

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, eps: float = ROWWISE_EPS) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["sum"] = torch.zeros(len(param), device=param.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every row that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, self.state[param]["sum"], lr=group["lr"], eps=group["eps"])

    @staticmethod
    def _update(param: Tensor, accumulated: Tensor, *, lr: float, eps: float) -> None:
        assert param.grad is not None
        if not param.grad.is_sparse:
            accumulated.add_(param.grad.float().square().mean(1))
            param.sub_((lr * param.grad.float() / (accumulated.sqrt() + eps)[:, None]).to(param.dtype))
            return
        grad = param.grad.coalesce()
        rows, values = grad.indices()[0], grad.values()
        accumulated.index_add_(0, rows, values.float().square().mean(1))
        scale = lr / (accumulated[rows].sqrt() + eps)
        param.index_add_(0, rows, -(scale[:, None] * values).to(param.dtype))
