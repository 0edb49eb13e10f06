"""The command line: flags, errors in one line, and a quick help."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from prefixcache.cli import app, parse_size
from prefixcache.exceptions import ConfigError


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 * 2**30),
        ("2gib", 2 * 2**30),
        ("2G", 2 * 2**30),
        ("2GB", 2_000_000_000),
        ("1.5 MiB", 3 * 2**19),
        ("64k", 65536),
        ("1T", 2**40),
        ("1048576", 1048576),
        ("100B", 100),
        (None, None),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "2 Gigs", "1e9", "2iB", "nan", "0x10"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        parse_size(text)


def test_version_is_shown():
    result = _run("--version")
    assert result.exit_code == 0
    assert result.output.startswith("prefixcache ")


@pytest.mark.parametrize("command", ["serve", "generate", "download", "bench"])
def test_every_command_has_help(command):
    result = _run(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


@pytest.mark.parametrize("command", ["serve", "generate", "bench"])
def test_no_option_is_cut_at_80_columns(command):
    help_text = CliRunner(env={"COLUMNS": "80"}).invoke(app, [command, "--help"]).output
    assert all(len(line) <= 80 for line in help_text.splitlines())
    options = _options(command)
    assert len(options) > 10
    assert [name for name in options if name not in help_text] == []


def _options(command: str) -> list[str]:
    params = typer.main.get_command(app).commands[command].params
    return [
        name for param in params for name in (*param.opts, *param.secondary_opts) if "-" in name
    ]


def test_options_of_serve_stand_in_groups():
    help_text = _run("serve", "--help").output
    headings = re.findall(r"^(\w+):$", help_text, re.MULTILINE)
    assert headings == ["Arguments", "Server", "Access", "Model", "Scheduling", "Cache", "Options"]
    assert help_text.split("Options:")[1].split() == [
        "-h,",
        "--help",
        "Show",
        "this",
        "message",
        "and",
        "exit.",
    ]


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from prefixcache.cli import app\n"
        "app(['serve', '--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'numpy', 'matplotlib'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serve", "--log-level", "loud"], "--log-level"),
        (["serve", "--scheduling-policy", "random"], "--scheduling-policy"),
        (["serve", "--kv-cache-memory", "much"], "kv_cache_memory"),
        (["serve", "--host", "256.0.0.1"], "256.0.0.1"),
        (["serve", "--api-key", ""], "API key"),
        (["serve", "--api-key", "a", "--admin-api-key", "a"], "--admin-api-key"),
        (["serve", "--allowed-hosts", "a:80"], "--allowed-hosts"),
        (["serve", "--allowed-model-dirs", "./nowhere"], "--allowed-model-dirs"),
        (["serve", "--port", "0", "--block-size", "24"], "block_size"),
        (["serve", "--port", "0", "--dtype", "int4"], "dtype"),
        (["serve", "--port", "0", "--model", "./nowhere"], "nowhere"),
        (["generate", "x", "--model", "./nowhere"], "nowhere"),
        (["generate", "x", "--log-level", "loud"], "--log-level"),
        (["download", "./nowhere"], "nowhere"),
    ],
)
def test_wrong_flags_are_one_line_and_status_1(arguments, told):
    result = _run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["PREFIXCACHE_API_KEY", "PREFIXCACHE_ADMIN_API_KEY"])
@pytest.mark.parametrize("value", ["", "  \n"])
def test_an_empty_key_in_the_environment_starts_no_open_server(name, value):
    result = CliRunner(env={name: value}).invoke(app, ["serve", "./nowhere", "--port", "0"])
    assert result.exit_code == 1
    assert f"{name} is set but empty" in result.stderr


def test_clients_set_no_priorities_unless_the_operator_says_so(monkeypatch):
    options = []
    monkeypatch.setattr("prefixcache.server.serve.serve", lambda _, given: options.append(given))
    for arguments in ([], ["--scheduling-policy", "priority"]):
        assert _run("serve", *arguments).exit_code == 0
    assert [given.priorities for given in options] == [False, True]


def test_a_port_out_of_range_is_a_usage_error():
    assert _run("serve", "--port", "65536").exit_code == 2


@pytest.fixture
def generate(tiny_checkpoint: Callable[..., Path]) -> Callable[..., Result]:
    folder = tiny_checkpoint()

    def run(*arguments: str) -> Result:
        common = ["--model", str(folder), "--dtype", "float32", "--device", "cpu"]
        return _run("generate", "hello", *common, "--max-tokens", "9", *arguments)

    return run


def test_generate_repeats_itself_under_a_seed(generate):
    options = ["--seed", "3", "--temperature", "1.5"]
    first, second = generate(*options), generate(*options)
    assert first.exit_code == 0
    assert first.output == second.output != generate("--seed", "4", "--temperature", "1.5").output


def test_generate_goes_on_with_the_text_unless_it_is_told_to_chat(generate):
    options: list[Any] = ["--temperature", "0"]
    texts = {generate(*options, *kind).output for kind in ([], ["--chat"], ["--system", "Hi"])}
    assert len(texts) == 3
    system = ["--system", "Hi"]
    assert generate(*options, *system, "--chat").output == generate(*options, *system).output


@pytest.mark.parametrize("option", [["--temperature", "-1"], ["--top-p", "2"], ["--stop", ""]])
def test_generate_names_a_wrong_option(generate, option):
    result = generate(*option)
    assert result.exit_code == 1
    assert option[0].strip("-").replace("-", "_") in result.stderr


def test_download_tells_the_folder(tiny_checkpoint):
    folder = tiny_checkpoint()
    assert _run("download", str(folder)).output.strip() == str(folder)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_deep_nesting_in_a_model_is_an_error_in_one_line(tiny_checkpoint, tmp_path, file):
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint(), folder)
    (folder / file).write_text("[" * 100_000)
    result = _run("generate", "hello", "--model", str(folder))
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    assert file in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["x" * 300, "~nobody-on-this-machine"])
def test_serving_what_is_no_path_is_an_error_in_one_line(name):
    result = _run("serve", name, "--port", "0")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    assert "There is no model" in result.stderr


def test_the_server_needs_no_torch():
    """Engines and servers may live in different processes; torch takes seconds to import."""
    code = (
        "import sys\n"
        "import prefixcache.server.app, prefixcache.server.serve\n"
        "sys.exit(', '.join({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, b"")
