"""Dense weights in the place of blocks: refused, taken as they are, or quantized as those were."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prefixcache._core import Cpu
from prefixcache.config.model_config import ModelConfig
from prefixcache.exceptions import ModelLoadError
from prefixcache.models import replaceable
from prefixcache.models.checkpoint import read_checkpoint
from prefixcache.models.conversion import dequantize_folder, quantize_folder
from prefixcache.models.loader import load_model
from prefixcache.models.replaceable import ReplaceableModel
from prefixcache.runner.cpu.model import CpuModel
from support.paged_driver import CpuDriver

Checkpoint = Callable[..., Path]
UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"
QUANTIZED = ("Q8_0", "bfloat16")


class Folders:
    """Two sets of weights of one model: as blocks of Q8_0, and dense."""

    def __init__(self, tiny_checkpoint: Checkpoint, place: Path) -> None:
        self.dense = [tiny_checkpoint("qwen2", seed=seed) for seed in (0, 1)]
        self.blocks = [place / "blocks0", place / "blocks1"]
        for dense, blocks in zip(self.dense, self.blocks, strict=True):
            blocks.mkdir()
            quantize_folder(dense, blocks, "Q8_0")

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those of the second set, dense."""
        return load_file(self.dense[1] / "model.safetensors")


@pytest.fixture(scope="module")
def folders(tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tiny_checkpoint, tmp_path_factory.mktemp("requantize"))


def served(folder: Path, *, requantize: bool = False) -> ReplaceableModel:
    config = ModelConfig.from_hf(folder)
    make = partial(CpuModel, config, Cpu(1), "bfloat16", config.max_context_length)
    model = load_model(make, config, folder)
    return ReplaceableModel(model, make, read_checkpoint(folder), requantize=requantize)


def logits(model: ReplaceableModel) -> torch.Tensor:
    return CpuDriver(model.loaded).forward([(0, 0, [5, 9, 300, 7, 7, 21])])


def test_a_chunk_of_dense_numbers_is_refused_as_a_whole(folders: Folders) -> None:
    model = served(folders.blocks[0])
    assert model.info.formats == QUANTIZED
    before, tensors = logits(model), folders.tensors()
    with pytest.raises(ModelLoadError, match=rf"{UP} is quantized as Q8_0.*--requantize"):
        model.write({NORM: tensors[NORM], UP: tensors[UP]})
    assert torch.equal(logits(model), before)
    model.write({NORM: tensors[NORM]})
    assert not torch.equal(logits(model), before)


@pytest.mark.parametrize("gives_up", [False, True], ids=["in place", "after sleep"])
def test_chunks_become_the_blocks_that_conversion_makes(folders: Folders, gives_up: bool) -> None:
    model = served(folders.blocks[0], requantize=True)
    size = model.info.bytes
    if gives_up:
        model.give_up()
        assert model.info.bytes == 0
    for name, tensor in folders.tensors().items():
        model.write({name: tensor})
    assert model.complete
    assert (model.info.formats, model.info.bytes) == (QUANTIZED, size)
    assert torch.equal(logits(model), logits(served(folders.blocks[1])))


def test_numbers_that_cannot_be_quantized_change_nothing(folders: Folders) -> None:
    model = served(folders.blocks[0], requantize=True)
    before, tensors = logits(model), folders.tensors()
    tensors[UP][3, 3] = torch.nan
    with pytest.raises(ModelLoadError, match=f"{UP} holds NaN"):
        model.write({NORM: tensors[NORM], UP: tensors[UP]})
    assert torch.equal(logits(model), before)


def test_a_format_that_nothing_is_quantized_to_is_named(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaceable, "QUANTIZABLE", ("Q4_0", "Q4_1"))
    model = served(folders.blocks[0], requantize=True)
    problem = "is quantized as Q8_0, to which nothing can be quantized.*knows Q4_0, Q4_1"
    with pytest.raises(ModelLoadError, match=problem):
        model.write({UP: folders.tensors()[UP]})
    with pytest.raises(ModelLoadError, match=problem):
        model.check_folder(folders.dense[1])
    model.check_folder(folders.blocks[1])


def test_a_folder_is_taken_as_it_is_or_quantized(folders: Folders) -> None:
    model = served(folders.blocks[0])
    size = model.info.bytes
    model.check_folder(folders.dense[1])
    model.load(read_checkpoint(folders.dense[1]))
    assert model.info.formats == ("bfloat16",)
    assert model.info.bytes > 1.5 * size
    assert torch.equal(logits(model), logits(served(folders.dense[1])))
    model.load(read_checkpoint(folders.blocks[0]))
    assert (model.info.formats, model.info.bytes) == (QUANTIZED, size)

    model = served(folders.blocks[0], requantize=True)
    model.check_folder(folders.dense[1])
    model.load(read_checkpoint(folders.dense[1]))
    assert (model.info.formats, model.info.bytes) == (QUANTIZED, size)
    assert torch.equal(logits(model), logits(served(folders.blocks[1])))


def test_weights_that_were_given_up_come_back_as_blocks(folders: Folders, tmp_path: Path) -> None:
    model = served(folders.blocks[0])
    before, info = logits(model), model.info
    model.give_up()
    model.load(read_checkpoint(folders.blocks[0]))
    assert model.info == info
    assert torch.equal(logits(model), before)
    dequantize_folder(folders.blocks[0], tmp_path, "bfloat16")
    assert torch.equal(logits(served(tmp_path)), before)
