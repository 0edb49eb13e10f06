"""A real model's weights replaced, given up and read again; what does not fit is refused before."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from prefixcache._core import Cpu
from prefixcache.config.model_config import ModelConfig
from prefixcache.exceptions import ModelLoadError
from prefixcache.models import replaceable
from prefixcache.models.checkpoint import read_checkpoint
from prefixcache.models.loader import load_model
from prefixcache.models.names import TensorNames
from prefixcache.models.replaceable import ReplaceableModel
from prefixcache.runner.cpu.model import CpuModel
from support.paged_driver import CpuDriver
from support.tiny_models import edit_config

Checkpoint = Callable[..., Path]
PROMPT = [5, 9, 300, 7, 7, 21]


def replaceable_model(folder: Path) -> ReplaceableModel:
    config = ModelConfig.from_hf(folder)
    make = partial(CpuModel, config, Cpu(1), "float32", config.max_context_length)
    return ReplaceableModel(load_model(make, config, folder), make, read_checkpoint(folder))


def logits(model: ReplaceableModel) -> torch.Tensor:
    return CpuDriver(model.loaded).forward([(0, 0, PROMPT)])


def expected(folder: Path) -> torch.Tensor:
    return logits(replaceable_model(folder))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


FAMILIES = ["smollm2", "llama-bias", "qwen2", "qwen3", "gemma3", "gemma3-vision", "qwen3.5-vision"]


@pytest.fixture(params=FAMILIES)
def folders(request: pytest.FixtureRequest, tiny_checkpoint: Checkpoint) -> tuple[Path, Path]:
    return tiny_checkpoint(request.param), tiny_checkpoint(request.param, seed=1)


@pytest.fixture
def pair(tiny_checkpoint: Checkpoint, tmp_path: Path) -> tuple[Path, Path]:
    """The folder served, and a copy of another that a test may break."""
    other = shutil.copytree(tiny_checkpoint("smollm2", seed=1), tmp_path / "other")
    return tiny_checkpoint("smollm2"), other


def test_weights_from_a_folder(folders: tuple[Path, Path]) -> None:
    old, new = folders
    model = replaceable_model(old)
    model.check_folder(new)
    model.load(read_checkpoint(new))
    assert torch.equal(logits(model), expected(new))
    assert not torch.equal(logits(model), expected(old))
    assert model.checkpoint == read_checkpoint(new)


def test_weights_in_chunks_after_they_were_given_up(folders: tuple[Path, Path]) -> None:
    old, new = folders
    model = replaceable_model(old)
    model.give_up()
    tensors = tensors_of(new)
    names = TensorNames(ModelConfig.from_hf(new))
    assert model.missing() == {names.own(name) for name in tensors} - {None}
    for name, tensor in tensors.items():
        assert model.complete == (model.missing() == set())
        model.write({name: tensor})
    assert model.complete
    model.check_all_named(tensors)
    assert model.checkpoint is None
    assert torch.equal(logits(model), expected(new))


@pytest.mark.parametrize("architecture", ["smollm2", "gemma3", "gemma3-vision"])
def test_a_state_dict_of_transformers_fits(tiny_checkpoint: Checkpoint, architecture: str) -> None:
    from transformers import AutoModelForCausalLM

    old, new = tiny_checkpoint(architecture), tiny_checkpoint(architecture, seed=1)
    state = AutoModelForCausalLM.from_pretrained(new, dtype=torch.bfloat16).state_dict()
    assert "lm_head.weight" in state
    model = replaceable_model(old)
    model.check_all_named(state)
    model.write(state)
    torch.testing.assert_close(logits(model), expected(new), rtol=0.1, atol=0.1)


def test_giving_up_frees_the_weights_and_a_folder_brings_them_back(pair: tuple[Path, Path]) -> None:
    model = replaceable_model(pair[0])
    before = logits(model)
    alive = weakref.ref(model.loaded)
    model.give_up()
    gc.collect()
    assert alive() is None
    with pytest.raises(RuntimeError, match="given up"):
        _ = model.loaded
    model.load(read_checkpoint(pair[0]))
    assert torch.equal(logits(model), before)


def _without(folder: Path, name: str) -> None:
    tensors = tensors_of(folder)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")


def _with_extra(folder: Path) -> None:
    save_file(tensors_of(folder) | {"model.extra": torch.zeros(1)}, folder / "model.safetensors")


def _misshapen(folder: Path) -> None:
    save_file(
        tensors_of(folder) | {"model.norm.weight": torch.zeros(3)}, folder / "model.safetensors"
    )


def _truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing tensor": (lambda f: _without(f, "model.norm.weight"), "lack model.norm.weight"),
    "extra tensor": (_with_extra, "unexpected tensor model.extra"),
    "shape": (_misshapen, r"shape \[3\]"),
    "truncated": (_truncated, "Cannot read the weight file"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "Cannot read the weight file"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "does not exist"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json"),
    "another size": (lambda f: edit_config(f, num_hidden_layers=3), "num_layers is 3"),
    "another norm": (lambda f: edit_config(f, rms_norm_eps=0.5), "rms_norm_eps is 0.5"),
    "another family": (
        lambda f: edit_config(f, architectures=["Gemma2ForCausalLM"]),
        "Gemma2ForCausalLM",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_folder_that_does_not_fit_is_refused_unread(pair: tuple[Path, Path], name: str) -> None:
    break_it, message = BREAKS[name]
    break_it(pair[1])
    model = replaceable_model(pair[0])
    with pytest.raises(ModelLoadError, match=message):
        model.check_folder(pair[1])
    assert torch.equal(logits(model), expected(pair[0]))


def test_other_defaults_of_generation_do_not_matter(pair: tuple[Path, Path]) -> None:
    edit_config(pair[1], eos_token_id=7, dtype="bfloat16")
    replaceable_model(pair[0]).check_folder(pair[1])


def _load_breaks_off(monkeypatch: pytest.MonkeyPatch, broken: set[Path]) -> None:
    """Folders in `broken` fail when half of their weights are written."""
    load_folder = replaceable.load_folder

    def load(slots: Any, folder: Path, names: Any) -> None:
        load_folder(slots, folder, names)
        if folder in broken:
            slots["model.norm.weight"].write(np.full(64, 7.0, np.float32))
            raise ModelLoadError("the disk is gone")

    monkeypatch.setattr(replaceable, "load_folder", load)


def test_a_load_that_breaks_off_puts_the_old_weights_back(pair, monkeypatch):
    model = replaceable_model(pair[0])
    _load_breaks_off(monkeypatch, {pair[1]})
    with pytest.raises(ModelLoadError, match="the disk is gone"):
        model.load(read_checkpoint(pair[1]))
    assert model.complete
    assert model.checkpoint == read_checkpoint(pair[0])
    assert torch.equal(logits(model), expected(pair[0]))


def test_a_folder_that_changes_while_it_is_loaded_is_not_taken(pair, monkeypatch):
    """Else the weights would be called by a digest that is not theirs."""
    model = replaceable_model(pair[0])
    checkpoint = model.check_folder(pair[1])
    load_folder = replaceable.load_folder

    def load(slots: Any, folder: Path, names: Any) -> None:
        load_folder(slots, folder, names)
        if folder == pair[1]:
            file = folder / "model.safetensors"
            file.write_bytes(file.read_bytes())

    monkeypatch.setattr(replaceable, "load_folder", load)
    with pytest.raises(ModelLoadError, match="were changed while they were read"):
        model.load(checkpoint)
    assert model.checkpoint == read_checkpoint(pair[0])
    assert torch.equal(logits(model), expected(pair[0]))


@pytest.mark.parametrize("old_is_gone_too", [False, True])
def test_without_a_way_back_the_weights_are_given_up(pair, monkeypatch, old_is_gone_too):
    model = replaceable_model(pair[0])
    if not old_is_gone_too:
        model.write({"model.norm.weight": torch.ones(64)})
    with monkeypatch.context() as patch:
        _load_breaks_off(patch, set(pair))
        with pytest.raises(ModelLoadError, match="the disk is gone"):
            model.load(read_checkpoint(pair[1]))
    assert not model.complete
    model.load(read_checkpoint(pair[1]))
    assert torch.equal(logits(model), expected(pair[1]))


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(3), torch.zeros(64, dtype=torch.int64), torch.empty(64, device="meta"), 3],
)
def test_a_wrong_tensor_leaves_its_whole_chunk_unwritten(pair, tensor):
    model = replaceable_model(pair[0])
    chunk = {"model.layers.0.input_layernorm.weight": torch.ones(64), "model.norm.weight": tensor}
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight"):
        model.write(chunk)
    assert torch.equal(logits(model), expected(pair[0]))
    assert model.checkpoint == read_checkpoint(pair[0])
