"""Checkpoints that hold all experts of a layer as one tensor, of numbers or of MXFP4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from prefixcache.config.model_config import ModelConfig
from prefixcache.exceptions import ModelLoadError, UnsupportedModelError
from prefixcache.models.loader import check_weights
from support.loaded import cpu_model, torch_model
from support.paged_driver import CpuDriver, PagedDriver
from support.tiny_models import edit_config, make_checkpoint, make_model, save_tokenizer

TOKENS = list(range(3, 90))


FAMILIES = ["qwen2-moe", "qwen3-moe", "qwen3-next", "olmoe", "lfm2-moe", "granite-moe-shared"]


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_in_one_tensor_are_those_of_a_tensor_each(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    folders = [tmp_path / "each", tmp_path / "one"]
    logits = []
    for folder in folders:
        model.save_pretrained(folder, save_original_format=folder.name == "each")
        logits.append(CpuDriver(cpu_model(folder)).forward([(0, 0, TOKENS)]))
    names = [load_file(folder / "model.safetensors").keys() for folder in folders]
    assert any(name.endswith("experts.gate_up_proj") for name in names[1] - names[0])
    assert torch.equal(*logits)


def in_blocks(folder: Path) -> torch.Tensor:
    """Writes a checkpoint whose experts are blocks; returns the logits of its numbers."""
    model = make_model("gpt-oss")
    generator = torch.Generator().manual_seed(0)
    blocks: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            count, inputs, outputs = parameter.shape
            shape = (count, outputs, inputs // 32)
            codes = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(119, 126, shape, dtype=torch.uint8, generator=generator)
            parameter.data = convert_moe_packed_tensors(codes, scales, dtype=torch.float32)
            blocks |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    model.save_pretrained(folder)
    save_tokenizer(folder)
    file = folder / "model.safetensors"
    kept = {k: v for k, v in load_file(file).items() if f"{k}_blocks" not in blocks}
    save_file(kept | blocks, file, metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


def test_blocks_mean_the_numbers_that_transformers_reads_in_them(tmp_path: Path) -> None:
    exact = in_blocks(tmp_path)
    model = cpu_model(tmp_path)
    for driver in (CpuDriver(model), PagedDriver(torch_model(tmp_path))):
        ours = driver.forward([(0, 0, TOKENS)])
        torch.testing.assert_close(ours, exact, atol=2e-4, rtol=1e-4)
    formats = {slot.kept_format() for name, slot in model.slots.items() if ".experts." in name}
    assert formats == {"MXFP4", "float32"}  # biases are numbers


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("down_proj_scales", None, "down_proj_blocks is there without its blocks or scales"),
        ("down_proj_scales", (6, 64, 4), r"down_proj_scales has shape \[6, 64, 4\]"),
        ("down_proj_blocks", (6, 64, 4, 16), r"down_proj.weight in .* shape \[64, 128\]"),
        ("down_proj_blocks", (6, 64), "unexpected tensor .*down_proj_blocks"),
        ("down_proj_blocks", None, "lack .*experts.0.down_proj.weight"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(tmp_path, name, shape, message):
    in_blocks(tmp_path)
    tensor = None if shape is None else torch.zeros(shape, dtype=torch.uint8)
    file = tmp_path / "model.safetensors"
    held = load_file(file) | {f"model.layers.0.mlp.experts.{name}": tensor}
    save_file({k: v for k, v in held.items() if v is not None}, file)
    with pytest.raises(ModelLoadError, match=message):
        cpu_model(tmp_path)


def test_bytes_in_the_place_of_numbers_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gpt-oss")
    file = tmp_path / "model.safetensors"
    router = "model.layers.0.mlp.router.weight"
    save_file(load_file(file) | {router: torch.zeros(6, 64, dtype=torch.uint8)}, file)
    with pytest.raises(ModelLoadError, match=f"{router} .* holds bytes"):
        cpu_model(tmp_path)


def test_experts_of_another_number_are_refused_from_the_header(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gpt-oss")
    edit_config(tmp_path, num_local_experts=5)
    with pytest.raises(ModelLoadError, match="unexpected tensor"):
        check_weights(ModelConfig.from_hf(tmp_path), tmp_path)


@pytest.mark.parametrize("changed", [{"quant_method": "fp8"}, {"swiglu_limit": 6.0}], ids=str)
def test_what_is_not_computed_is_refused_by_name(tmp_path, changed):
    make_checkpoint(tmp_path, "gpt-oss")
    if "quant_method" in changed:
        changed = {"quantization_config": changed}
    edit_config(tmp_path, **changed)
    with pytest.raises(UnsupportedModelError, match=next(iter(changed))):
        ModelConfig.from_hf(tmp_path)
