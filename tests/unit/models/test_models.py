"""Our layers against transformers' own, on tiny random checkpoints of each architecture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from prefixcache.config.engine_config import EngineConfig
from prefixcache.config.engine_parts.cache_config import CacheConfig
from prefixcache.config.engine_parts.scheduler_config import SchedulerConfig
from prefixcache.config.model_config import ExpertsConfig, ModelConfig
from prefixcache.config.rope_config import RopeConfig
from prefixcache.engine.build import build
from prefixcache.exceptions import UnsupportedModelError
from prefixcache.models.loader import choose_dtype
from prefixcache.models.names import TensorNames
from prefixcache.models.weights import NamedTensor, copy_into
from support.loaded import cpu_model
from support.loaded import torch_model as load
from support.paged_driver import CpuDriver, Driver, PagedDriver
from support.repeatable import long, slow
from support.tiny_models import ARCHITECTURES, WINDOWED, is_greedy, load_model, make_model

FORMS = ["torch", "cpu"]
TinyCheckpoint = Callable[..., Path]


def driver_of(form: str, folder: Path, **options: Any) -> Driver:
    """On torch, or on the CPU's kernels."""
    if form == "torch":
        return PagedDriver(load(folder), **options)
    return CpuDriver(cpu_model(folder), **options)


def prompt_of(length: int, vocab_size: int = 384, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()


def reference(folder: Path, tokens: list[int]) -> torch.Tensor:
    model = load_model(folder)
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES | WINDOWED)
@pytest.mark.parametrize("form", ["cpu", slow("torch")])
def test_logits_equal_those_of_transformers(tiny_checkpoint, architecture, form):
    folder = tiny_checkpoint(architecture, sharded=form == "torch")
    tokens = prompt_of(200)
    ours = driver_of(form, folder).forward([(0, 0, tokens)])
    torch.testing.assert_close(ours, reference(folder, tokens), atol=2e-4, rtol=1e-4)


CHUNKED = ["qwen3", "qwen3-window", "gemma3", "gemma4", "gemma4-large"]
CHUNKED += ["lfm2", "lfm2-bias", "qwen3.5", "granite4-h"]


@pytest.mark.parametrize("architecture", CHUNKED)
@pytest.mark.parametrize("form", FORMS)
def test_chunks_give_transformers_logits(
    tiny_checkpoint: TinyCheckpoint, architecture: str, form: str
) -> None:
    folder = tiny_checkpoint(architecture)
    tokens = prompt_of(200)
    ours = driver_of(form, folder)
    chunks = [ours.forward([(0, a, tokens[a : a + 70])]) for a in range(0, 200, 70)]
    near = {"atol": 2e-4, "rtol": 1e-4}
    torch.testing.assert_close(torch.cat(chunks), reference(folder, tokens), **near)


@pytest.mark.parametrize(
    "architecture", [one if one in CHUNKED else slow(one) for one in ARCHITECTURES | WINDOWED]
)
@pytest.mark.parametrize("form", ["cpu", long("torch")])
def test_64_greedy_tokens_equal_those_of_transformers(tiny_checkpoint, architecture, form):
    folder = tiny_checkpoint(architecture)
    prompt = prompt_of(21)
    answer = driver_of(form, folder).generate(prompt, 64)
    assert is_greedy(load_model(folder), prompt, answer)


@pytest.mark.parametrize("architecture", ["lfm2", "lfm2-bias", "qwen3.5", "granite4-h"])
@pytest.mark.parametrize("form", ["cpu", slow("torch")])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 16, 17, 18])
def test_a_convolution_sees_what_there_is_and_what_the_block_before_kept(
    tiny_checkpoint: TinyCheckpoint, architecture: str, form: str, length: int
) -> None:
    """Prompts as short as it, and those that end about a block's end; then tokens one by one."""
    folder = tiny_checkpoint(architecture)
    tokens = prompt_of(length + 4)
    driver = driver_of(form, folder)
    rows = [driver.forward([(0, 0, tokens[:length])])]
    rows += [driver.forward([(0, at, tokens[at : at + 1])]) for at in range(length, length + 4)]
    near = {"atol": 2e-4, "rtol": 1e-4}
    torch.testing.assert_close(torch.cat(rows), reference(folder, tokens), **near)


