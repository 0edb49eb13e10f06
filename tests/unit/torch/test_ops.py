"""Each operation against its definition in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from prefixcache._core import Cpu
from prefixcache.config.rope_config import RopeConfig
from prefixcache.models.decoder.shapes import LinearShape
from prefixcache.models.rope import inverse_frequencies
from prefixcache.runner.cpu.linear import CpuEmbedding, CpuLinear
from prefixcache.runner.torch.decoder.builder import Builder
from prefixcache.runner.torch.ops.activation import gelu_tanh, silu
from prefixcache.runner.torch.ops.rope import RotaryEmbedding
from prefixcache.runner.torch.ops.sets import Ops
from support.loaded import to_numpy, to_torch

CPU = torch.device("cpu")
THREADS = Cpu(2)
DTYPES = [torch.float32, torch.bfloat16]


class KernelLinear:
    """The CPU's linear layer on torch's tensors."""

    def __init__(self, dtype: torch.dtype, shape: LinearShape) -> None:
        name = "float32" if dtype == torch.float32 else "bfloat16"
        self.layer = CpuLinear(THREADS, name, shape)

    def copy_rows(self, start: int, weight: torch.Tensor) -> None:
        self.layer.copy_rows(start, to_numpy(weight))

    def copy_bias(self, start: int, bias: torch.Tensor) -> None:
        self.layer.copy_bias(start, to_numpy(bias))

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        added = None if residual is None else to_numpy(residual)
        return to_torch(self.layer(to_numpy(x), added))

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), self.layer.out_features)
        self.layer.wide(to_numpy(x), out.numpy())
        return out


def ops(dtype: torch.dtype = torch.float32) -> Ops:
    return Ops(dtype, CPU)


@pytest.fixture(params=["torch", "cpu"])
def form(request: pytest.FixtureRequest) -> str:
    return request.param


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(form: str, bias: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    shape = LinearShape(24, {"weight": 40}, bias)
    return KernelLinear(dtype, shape) if form == "cpu" else ops(dtype).linear(shape)


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 0.05


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_of_parts_written_row_by_row(form, dtype, rows, has_bias):
    weight, bias, x = random(40, 24), random(40, seed=1), random(rows, 24, seed=2).to(dtype)
    residual = random(rows, 40, seed=3).to(dtype)
    with_residual = residual.double()
    layer = linear(form, bias=has_bias, dtype=dtype)
    for start, stop in ((16, 40), (0, 7), (7, 16)):
        layer.copy_rows(start, weight[start:stop])
        if has_bias:
            layer.copy_bias(start, bias[start:stop])
    expected = x.double() @ weight.to(dtype).double().T + has_bias * bias.to(dtype).double()
    near = {"atol": tolerance(dtype), "rtol": tolerance(dtype)}
    torch.testing.assert_close(layer(x).double(), expected, **near)
    torch.testing.assert_close(layer(x, residual).double(), expected + with_residual, **near)
    torch.testing.assert_close(layer.wide(x).double(), expected, **near)
    assert layer(x).dtype == dtype
    assert layer.wide(x).dtype == (dtype if form == "torch" else torch.float32)


def test_linear_rows_can_be_replaced_after_use(form: str) -> None:
    layer = linear(form)
    weight, x = random(40, 24), random(3, 24, seed=2)
    layer.copy_rows(0, weight)
    before = layer(x)
    layer.copy_rows(8, torch.zeros(4, 24))
    after = layer(x)
    assert torch.equal(after[:, 8:12], torch.zeros(3, 4))
    torch.testing.assert_close(after[:, 12:], before[:, 12:])


def test_a_tied_head_gives_the_embeddings_products(form: str) -> None:
    shape, weight = LinearShape(24, {"": 40}), random(40, 24)
    x, ids = random(2, 24, seed=3), torch.tensor([39, 0])
    if form == "cpu":
        head = KernelLinear(torch.float32, shape)
        table = CpuEmbedding(THREADS, "float32", shape, head.layer)
        table.write(to_numpy(weight))
        rows = to_torch(table(ids.numpy()))
    else:
        head = ops().linear(shape)
        builder = Builder(ops())
        table = builder.embedding("table.weight", shape, head)
        builder.slots["table.weight"].write(to_numpy(weight))
        rows = table.read_rows(ids)
    torch.testing.assert_close(head(x), x @ weight.T)
    assert torch.equal(rows, weight[[39, 0]])


def test_a_bias_for_a_linear_without_one_is_refused(form: str) -> None:
    with pytest.raises(ValueError, match="bias"):
        linear(form).copy_bias(0, torch.zeros(40))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(24,), (7, 24)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    # A slice of wider rows, as the heads of a fused projection are.
    x, weight = random(3, 9, 24).to(dtype)[:, :7], random(*shape, seed=1).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    result = ops(dtype).rms_norm(x, weight, 1e-5)
    assert (result.dtype, result.shape) == (dtype, x.shape)
    near = {"atol": tolerance(dtype), "rtol": tolerance(dtype)}
    torch.testing.assert_close(result.double(), expected, **near)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(24,), (7, 24)])
def test_rms_norm_with_an_offset_is_rounded_once(dtype, shape):
    x, weight = random(3, 9, 24).to(dtype)[:, :7], random(*shape, seed=1).to(dtype)
    wide = x.double()
    scaled = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + 1)
    result = ops(dtype).rms_norm(x, weight, 1e-5, offset=1.0)
    # Half a unit of the last place and float32's own errors, not the 5 % of two roundings.
    near = {"atol": 1e-5, "rtol": 1e-5 if dtype == torch.float32 else 2.0**-8}
    torch.testing.assert_close(result.double(), scaled, **near)
    assert (result.dtype, result.shape) == (dtype, x.shape)


@pytest.mark.parametrize(
    ("gate", "below", "above"),
    [(silu, -0.2689414, 0.7310586), (gelu_tanh, -0.1588080, 0.8411920)],
)
def test_a_gate_at_the_extremes_is_finite(gate, below, above):
    x = torch.tensor([-1e30, -100.0, -1.0, 0.0, 1.0, 100.0])
    torch.testing.assert_close(gate(x), torch.tensor([0.0, 0.0, below, 0.0, above, 100.0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_takes_the_gate_first(dtype: torch.dtype) -> None:
    gate, up = random(5, 6).to(dtype), random(5, 6, seed=1).to(dtype)
    expected = (gate.double() * torch.sigmoid(gate.double()) * up.double()).to(dtype)
    result = ops(dtype).silu_and_mul(torch.cat([gate, up], dim=-1))
    torch.testing.assert_close(result, expected, atol=tolerance(dtype), rtol=tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_tanh_and_mul_takes_the_gate_first(dtype: torch.dtype) -> None:
    gate, up = random(5, 6).to(dtype), random(5, 6, seed=1).to(dtype)
    activated = torch.nn.functional.gelu(gate.double(), approximate="tanh")
    result = ops(dtype).gelu_tanh_and_mul(torch.cat([gate, up], dim=-1))
    near = {"atol": tolerance(dtype) / 10, "rtol": tolerance(dtype) / 4}
    torch.testing.assert_close(result.double(), activated * up.double(), **near)


def test_rope_rotates_each_pair_by_its_angle() -> None:
    rope = RotaryEmbedding(RopeConfig(theta=100.0), 8, 64, CPU)
    x = random(3, 5, 8)[:, :2]
    positions = torch.tensor([0, 5, 63])
    rotated = ops().apply_rope(x, *rope.at(positions))
    assert torch.equal(rotated[0], x[0])
    for pair in range(4):
        angle = positions.double() * 100.0 ** (-pair / 4)
        turn = torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
        expected = torch.complex(x[..., pair].double(), x[..., pair + 4].double()) * turn
        torch.testing.assert_close(rotated[..., pair].double(), expected.real, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            rotated[..., pair + 4].double(), expected.imag, atol=1e-5, rtol=0
        )


def test_a_positions_rotation_does_not_depend_on_the_table() -> None:
    short = RotaryEmbedding(RopeConfig(), 64, 100, CPU).at(torch.tensor([99]))
    long = RotaryEmbedding(RopeConfig(), 64, 10_000, CPU).at(torch.tensor([99, 5000]))
    assert torch.equal(short[0][0], long[0][0])
    assert torch.equal(short[1][0], long[1][0])


def test_scaling_factors_keep_fast_pairs_and_slow_down_slow_ones() -> None:
    plain, _ = inverse_frequencies(RopeConfig(), 64)
    linear_scaled, _ = inverse_frequencies(RopeConfig(kind="linear", factor=4.0), 64)
    np.testing.assert_allclose(linear_scaled, plain / 4, rtol=1e-6)
    for kind in ("llama3", "yarn"):
        config = RopeConfig(kind=kind, factor=4.0, original_max_position=1024)
        scaled, _ = inverse_frequencies(config, 64)
        np.testing.assert_allclose(scaled[0], plain[0], rtol=1e-6)
        np.testing.assert_allclose(scaled[-1], plain[-1] / 4, rtol=1e-6)
        assert (scaled <= plain * 1.000001).all()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, 1.1386294),  # 0.1 ln 4 + 1
        ({"attention_factor": 0.5}, 0.5),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, 1.2772589 / 1.1386294),
        ({"factor": 0.5}, 1.0),
    ],
)
def test_yarn_magnitude(arguments: dict[str, float], expected: float) -> None:
    options = {"factor": 4.0} | arguments
    config = RopeConfig(kind="yarn", original_max_position=1024, **options)
    assert inverse_frequencies(config, 64)[1] == pytest.approx(expected)
