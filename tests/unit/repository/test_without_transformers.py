"""Serving needs neither torch nor transformers; what does need it names the extra that installs it.

Engines and servers may live in different processes; torch takes seconds to import. Nor is there
need of what traces are sent by, where none are.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from prefixcache.exceptions import ModelLoadError
from prefixcache.text.chat.response_template import ResponseTemplate
from prefixcache.text.tokenization.tokenizer import Tokenizer
from support.tiny_models import edit_config, make_checkpoint

_ANSWERS = """
import sys
sys.modules["transformers"] = None
import prefixcache
assert dir(prefixcache) == sorted(prefixcache.__all__)
import prefixcache.cli.main, prefixcache.server.app, prefixcache.server.serve
from prefixcache import LLM, SamplingParams
llm = LLM(model=sys.argv[1], device="cpu", num_blocks=16)
(answer,) = llm.chat([{"role": "user", "content": "A block"}], SamplingParams(max_tokens=2))
assert answer.outputs[0].token_ids
unneeded = {"torch", "opentelemetry.sdk", "grpc"} & sys.modules.keys()
assert not unneeded, unneeded
"""


def test_a_chat_is_answered_without_torch_and_transformers(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    left_open = {"head_dim", "rms_norm_eps", "attention_bias", "rope_parameters"}
    assert left_open <= json.loads((folder / "config.json").read_text()).keys()
    edit_config(folder, **dict.fromkeys(left_open))
    done = subprocess.run(
        [sys.executable, "-c", _ANSWERS, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "transformers.utils.chat_parsing"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("no_transformers")
def test_files_of_another_tokenizer_name_the_extra(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"tokenizer.json.*pip install .\.\[transformers\]"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.usefixtures("no_transformers")
def test_a_response_template_names_the_extra() -> None:
    with pytest.raises(ModelLoadError, match=r"response_template.*pip install .\.\[transformers\]"):
        ResponseTemplate({})
