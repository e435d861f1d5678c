"""Layers of the real DLRM: embedding bags, feature interactions, and their fused variants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def linear(n_in: int, n_out: int, *, device: str, generator: torch.Generator, bias: bool = True) -> nn.Linear:
    """An `nn.Linear` drawn from `generator`: normal, std `sqrt(2 / (in + out))`, as DLRM initialises its MLPs."""
    layer = nn.Linear(n_in, n_out, bias=bias, device="meta")  # draws nothing from the global generator
    std = (2 / (n_in + n_out)) ** 0.5
    layer.weight = nn.Parameter(torch.empty(n_out, n_in, device=device).normal_(0, std, generator=generator))
    if bias:
        std = (1 / n_out) ** 0.5
        layer.bias = nn.Parameter(torch.empty(n_out, device=device).normal_(0, std, generator=generator))
    return layer


class FusedLinearReLU(nn.Module):
    """`relu(x W^T + b)` whose bias and activation run in the GEMM's epilogue; the parameters of `layer`."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """`(b, n_in)` to `(b, n_out)`."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            return _apply(_LinearReLU, x.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
        return _apply(_LinearReLU, x, self.weight, self.bias)


class _LinearReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = torch._addmm_activation(bias, x, weight.t())
        ctx.save_for_backward(x, weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight, out = ctx.saved_tensors
        grad = torch.ops.aten.threshold_backward(grads[0], out, 0)
        grad_x = grad.mm(weight) if ctx.needs_input_grad[0] else None
        return grad_x, grad.t().mm(x), grad.sum(0)


class DotInteraction(nn.Module):
    """Inner products of all pairs of features, beside the dense feature; eager: cat, bmm, index, cat."""

    rows: Tensor
    columns: Tensor

    def __init__(self, features: int, *, device: str, fused: bool = False) -> None:
        super().__init__()
        pairs = [(i, j) for i in range(features) for j in range(i)]
        self.register_buffer("rows", torch.tensor([i for i, _ in pairs], dtype=torch.int64, device=device))
        self.register_buffer("columns", torch.tensor([j for _, j in pairs], dtype=torch.int64, device=device))
        self.fused = fused

    def forward(self, dense: Tensor, pooled: Sequence[Tensor]) -> Tensor:
        """Dense `(b, d)` and pooled tensors of `(b, _ * d)` to `(b, d + f (f - 1) / 2)`, f features in all."""
        batch, dim = dense.shape
        features = torch.cat([dense, *pooled], dim=1).view(batch, -1, dim)
        if self.fused:
            return _apply(_PairProducts, features, self.rows, self.columns)
        products = torch.bmm(features, torch.transpose(features, 1, 2))
        return torch.cat([dense, products[:, self.rows, self.columns]], dim=1)


class _PairProducts(torch.autograd.Function):
    """One autograd node for bmm, index and cat; its backward needs one symmetric bmm instead of two."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(features, rows, columns)
        products = torch.bmm(features, features.transpose(1, 2))
        return torch.cat([features[:, 0].to(products.dtype), products[:, rows, columns]], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        features, rows, columns = ctx.saved_tensors
        return pair_products_gradient(features, rows, columns, grads[0]), None, None


def pair_products_gradient(features: Tensor, rows: Tensor, columns: Tensor, grad: Tensor) -> Tensor:
    """`(b, f, d)`: gradient of the features, from that of the fused interaction's output `(b, d + pairs)`."""
    batch, count, dim = features.shape
    symmetric = grad.new_zeros(batch, count, count)
    symmetric[:, rows, columns] = grad[:, dim:]
    symmetric[:, columns, rows] = grad[:, dim:]
    out = torch.bmm(symmetric, features.to(symmetric.dtype)).to(features.dtype)
    out[:, 0] += grad[:, :dim]
    return out


class CatInteraction(nn.Module):
    """All features side by side."""

    def forward(self, dense: Tensor, pooled: Sequence[Tensor]) -> Tensor:
        """Dense `(b, d)` and pooled tensors to `(b, sum of widths)`."""
        return torch.cat([dense, *pooled], dim=1)


class CrossInteraction(nn.Module):
    """DCNv2's low-rank cross network over all features: `x <- x0 * (W (V x) + b) + x` per layer."""

    def __init__(
        self, width: int, *, rank: int, layers: int, device: str, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.v = nn.ModuleList(
            linear(width, rank, bias=False, device=device, generator=generator) for _ in range(layers)
        )
        self.w = nn.ModuleList(linear(rank, width, device=device, generator=generator) for _ in range(layers))

    def forward(self, dense: Tensor, pooled: Sequence[Tensor]) -> Tensor:
        """Dense `(b, d)` and pooled tensors to `(b, sum of widths)`."""
        x = first = torch.cat([dense, *pooled], dim=1)
        for v, w in zip(self.v, self.w, strict=True):
            x = first * w(v(x)) + x
        return x


def _apply(function: type[torch.autograd.Function], *args: Tensor) -> Tensor:
    out: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return out
