"""ResNet-50 and Inception-V3 as lists of layers, and a training step of them as a workload graph.

The networks are those of He et al. 2015 (arXiv 1512.03385) and Szegedy et al. 2015 (arXiv 1512.00567) as torchvision builds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod

from perfcore.graph import kernels as k
from perfcore.graph.ops import Launch, Op, Region, Stream, WorkloadGraph

FP32, INT64 = 4.0, 8.0
CLASSES = 1000
Shape = tuple[int, int, int]  # channels, height, width


@dataclass(frozen=True)
class Layer:
    """One layer: ops forward, and ops backward in the order in which they run.

    Attributes:
        forward: ops.
        backward: ops.
        parameters: elements of each parameter, in order.
    """

    forward: tuple[Op, ...]
    backward: tuple[Op, ...] = ()
    parameters: tuple[int, ...] = ()


@dataclass
class Network:
    """Layers in the order in which they run, of one batch size."""

    batch: int
    layers: list[Layer] = field(default_factory=list)
    first: bool = True

    def conv(
        self, x: Shape, filters: int, taps: tuple[int, int], stride: int = 1, pad: tuple[int, int] = (0, 0)
    ) -> Shape:
        """A convolution without bias, batch normalisation behind it; no gradient of the network's input."""
        channels, height, width = x
        out = (
            filters,
            (height + 2 * pad[0] - taps[0]) // stride + 1,
            (width + 2 * pad[1] - taps[1]) // stride + 1,
        )
        products = [
            k.Convolution(
                self.batch,
                channels,
                height,
                width,
                filters,
                *taps,
                k.DType.FP32,
                stride,
                *pad,
                layout=layout,
            )
            for layout in k.GemmLayout
        ]
        gradients = products[2:] if self.first else products[1:]
        self.first = False
        self._add(
            "aten::conv2d", products[:1], "ConvolutionBackward0", gradients, [filters * channels * prod(taps)]
        )
        rows = float(self.batch * out[1] * out[2])
        norms = [k.BatchNorm(rows, filters, FP32, backward) for backward in (False, True)]
        self._add("aten::add_", [k.Elementwise("add", 1, INT64, INT64)], "", [])
        self._add("aten::batch_norm", norms[:1], "CudnnBatchNormBackward0", norms[1:], [filters, filters])
        return out

    def relu(self, x: Shape) -> Shape:
        """In place."""
        size = self.bytes_of(x)
        forward = k.Elementwise("relu", size / FP32, size, size)
        backward = k.Elementwise("threshold_backward", size / FP32, 2 * size, size)
        self._add("aten::relu_", [forward], "ReluBackward0", [backward])
        return x

    def pool(self, x: Shape, function: str, taps: int, stride: int, pad: int = 0) -> Shape:
        """Square windows."""
        channels, height, width = x
        out = (channels, *((e + 2 * pad - taps) // stride + 1 for e in (height, width)))
        sizes = (self.bytes_of(x) / FP32, self.bytes_of(out) / FP32, FP32)
        pair = [k.Pooling(function, *sizes, backward) for backward in (False, True)]
        names = {
            "max": ("aten::max_pool2d", "MaxPool2DWithIndicesBackward0"),
            "avg": ("aten::avg_pool2d", "AvgPool2DBackward0"),
        }
        self._add(names[function][0], pair[:1], names[function][1], pair[1:])
        return out

    def fork(self, x: Shape, branches: int) -> None:
        """`branches` layers read `x`: backward adds their gradients up."""
        self._add("", [], "add_gradients", [self.sum_of(x)] * (branches - 1))

    def add(self, x: Shape) -> Shape:
        """A residual connection: its gradient goes both ways as it is."""
        self._add("aten::add_", [self.sum_of(x)], "AddBackward0", [])
        return x

    def concatenate(self, *parts: Shape) -> Shape:
        """Along channels; backward gives views."""
        out = (sum(p[0] for p in parts), *parts[0][1:])
        self._add("aten::cat", [k.Concat(self.bytes_of(out), len(parts))], "CatBackward0", [])
        return out

    def dropout(self, x: Shape) -> Shape:
        """Of half of the values."""
        pair = [k.Dropout(self.bytes_of(x) / FP32, FP32, backward) for backward in (False, True)]
        self._add("aten::dropout", pair[:1], "FusedDropoutBackward0", pair[1:])
        return x

    def mean(self, x: Shape) -> Shape:
        """Over all pixels."""
        channels, height, width = x
        values = self.bytes_of(x)
        forward = k.Reduction(height * width, self.batch * channels, FP32)
        backward = k.Elementwise("div", values / FP32, values / (height * width), values)
        self._add("aten::adaptive_avg_pool2d", [forward], "MeanBackward1", [backward])
        return (channels, 1, 1)

    def classifier(self, x: Shape) -> None:
        """A linear layer, and the cross entropy of its result."""
        inputs = x[0]
        sizes = (
            (self.batch, CLASSES, inputs, k.GemmLayout.FORWARD),
            (self.batch, inputs, CLASSES, k.GemmLayout.GRAD_INPUT),
            (CLASSES, inputs, self.batch, k.GemmLayout.GRAD_WEIGHT),
        )
        products = [
            k.Gemm(m, n, depth, k.DType.FP32, layout=layout, epilogue=layout is k.GemmLayout.FORWARD)
            for m, n, depth, layout in sizes
        ]
        bias = k.Reduction(self.batch, CLASSES, FP32)
        self._add(
            "aten::linear",
            products[:1],
            "AddmmBackward0",
            [*products[1:], bias],
            [CLASSES * inputs, CLASSES],
        )
        scores = [k.Softmax(self.batch, CLASSES, FP32, backward) for backward in (False, True)]
        self._add("aten::log_softmax", scores[:1], "LogSoftmaxBackward0", scores[1:])
        picked = k.Elementwise("nll_loss", self.batch, self.batch * (FP32 + INT64), FP32)
        filled = k.Elementwise("fill", self.batch * CLASSES, 0.0, self.batch * CLASSES * FP32)
        self._add("aten::nll_loss", [picked], "NllLossBackward0", [filled, picked])

    def bytes_of(self, x: Shape) -> float:
        """Of a tensor of the whole batch."""
        return FP32 * self.batch * prod(x)

    def sum_of(self, x: Shape) -> k.Elementwise:
        """Adds a tensor to another in place."""
        size = self.bytes_of(x)
        return k.Elementwise("add", size / FP32, 2 * size, size)

    def _add(
        self,
        name: str,
        forward: Iterable[k.Kernel],
        backward_name: str,
        backward: Iterable[k.Kernel],
        parameters: Iterable[int] = (),
    ) -> None:
        ahead = (_op(name, forward, "forward"),) if name else ()
        back = (_op(backward_name, backward, "backward"),) if backward_name else ()
        self.layers.append(Layer(ahead, back, tuple(parameters)))


def _op(name: str, kernels: Iterable[k.Kernel], phase: str) -> Op:
    return Op(name, tuple(Launch(kernel) for kernel in kernels), phase=phase)


def resnet50(batch: int) -> Network:
    """ResNet-50 on images of 224 × 224."""
    net = Network(batch)
    x = net.relu(net.conv((3, 224, 224), 64, (7, 7), 2, (3, 3)))
    x = net.pool(x, "max", 3, 2, 1)
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            x = _bottleneck(net, x, width, stride if block == 0 else 1, project=block == 0)
    net.classifier(net.mean(x))
    return net


def _bottleneck(net: Network, x: Shape, width: int, stride: int, *, project: bool) -> Shape:
    net.fork(x, 2)
    y = net.relu(net.conv(x, width, (1, 1)))
    y = net.relu(net.conv(y, width, (3, 3), stride, (1, 1)))
    y = net.conv(y, 4 * width, (1, 1))
    if project:
        net.conv(x, 4 * width, (1, 1), stride)
    return net.relu(net.add(y))


# Filters, taps, and stride of a block's convolutions one after another; 3 × 3 and wider ones keep the extent at stride 1.
Chain = list[tuple[int, tuple[int, int], int]]
ONE, THREE, FIVE, ROW, COLUMN = (1, 1), (3, 3), (5, 5), (1, 7), (7, 1)


def inception_v3(batch: int) -> Network:
    """Inception-V3 on images of 299 × 299, without the auxiliary classifier."""
    net = Network(batch)
    x: Shape = (3, 299, 299)
    for filters, taps, stride, pad in ((32, THREE, 2, 0), (32, THREE, 1, 0), (64, THREE, 1, 1)):
        x = net.relu(net.conv(x, filters, taps, stride, (pad, pad)))
    x = net.pool(x, "max", 3, 2)
    x = net.relu(net.conv(x, 80, ONE))
    x = net.relu(net.conv(x, 192, THREE))
    x = net.pool(x, "max", 3, 2)
    for pooled in (32, 64, 64):
        x = _block(net, x, [[(64, ONE, 1)], [(48, ONE, 1), (64, FIVE, 1)], _double(96, 1)], pooled)
    x = _block(net, x, [[(384, THREE, 2)], _double(96, 2)], None)
    for width in (128, 160, 160, 192):
        single: Chain = [(width, ONE, 1), (width, ROW, 1), (192, COLUMN, 1)]
        twice: Chain = [
            (width, ONE, 1),
            (width, COLUMN, 1),
            (width, ROW, 1),
            (width, COLUMN, 1),
            (192, ROW, 1),
        ]
        x = _block(net, x, [[(192, ONE, 1)], single, twice], 192)
    last: Chain = [(192, ONE, 1), (192, ROW, 1), (192, COLUMN, 1), (192, THREE, 2)]
    x = _block(net, x, [[(192, ONE, 1), (320, THREE, 2)], last], None)
    for _ in range(2):
        x = _wide_block(net, x)
    net.classifier(net.dropout(net.mean(x)))
    return net


def _double(filters: int, stride: int) -> Chain:
    return [(64, ONE, 1), (filters, THREE, 1), (filters, THREE, stride)]


def _chain(net: Network, x: Shape, chain: Chain) -> Shape:
    for filters, taps, stride in chain:
        pad = (taps[0] // 2, taps[1] // 2) if stride == 1 else (0, 0)
        x = net.relu(net.conv(x, filters, taps, stride, pad))
    return x


def _block(net: Network, x: Shape, chains: list[Chain], pooled: int | None) -> Shape:
    """Branches side by side; the last one averages and projects to `pooled` filters, or takes maxima at stride 2."""
    net.fork(x, len(chains) + 1)
    parts = [_chain(net, x, chain) for chain in chains]
    if pooled is None:
        parts.append(net.pool(x, "max", 3, 2))
    else:
        parts.append(_chain(net, net.pool(x, "avg", 3, 1, 1), [(pooled, ONE, 1)]))
    return net.concatenate(*parts)


def _wide_block(net: Network, x: Shape) -> Shape:
    """Branches that split into a row and a column of taps at their end."""
    net.fork(x, 4)
    parts = [_chain(net, x, [(320, ONE, 1)])]
    starts: list[Chain] = [[(384, ONE, 1)], [(448, ONE, 1), (384, THREE, 1)]]
    for start in starts:
        y = _chain(net, x, start)
        net.fork(y, 2)
        ends = [_chain(net, y, [(384, taps, 1)]) for taps in ((1, 3), (3, 1))]
        parts.append(net.concatenate(*ends))
    parts.append(_chain(net, net.pool(x, "avg", 3, 1, 1), [(192, ONE, 1)]))
    return net.concatenate(*parts)


NETWORKS: dict[str, Callable[[int], Network]] = {"resnet50": resnet50, "inception_v3": inception_v3}


def training_step(net: Network) -> WorkloadGraph:
    """Forward pass, backward pass and plain SGD, each timed from an idle device to its end, as the script does it.

    Gradients are filled with zeros outside of the measured time and added to in it (`AccumulateGrad`).
    """
    forward = [op for layer in net.layers for op in layer.forward]
    backward: list[Op] = []
    for layer in reversed(net.layers):
        backward += layer.backward
        backward += [_accumulate(size) for size in layer.parameters]
    sizes = [size for layer in net.layers for size in layer.parameters]
    update = Op("Optimizer.step#SGD.step", tuple(Launch(_sum(size)) for size in sizes), phase="optimizer")
    regions = {"forward": forward, "backward": backward, "optimizer": [update]}
    return WorkloadGraph(tuple(Region(name, (*ops, _synchronize())) for name, ops in regions.items()))


def _accumulate(size: int) -> Op:
    return Op("torch::autograd::AccumulateGrad", (Launch(_sum(size)),), phase="backward")


def _sum(size: int) -> k.Elementwise:
    return k.Elementwise("add", size, 2 * FP32 * size, FP32 * size)


def _synchronize() -> Op:
    return Op("cudaDeviceSynchronize", blocks_on=(Stream.COMPUTE,))
