"""The device of a rank: products, layers in training, memory, and copies from the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.core.measure import Bench
from hpctrain.plan.compute import EAGER

MIB = 1024**2
KEPT = 16  # results at a time
TRAINING = 3  # FLOPs of forward and backward over those of forward, as the plan counts


def measure_products(bench: Bench) -> None:
    """Square matrix products at the precision of the run."""
    for side in (1024, 2048, 4096, 8192) if bench.on_gpu else (128, 256, 512, 1024):
        a, b = (torch.randn(side, side, device=bench.mesh.device, dtype=bench.dtype) for _ in range(2))
        bench.add("matmul", 2 * side**3, lambda a=a, b=b: torch.mm(a, b))  # type: ignore[misc]


class Convolutions(nn.Module):
    """A residual block of 3×3 convolutions (He et al. 2016)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.convolutions[0](x)))
        return F.relu(x + self.norms[1](self.convolutions[1](y)))

    def flops(self, pixels: int) -> float:
        return 2.0 * pixels * 2 * 9 * self.channels**2


class TransformerBlock(nn.Module):
    """A block of a vision transformer (Dosovitskiy et al. 2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, 64)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return cast(Tensor, x + self.down(F.gelu(self.up(self.norms[1](x)))))

    def flops(self, batch: int, tokens: int) -> float:
        width = self.out.in_features
        return 2.0 * batch * tokens * (12 * width**2 + 2 * tokens * width)


def measure_layers(bench: Bench) -> None:
    """Layers of the models that are trained, forward and backward, at the precision of the run."""
    device, gpu = bench.mesh.device, bench.on_gpu
    tokens = 4096 if gpu else 512
    for width in (2048, 4096, 5120) if gpu else (128, 256, 512):
        _measure_decoder_products(bench, tokens, width)
    for length in (1024, 4096) if gpu else (256, 512):
        _measure_attention(bench, *((32, 128) if gpu else (4, 64)), length)
    batch = 32 if gpu else 4
    for channels, side in ((64, 56), (128, 28), (256, 14)):
        convolutions = Convolutions(channels).to(device)
        x = torch.randn(batch, channels, side, side, device=device)
        if gpu:
            convolutions.to(memory_format=torch.channels_last)
            x = x.to(memory_format=torch.channels_last)
        flops = TRAINING * convolutions.flops(batch * side**2)
        bench.add("convolutions", flops, trained(bench, convolutions, x))
    for width in (384, 768) if gpu else (192, 384):
        transformer = TransformerBlock(width).to(device)
        x = torch.randn(batch, 197, width, device=device)
        bench.add(
            "vision_transformer", TRAINING * transformer.flops(batch, 197), trained(bench, transformer, x)
        )


def _measure_decoder_products(bench: Bench, tokens: int, width: int) -> None:
    """A matrix of a decoder's MLP, forward and backward: three products of the same size."""
    inner = 8 * width // 3
    weight, x, gradient = (
        torch.randn(rows, columns, device=bench.mesh.device, dtype=bench.dtype)
        for rows, columns in ((width, inner), (tokens, width), (tokens, inner))
    )
    weight.requires_grad_(), x.requires_grad_()

    def work() -> None:
        (x @ weight).backward(gradient)  # type: ignore[no-untyped-call]
        x.grad = weight.grad = None

    moved = TRAINING * sum(each.nbytes for each in (weight, x, gradient))
    bench.add("decoder_products", TRAINING * 2.0 * tokens * width * inner, work, moved=moved)


def _measure_attention(bench: Bench, heads: int, dim: int, length: int) -> None:
    """With a mask, as models/attention.py calls it: over the whole square, and backward computes the scores
    again (Dao 2023, section 3)."""
    flops = 3.5 * 4 * length**2 * heads * dim
    x = torch.randn(1, heads, length, dim, device=bench.mesh.device)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=bench.mesh.device).tril()
    attend = partial(F.scaled_dot_product_attention, attn_mask=mask)
    moved = sum(EAGER.score_bytes) * heads * length**2
    bench.add("attention", flops, trained(bench, lambda x: attend(x, x, x), x), moved=moved)


def trained(bench: Bench, layer: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    """Forward and backward of a layer, as a call."""
    x.requires_grad_()
    device = bench.mesh.device.type

    def work() -> None:
        with torch.autocast(device, bench.dtype, enabled=bench.dtype != torch.float32):
            y = layer(x)
        y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]
        x.grad = None
        if isinstance(layer, nn.Module):
            layer.zero_grad()

    return work


def _products_that_stay(x: Tensor) -> list[Tensor]:
    """Results are kept, as backward needs them: memory that was just freed would still be in a cache."""
    kept = [x]
    for _ in range(KEPT):
        kept.append(kept[-1] * x)
    return kept


def measure_memory(bench: Bench) -> None:
    """Elementwise products, which move three times their size; copies in host memory, and to it and from it;
    and an operator with nothing to do."""
    mesh, per_node = bench.mesh, bench.config.cluster.ranks_per_node
    for size in (64 * MIB, 256 * MIB) if bench.on_gpu else (MIB, 4 * MIB, 16 * MIB):
        x = torch.ones(size // 4, device=mesh.device)
        bench.add("device_memory", KEPT * 3 * size, partial(_products_that_stay, x))
    del x
    one = torch.ones(1, device=mesh.device, requires_grad=True)
    bench.add("launch", 1, lambda: one * 2)
    size = 64 * MIB
    source, target = (torch.zeros(size // 4) for _ in range(2))
    bench.add("host_memory", 2 * size, lambda: target.copy_(source), at_once=per_node)
    if bench.on_gpu:
        pinned, there = source.pin_memory(), torch.zeros(size // 4, device=mesh.device)
        bench.add("host_copy", size, lambda: there.copy_(pinned, non_blocking=True))
        bench.add("host_copy", size, lambda: pinned.copy_(there, non_blocking=True))