@pytest.mark.parametrize("form", FORMS)
def test_a_last_token_may_be_computed_again(tiny_checkpoint: TinyCheckpoint, form: str) -> None:
    """As where a grammar's mask is late, or a guess is refused."""
    folder = tiny_checkpoint("lfm2")
    tokens = prompt_of(40)
    driver = driver_of(form, folder)
    first = driver.forward([(0, 0, tokens[:20])])
    again = [driver.forward([(0, at - 1, tokens[at - 1 : at + 1])]) for at in range(20, 40)]
    rows = torch.cat([first[:19], *(pair[:1] for pair in again), again[-1][1:]])
    torch.testing.assert_close(rows, reference(folder, tokens), atol=2e-4, rtol=1e-4)


_BLOCK, _CHUNK = 16, 32


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [5, 16, 40, 100])
@pytest.mark.parametrize("architecture", ["mistral-window", "qwen2-window", "gemma3"])
def test_windows_shorter_than_a_block_longer_than_a_chunk_and_between(
    tiny_checkpoint: TinyCheckpoint, architecture: str, window: int, form: str
) -> None:
    folder = tiny_checkpoint(architecture, sliding_window=window)
    tokens = prompt_of(150)
    driver = driver_of(form, folder, block_size=_BLOCK)
    chunks = [
        driver.forward([(0, start, tokens[start : start + _CHUNK])])
        for start in range(0, len(tokens), _CHUNK)
    ]
    expected = reference(folder, tokens)
    torch.testing.assert_close(torch.cat(chunks), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [5, 40])
@pytest.mark.parametrize("architecture", ["mistral-window", "qwen2-window", "gemma3"])
def test_64_greedy_tokens_behind_windows_of_other_lengths(tiny_checkpoint, architecture, window):
    folder = tiny_checkpoint(architecture, sliding_window=window)
    prompt = prompt_of(21)
    answer = PagedDriver(load(folder)).generate(prompt, 64)
    assert is_greedy(load_model(folder), prompt, answer)


_GRANITE_PARTS = [
    {"embedding_scale": 1.0},
    {"attention_scale": None},
    {"residual_scale": 1.0},
    {"logits_divisor": 1.0},
    {"rms_norm_eps": 1e-6},
]
_PHI3_ROPE = RopeConfig(
    kind="longrope",
    factor=32.0,
    original_max_position=16,
    long_factor=(1.0, 1.5, 3.0, 8.0),
    partial_rotary_factor=0.5,
)
_PHI3_PARTS = [
    {"long_factor": (1.0, 1.1, 1.3, 2.0)},
    {"attention_factor": 1.0},
    {"long_factor": (1.0, 1.5, 3.0, 8.0) * 2, "partial_rotary_factor": 1.0},
]
_EXPERTS = ExpertsConfig(
    count=8, top_k=3, intermediate_size=32, renormalise=True, dense_layers=(1,)
)
_GEMMA2_PARTS = [
    {"attention_softcap": None},
    {"attention_scale": None},
    {"logits_softcap": None},
    {"layer_windows": (24, 24, 24, 24)},
]
_GEMMA3_PARTS = [
    {"norm_offset": 0.0},
    {"activation": "silu"},
    {"local_rope": None},
    {"rope": RopeConfig(theta=1e6)},
    {"embedding_scale": 1.0},
    {"attention_scale": None},
    {"layer_windows": (512, 512, 512, None)},
    {"layer_windows": (24, 24, 24, 24)},
    {"layer_windows": (23, 23, 23, None)},
]


_GEMMA4_ROPE = RopeConfig(theta=1e3, kind="proportional", partial_rotary_factor=0.25)
_GEMMA4_PARTS = [
    {"activation": "silu"},
    {"local_rope": None},
    {"rope": RopeConfig(theta=1e3)},
    {"rope": RopeConfig(theta=1e3, partial_rotary_factor=0.25)},
    {"rope": dataclasses.replace(_GEMMA4_ROPE, partial_rotary_factor=0.5)},
    {"embedding_scale": 1.0},
    {"attention_scale": None},
    {"value_norms": False},
    {"logits_softcap": None},
    {"layer_windows": (512, 512, None, 512, 512, None, None)},
]


