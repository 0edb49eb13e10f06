"""Models converted to blocks and back: what the files hold, what is computed, what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from prefixcache.cli import main as cli
from prefixcache.models import conversion
from prefixcache.models.conversion import dequantize_folder, quantize_folder
from prefixcache.models.gguf.index import WEIGHTS_FILE
from prefixcache.models.quantize import QUANTIZABLE
from prefixcache.text.tokenization.tokenizer import Tokenizer
from support.loaded import cpu_model
from support.paged_driver import CpuDriver
from support.tiny_models import make_checkpoint

Checkpoint = Callable[..., Path]


def made(convert: Callable[..., None], source: Path, target: Path, form: object) -> Path:
    target.mkdir()
    convert(source, target, form)
    return target


def logits(folder: Path, dtype: str) -> torch.Tensor:
    model = cpu_model(folder, dtype)  # type: ignore[arg-type]
    return CpuDriver(model).forward([(0, 0, list(range(3, 43)))])


@pytest.mark.parametrize(
    ("architecture", "quant_format", "dtype"),
    [
        ("llama-bias", "Q8_0", "float32"),
        ("qwen2", "Q4_0", "bfloat16"),
        ("qwen3", "Q5_1", "float32"),
        ("gemma3-vision", "Q4_1", "bfloat16"),
        ("qwen3-moe", "Q5_1", "bfloat16"),
        ("qwen3-next", "Q5_1", "float32"),
        ("granite-moe-shared", "Q4_1", "bfloat16"),
    ],
    ids=str,
)
def test_a_converted_model_computes_what_its_dequantized_weights_do(
    tiny_checkpoint, tmp_path, architecture, quant_format, dtype
):
    source = tiny_checkpoint(architecture)
    blocks = made(quantize_folder, source, tmp_path / "blocks", quant_format)
    dequantized = made(dequantize_folder, blocks, tmp_path / "dequantized", dtype)
    assert torch.equal(logits(blocks, dtype), logits(dequantized, dtype))
    exact = logits(source, dtype)
    difference = (logits(blocks, dtype) - exact).norm() / exact.norm()
    assert 0 < difference < (0.02 if quant_format == "Q8_0" else 0.5)
    text = "The same question, twice."
    expected = Tokenizer.from_folder(source).encode(text)
    assert Tokenizer.from_folder(blocks).encode(text).tolist() == expected.tolist()


def test_a_model_that_can_be_served_can_be_quantized(tmp_path: Path) -> None:
    """Its configuration names an architecture, and need not name transformers' model type."""
    source = make_checkpoint(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["model_type"]
    (source / "config.json").write_text(json.dumps(config))
    assert cpu_model(made(quantize_folder, source, tmp_path / "blocks", "Q8_0")).num_bytes


@pytest.mark.parametrize("quant_format", QUANTIZABLE)
def test_the_file_holds_what_the_gguf_package_makes(tmp_path: Path, quant_format: str) -> None:
    """Of a width of 80 there are no whole blocks: `down_proj` stays as it is."""
    dense = make_checkpoint(tmp_path / "dense", dtype=torch.bfloat16, intermediate_size=80)
    blocks = made(quantize_folder, dense, tmp_path / "blocks", quant_format)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(blocks / WEIGHTS_FILE).tensors}
    kind = gguf.GGMLQuantizationType[quant_format]
    weights = load_file(dense / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        numbers = weight.float().numpy()
        if weight.dim() == 1:
            expected, wanted = numbers, gguf.GGMLQuantizationType.F32
        elif "down_proj" in name:
            expected, wanted = numbers, gguf.GGMLQuantizationType.BF16
        else:
            expected, wanted = gguf.dequantize(gguf.quantize(numbers, kind), kind), kind
        assert found[name].tensor_type == wanted
        held = gguf.dequantize(found[name].data, found[name].tensor_type)
        assert np.array_equal(held.reshape(expected.shape), expected)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["convert", *map(str, arguments)])


def test_the_command_prints_the_folder_it_made(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tiny_checkpoint()
    result = run(source, "--quantize", "Q4_0")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{source.name}-q4_0\n"
    result = run(f"{source.name}-q4_0", "--widen", "bfloat16", "--output", "dense")
    assert result.exit_code == 0, result.stderr
    assert json.loads(Path("dense/config.json").read_text())["dtype"] == "bfloat16"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", f"{source.name}-q4_0"]


def test_the_command_names_the_formats_there_are() -> None:
    assert tuple(name.upper() for name in cli.QUANTIZABLE) == QUANTIZABLE


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "--quantize or --dequantize is needed"),
        (
            ["--quantize", "q8_0", "--dequantize", "float32"],
            "--quantize excludes --dequantize",
        ),
        (["--quantize", "q4_k_m"], "--quantize must be one of q8_0, q4_0, .*got 'q4_k_m'.*GGUF"),
        (["--quantize", "q8_0", "--output", "."], "--output .* is there already"),
    ],
)
def test_what_cannot_be_asked_for(tiny_checkpoint, tmp_path, monkeypatch, arguments, problem):
    monkeypatch.chdir(tmp_path)
    result = run(tiny_checkpoint(), *arguments)
    assert result.exit_code == 2
    assert re.search(problem, result.stderr)
    assert list(tmp_path.iterdir()) == []


def _with_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, folder / "model.safetensors")


def _with_the_largest(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 65536
    save_file(tensors, folder / "model.safetensors")


def _truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (_with_nan, "layers.1.mlp.up_proj.weight holds NaN"),
        (_with_the_largest, "layers.1.mlp.up_proj.weight holds .* beyond 65,504"),
        (_truncated, "Cannot read the weight file"),
    ],
)
def test_weights_that_cannot_be_converted_leave_nothing(tmp_path, spoil, problem):
    source, place = make_checkpoint(tmp_path / "source"), tmp_path / "place"
    spoil(source)
    result = run(source, "--quantize", "q8_0", "--output", place / "made")
    assert result.exit_code == 1
    assert re.search(problem, result.stderr)
    assert list(place.iterdir()) == []


def test_blocks_are_not_quantized_again(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    blocks = made(quantize_folder, tiny_checkpoint(), tmp_path / "blocks", "Q8_0")
    result = run(blocks, "--quantize", "q4_0", "--output", tmp_path / "made")
    assert result.exit_code == 1
    assert "is quantized to Q8_0 already" in result.stderr
    assert not (tmp_path / "made").exists()


def test_a_full_disk_leaves_nothing(tiny_checkpoint, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion.GGUFWriter, "write_tensor_data", fail)
    place = tmp_path / "place"
    result = run(tiny_checkpoint(), "--quantize", "q8_0", "--output", place / "made")
    assert result.exit_code == 1
    assert "No space left" in result.stderr
    assert list(place.iterdir()) == []
