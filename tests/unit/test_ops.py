"""Each operation against its definition in float64."""

from __future__ import annotations

import pytest
import torch

from prefixcache.config import RopeConfig
from prefixcache.exceptions import ConfigError
from prefixcache.ops.activation import silu, silu_and_mul
from prefixcache.ops.linear import Linear, make_linear
from prefixcache.ops.norm import rms_norm
from prefixcache.ops.rope import RotaryEmbedding, apply_rope, inverse_frequencies

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(bias: bool = False, dtype: torch.dtype = torch.float32) -> Linear:
    return make_linear("torch", 24, 40, bias=bias, dtype=dtype, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_linear_of_parts_written_row_by_row(dtype: torch.dtype, rows: int) -> None:
    weight, bias, x = random(40, 24), random(40, seed=1), random(rows, 24, seed=2).to(dtype)
    layer = linear(bias=True, dtype=dtype)
    for start, stop in ((16, 40), (0, 7), (7, 16)):
        layer.copy_rows(start, weight[start:stop])
        layer.copy_bias(start, bias[start:stop])
    expected = x.double() @ weight.to(dtype).double().T + bias.to(dtype).double()
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(layer(x).double(), expected, atol=tolerance, rtol=tolerance)
    assert layer(x).dtype == dtype


def test_linear_rows_can_be_replaced_after_use() -> None:
    layer = linear()
    weight, x = random(40, 24), random(3, 24, seed=2)
    layer.copy_rows(0, weight)
    before = layer(x)
    layer.copy_rows(8, torch.zeros(4, 24))
    after = layer(x)
    assert torch.equal(after[:, 8:12], torch.zeros(3, 4))
    torch.testing.assert_close(after[:, 12:], before[:, 12:])


def test_a_tied_linear_reads_the_embedding() -> None:
    embedding = random(40, 24)
    layer = make_linear("torch", 24, 40, dtype=torch.float32, device=CPU, tied_to_OI=embedding)
    layer.copy_rows(0, embedding)
    x = random(2, 24, seed=3)
    torch.testing.assert_close(layer(x), x @ embedding.T)


def test_a_bias_for_a_linear_without_one_is_refused() -> None:
    with pytest.raises(ValueError, match="no bias"):
        linear().copy_bias(0, torch.zeros(40))


def test_an_unknown_kind_of_linear_is_refused() -> None:
    with pytest.raises(ConfigError, match="linear must be one of"):
        make_linear("magic", 1, 1, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight = random(3, 7, 24).to(dtype), random(24, seed=1).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    result = rms_norm(x, weight, 1e-5)
    assert result.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


def test_silu_at_the_extremes_is_finite() -> None:
    x = torch.tensor([-1e30, -100.0, -1.0, 0.0, 1.0, 100.0])
    expected = torch.tensor([0.0, 0.0, -0.2689414, 0.0, 0.7310586, 100.0])
    torch.testing.assert_close(silu(x), expected)


def test_silu_and_mul_takes_the_gate_first() -> None:
    gate, up = random(5, 6), random(5, 6, seed=1)
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(silu_and_mul(torch.cat([gate, up], dim=-1)), expected)


def test_rope_rotates_each_pair_by_its_angle() -> None:
    rope = RotaryEmbedding(RopeConfig(theta=100.0), 8, 64, CPU)
    x = random(3, 2, 8)
    positions = torch.tensor([0, 5, 63])
    rotated = apply_rope(x, *rope.at(positions))
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
    torch.testing.assert_close(linear_scaled, plain / 4)
    for kind in ("llama3", "yarn"):
        config = RopeConfig(kind=kind, factor=4.0, original_max_position=1024)
        scaled, _ = inverse_frequencies(config, 64)
        torch.testing.assert_close(scaled[0], plain[0])
        torch.testing.assert_close(scaled[-1], plain[-1] / 4)
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