@pytest.mark.parametrize(
    ("architecture", "left_out"),
    [
        *(("gemma2", part) for part in _GEMMA2_PARTS),
        *(("gemma3", part) for part in _GEMMA3_PARTS),
        *(("gemma4", part) for part in _GEMMA4_PARTS),
        ("gemma4-large", {"value_norms": False}),
        *(("granite", part) for part in _GRANITE_PARTS),
        *(("phi3", {"rope": dataclasses.replace(_PHI3_ROPE, **part)}) for part in _PHI3_PARTS),
        ("olmo3", {"local_rope": None}),
        ("olmo3", {"layer_windows": (24, 24, 24, 24)}),
        ("olmo3", {"layer_windows": ()}),
        ("qwen3-moe", {"experts": dataclasses.replace(_EXPERTS, renormalise=False)}),
        ("qwen3-moe", {"experts": dataclasses.replace(_EXPERTS, top_k=2)}),
        ("qwen3-next", {"norm_offset": 0.0}),
        ("qwen3-next", {"rope": RopeConfig()}),
        ("gpt-oss", {"activation": "silu"}),
        ("gpt-oss", {"layer_windows": (24, 24, 24, 24)}),
        ("granite4-nope", {"unrotated_layers": ()}),
        ("granite4-h", {"unrotated_layers": ()}),
        ("granite4-h", {"residual_scale": 1.0}),
        ("nemotron-h", {"unrotated_layers": ()}),
        ("ministral3", {"query_growth": 0.0}),
        ("smollm3", {"unrotated_layers": ()}),
        ("exaone4", {"unrotated_layers": ()}),
    ],
    ids=str,
)
def test_nothing_that_makes_a_family_can_be_left_out_unnoticed(
    tiny_checkpoint: TinyCheckpoint, architecture: str, left_out: dict[str, Any]
) -> None:
    folder = tiny_checkpoint(architecture)
    config = dataclasses.replace(ModelConfig.from_hf(folder), **left_out)
    model = load(folder, config=config)
    tokens = prompt_of(100)
    worst = (PagedDriver(model).forward([(0, 0, tokens)]) - reference(folder, tokens)).abs().max()
    assert worst > 0.05


def test_a_server_keeps_to_the_factors_of_its_longest_sequences(tiny_checkpoint):
    config = ModelConfig.from_hf(tiny_checkpoint("phi3"))
    short, long = config.for_length(16), config.for_length(17)
    assert long.rope == _PHI3_ROPE
    assert (short.rope.short_factor, short.rope.long_factor) == ((1.0, 1.1, 1.3, 2.0), ())
    engine = EngineConfig(
        model=str(tiny_checkpoint("phi3")), device="cpu", cache=CacheConfig(num_blocks=64)
    )
    roots = [
        build(dataclasses.replace(engine, scheduler=SchedulerConfig(max_model_len=longest)))
        .engine.control.prefix_hash_info()
        .root_hash
        for longest in (8, 16, 17, None)
    ]
    assert roots[0] == roots[1] != roots[2] == roots[3]


