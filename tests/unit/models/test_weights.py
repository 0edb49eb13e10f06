"""Broken checkpoints: the error names the tensor and the file."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from prefixcache.config.model_config import ModelConfig
from prefixcache.exceptions import ModelLoadError
from prefixcache.models.names import TensorNames
from prefixcache.models.weights import (
    NamedTensor,
    check_folder,
    copy_into,
    read_folder,
    shapes_of,
)
from prefixcache.runner.torch.decoder_model import DecoderModel
from support.loaded import cpu_model, torch_model
from support.tiny_models import edit_config

TinyCheckpoint = Callable[..., Path]
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("smollm2"), tmp_path / "model"))


@pytest.fixture
def sharded(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("llama", sharded=True), tmp_path / "model"))


def load(folder: Path) -> DecoderModel:
    config = ModelConfig.from_hf(folder)
    return torch_model(folder, config=config)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tensors: tensors.pop(Q_PROJ), f"lack {Q_PROJ}"),
        (lambda tensors: [tensors.pop(name) for name in list(tensors)[:9]], "and 4 more"),
        (
            lambda tensors: tensors.update({"model.extra": torch.zeros(1)}),
            r"model\.safetensors holds .* model\.extra",
        ),
        (  # a model of text alone has no place for images
            lambda tensors: tensors.update({"vision_tower.x": torch.zeros(1)}),
            r"unexpected tensor vision_tower\.x",
        ),
        (
            lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 63)}),
            rf"{Q_PROJ} .*\[64, 63\].*\[64, 64\]",
        ),
        (
            lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.int64)}),
            f"{Q_PROJ} has the type I64",
        ),
    ],
    ids=["missing", "many missing", "unexpected", "of images", "misshapen", "of another type"],
)
def test_a_wrong_tensor_is_named(folder, change, problem):
    rewrite(folder, change)
    with pytest.raises(ModelLoadError, match=problem):
        load(folder)


def test_a_config_of_other_sizes_than_the_weights(folder: Path) -> None:
    edit_config(folder, intermediate_size=100)
    with pytest.raises(ModelLoadError, match=r"down_proj.*\[64, 96\].*\[64, 100\]"):
        load(folder)


@pytest.mark.parametrize("field", ["head_dim", "vocab_size", "intermediate_size"])
def test_a_size_that_no_machine_holds_takes_no_memory(folder: Path, field: str) -> None:
    edit_config(folder, **{field: 10**9})
    with pytest.raises(ModelLoadError, match=r"has shape .*configuration needs"):
        load(folder)


def test_copies_of_tied_and_rotary_tensors_are_ignored(folder: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    rewrite(folder, add)
    assert load(folder).config.tie_word_embeddings


@pytest.mark.parametrize("kept", [0, 4, 1000, 50_000])
def test_a_truncated_file_is_named(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load(folder)


def test_a_file_that_is_cut_while_it_is_read_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = read_folder(folder, TensorNames(ModelConfig.from_hf(folder)))
    next(tensors)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: it ends before byte"):
        list(tensors)


@pytest.mark.parametrize("blanks", [1, 2, 4])
def test_a_header_of_any_length_is_read(folder: Path, blanks: int) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = data[8 : 8 + size] + blanks * b" "
    file.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size :])
    config = ModelConfig.from_hf(folder)
    # The kernels want aligned numbers, which such a header does not give a mapped file.
    cpu_model(folder, config=config)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model\.safetensors does not exist"):
        load(folder)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=shard.name):
        load(sharded)


@pytest.mark.parametrize("text", ["", "{}", '{"weight_map": 3}', "[]"])
def test_a_broken_index_is_named(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"index\.json"):
        load(sharded)


def test_an_index_must_not_lead_out_of_the_folder(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    shutil.copy(min(sharded.glob("*.safetensors")), sharded.parent / "other.safetensors")
    index.write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"\.\./other\.safetensors, not a file of its folder"):
        load(sharded)


def test_replacing_an_unknown_weight_is_refused(folder: Path) -> None:
    model = load(folder)
    with pytest.raises(ModelLoadError, match=r"update holds an unexpected tensor nothing"):
        copy_into(model.slots, [NamedTensor("nothing", torch.zeros(1), "update")], model.names)


_NEWER_SPELLING = {
    "language_model.model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}


@pytest.fixture
def sees_images(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("gemma3-vision"), tmp_path / "model"))


def renamed(name: str) -> str:
    for old, new in _NEWER_SPELLING.items():
        name = name.replace(old, new)
    return name


@pytest.mark.parametrize("newer", [False, True])
def test_of_a_model_that_sees_images_the_text_part_is_read(sees_images: Path, newer: bool) -> None:
    if newer:
        tensors = load_file(sees_images / "model.safetensors")
        save_file(
            {renamed(name): tensor for name, tensor in tensors.items()},
            sees_images / "model.safetensors",
        )
    model = load(sees_images)
    check_folder(shapes_of(model.slots), sees_images, model.names)
    assert "model.layers.3.post_feedforward_layernorm.weight" in model.slots


def test_a_copy_of_its_tied_head_is_ignored(sees_images: Path) -> None:
    rewrite(
        sees_images,
        lambda tensors: tensors.update({"language_model.lm_head.weight": torch.zeros(384, 64)}),
    )
    assert load(sees_images).config.tie_word_embeddings


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("language_model.model.norm.weight", r"lack model\.norm\.weight"),
        ("language_model.model.layers.0.mlp.up_proj.weight", r"lack model\.layers\.0\.mlp\.up"),
    ],
)
def test_a_missing_tensor_of_its_text_part_is_named(
    sees_images: Path, name: str, problem: str
) -> None:
    rewrite(sees_images, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelLoadError, match=problem):
        load(sees_images)


def test_wrong_tensors_of_its_text_part_go_by_the_files_names(sees_images: Path) -> None:
    name = "language_model.model.norm.weight"
    rewrite(sees_images, lambda tensors: tensors.update({name: torch.zeros(63)}))
    with pytest.raises(ModelLoadError, match=rf"^{name} in .*model.safetensors has shape \[63\]"):
        load(sees_images)
    rewrite(
        sees_images,
        lambda tensors: tensors.update({name: torch.zeros(64), "audio.weight": torch.zeros(1)}),
    )
    with pytest.raises(ModelLoadError, match=r"unexpected tensor audio\.weight"):
        load(sees_images)