@pytest.mark.parametrize(
    ("architecture", "part", "without_it", "count"),
    [
        ("gpt-oss", "sinks", -100.0, 4),
        ("qwen2-moe", "shared_expert_gate.weight", 0.0, 2),
        ("qwen3-next", "shared_expert.down_proj.weight", 0.0, 2),
        ("granite-moe-shared", "shared_mlp.down_proj.weight", 0.0, 2),
        *(("granite4-h", f"mamba.{part}", 0.0, 2) for part in ("D", "dt_bias", "conv1d.bias")),
        ("granite4-h", "mamba.norm.weight", 1.0, 2),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_no_parameter_can_be_left_out_unnoticed(
    tiny_checkpoint: TinyCheckpoint,
    form: str,
    architecture: str,
    part: str,
    without_it: float,
    count: int,
) -> None:
    folder, tokens = tiny_checkpoint(architecture), prompt_of(100)
    driver = driver_of(form, folder)
    slots = [slot for name, slot in driver.model.slots.items() if name.endswith(part)]
    for slot in slots:
        slot.write(np.full(slot.shape, without_it, np.float32))
    worst = (driver.forward([(0, 0, tokens)]) - reference(folder, tokens)).abs().max()
    assert len(slots) == count
    assert worst > 0.05


# What a tensor is where a model leaves out what it is for.
_GEMMA4_WEIGHTS = {
    "layer_scalar": 1.0,
    "embed_tokens_per_layer.weight": 0.0,
    "per_layer_model_projection.weight": 0.0,
    "per_layer_projection_norm.weight": 1.0,
    "per_layer_input_gate.weight": 0.0,
    "post_per_layer_input_norm.weight": 1.0,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", _GEMMA4_WEIGHTS)
def test_own_inputs_and_scales_of_layers_cannot_be_left_out_unnoticed(tiny_checkpoint, form, part):
    folder, tokens = tiny_checkpoint("gemma4"), prompt_of(100)
    driver = driver_of(form, folder)
    names = [name for name in driver.model.slots if name.endswith(part)]
    for name in names:
        slot = driver.model.slots[name]
        slot.write(np.full(slot.shape, _GEMMA4_WEIGHTS[part], np.float32))
    worst = (driver.forward([(0, 0, tokens)]) - reference(folder, tokens)).abs().max()
    assert len(names) == (7 if "layers" in names[0] else 1)
    assert worst > 0.05


def test_a_layer_that_reads_the_keys_of_another_than_it_should_is_found(tiny_checkpoint):
    folder, tokens = tiny_checkpoint("gemma4"), prompt_of(100)
    driver = driver_of("cpu", folder)
    caches = driver._kernels.caches
    assert (caches[4], caches[5], caches[6]) == (caches[3], caches[2], caches[2])
    caches[4] = caches[0]  # of the same kind and block table
    worst = (driver.forward([(0, 0, tokens)]) - reference(folder, tokens)).abs().max()
    assert worst > 0.05


_GEMMA4_FILE = {
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
}


def test_a_file_of_gemma_4_means_what_transformers_makes_of_it() -> None:
    """Without its layers, whose last one has no window, and in the newer spelling of heads."""
    given: dict[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
    config = ModelConfig.from_hf(_GEMMA4_FILE | given)
    theirs = Gemma4TextConfig(**_GEMMA4_FILE | given)
    written = json.loads(theirs.to_json_string()) | {"architectures": ["Gemma4ForCausalLM"]}
    assert "per_layer_config" in written
    again = ModelConfig.from_hf(written)
    assert config == dataclasses.replace(
        again, eos_token_ids=(), bos_token_id=None, checkpoint_dtype=None
    )
    assert config.layer_windows == (*(512,) * 5, None, 512, None)
    assert [config.heads_of(window) for window in (512, None)] == [(4, 256), (2, 512)]
    assert config.rope_of(None) == RopeConfig(
        theta=1e6, kind="proportional", partial_rotary_factor=0.25
    )
    assert config.rope_of(512) == RopeConfig(theta=1e4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config that is not of full"),
        ({"per_layer_config": {"5": {"num_attention_heads": 8}}}, "per_layer_config that is not"),
        ({"per_layer_config": {"5": {"head_dim": 64}}}, "per_layer_config that is not of full"),
    ],
)
def test_what_gemma_4_does_not_run_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf(_GEMMA4_FILE | given)


def test_keys_of_layers_that_read_others_may_stand_in_a_checkpoint(tiny_checkpoint):
    """As they do in published ones."""
    names = TensorNames(ModelConfig.from_hf(tiny_checkpoint("gemma4-vision")))
    kept, unread = (f"model.language_model.layers.{i}.self_attn.k_proj.weight" for i in (3, 4))
    assert names.own(kept) == "model.layers.3.self_attn.k_proj.weight"
    senses = ("vision_tower.a", "embed_vision.a", "audio_tower.a", "embed_audio.a")
    assert [names.own(name) for name in (unread, *(f"model.{one}" for one in senses))] == [None] * 5


def test_embeddings_are_scaled_in_the_models_type(tiny_checkpoint: TinyCheckpoint) -> None:
    """Bit for bit as in transformers, with layers that add nothing and a norm that keeps scales."""
    folder = tiny_checkpoint("gemma3", hidden_size=96, rms_norm_eps=1e4, dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ours = load(folder, torch.bfloat16)
    with torch.inference_mode():
        for name, parameter in theirs.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        copied = theirs.state_dict().items()
        copy_into(ours.slots, [NamedTensor(*one, "update") for one in copied], ours.names)
        expected = theirs.model(torch.arange(3, 63)[None]).last_hidden_state[0]
    assert torch.equal(PagedDriver(ours).hidden([(0, 0, range(3, 63))]), expected)


@pytest.mark.parametrize("architecture", ["qwen2-yarn", "llama-llama3", "llama-linear"])
def test_positions_beyond_the_original_context_match(tiny_checkpoint, architecture):
    folder = tiny_checkpoint(architecture)
    tokens = prompt_of(500)
    ours = driver_of("cpu", folder, max_tokens=512).forward([(0, 0, tokens)])
    torch.testing.assert_close(ours, reference(folder, tokens), atol=5e-4, rtol=1e-3)


def test_chunks_and_mixed_batches_give_the_logits_of_one_prefill(tiny_checkpoint):
    model = load(tiny_checkpoint("qwen3"))
    first, second = prompt_of(70), prompt_of(40, seed=1)
    whole = PagedDriver(model).forward([(0, 0, first)])
    other = PagedDriver(model).forward([(0, 0, second)])

    driver = PagedDriver(model, num_sequences=2, block_size=8)
    driver.forward([(0, 0, first[:23])])
    mixed = driver.forward([(0, 23, first[23:69]), (1, 0, second[:39])])
    torch.testing.assert_close(mixed, torch.cat([whole[23:69], other[:39]]), atol=1e-4, rtol=1e-4)
    decoded = driver.forward([(1, 39, second[39:]), (0, 69, first[69:])])
    torch.testing.assert_close(decoded, torch.cat([other[39:], whole[69:]]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["smollm2", "granite", "gemma3"])
def test_bfloat16_stays_near_float32(tiny_checkpoint: TinyCheckpoint, architecture: str) -> None:
    folder = tiny_checkpoint(architecture, dtype=torch.bfloat16)
    tokens = prompt_of(100)
    model = load(folder, torch.bfloat16)
    logits = PagedDriver(model).forward([(0, 0, tokens)])
    exact = reference(folder, tokens)
    assert logits.dtype == torch.bfloat16
    assert (logits - exact).norm() / exact.norm() < 0.02


def test_weights_are_replaced_in_place_one_chunk_at_a_time(tiny_checkpoint):
    model = load(tiny_checkpoint("smollm2"))
    other = make_model("smollm2", seed=7)
    tokens = prompt_of(30)
    before = PagedDriver(model).forward([(0, 0, tokens)])
    for name, tensor in other.named_parameters():
        copy_into(model.slots, [NamedTensor(name, tensor.detach(), "update")], model.names)
    after = PagedDriver(model).forward([(0, 0, tokens)])
    with torch.inference_mode():
        expected = other(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(after, expected, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(before, after, atol=0.1)


def test_a_scaled_norm_takes_a_tensor_of_torch(tiny_checkpoint: TinyCheckpoint) -> None:
    """As an update on a GPU gives it; what a folder holds is numpy's."""
    model = load(tiny_checkpoint("gemma4-large"))
    name = "model.layers.0.router.scale"
    given = NamedTensor(name, torch.full(model.slots[name].shape, 2.0), "update")
    assert copy_into(model.slots, [given], model.names) == {name}


@pytest.mark.parametrize(
    ("asked", "checkpoint", "fast", "expected"),
    [
        ("float32", "bfloat16", True, "float32"),
        ("bfloat16", "float32", False, "bfloat16"),
        ("auto", "float32", True, "float32"),
        ("auto", None, True, "float32"),
        ("auto", "float16", True, "bfloat16"),
        ("auto", "bfloat16", False, "float32"),
    ],
)
def test_auto_takes_bfloat16_only_where_the_processor_multiplies_it(
    asked: str, checkpoint: str | None, fast: bool, expected: str
) -> None:
    assert choose_dtype(asked, checkpoint, multiplies_bfloat16=fast) == expected
