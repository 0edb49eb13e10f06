"""The command line: flags, errors in one line, and a quick help."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from prefixcache.cli.command_line import Given
from prefixcache.cli.main import app
from prefixcache.config.checked import Checked, adapter, check, hints
from prefixcache.config.engine_config import EngineConfig
from prefixcache.config.engine_parts.cache_config import CacheConfig
from prefixcache.exceptions import FieldError
from prefixcache.server.options.serve_options import ServeOptions
from prefixcache.tools.replay.replay_options import ReplayOptions


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[EngineConfig, ServeOptions]]:
    """What `serve` would start with, for arguments, variables and the file given."""

    def run(*arguments: str, env: Mapping[str, str] | None = None) -> Any:
        seen: list[Any] = []
        monkeypatch.setattr("prefixcache.server.serve.serve", lambda *given: seen.append(given))
        result = CliRunner(env=env).invoke(app, ["serve", *arguments])
        assert result.exit_code == 0, result.stderr
        return seen[0]

    return run


def test_version_is_shown():
    result = _run("--version")
    assert result.exit_code == 0
    assert result.output.startswith("prefixcache ")


@pytest.mark.parametrize("command", sorted(app.commands))
def test_every_command_has_help(command):
    result = _run(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output
    assert result.output.count("rguments:") <= 1, "arguments are listed once"


def test_explain_tells_how_a_server_is_named():
    result = _run("explain", "http://127.0.0.1:8000")
    assert result.exit_code == 2
    assert "--url http://127.0.0.1:8000" in result.stderr


@pytest.mark.parametrize(
    ("command", "asked"),
    [("serve", "all"), ("generate", "all"), ("bench", "all"), ("replay", ""), ("verify", "")],
)
def test_no_option_is_cut_at_80_columns(command, asked):
    arguments = [command, "--help", *filter(None, [asked])]
    help_text = CliRunner(env={"COLUMNS": "80"}).invoke(app, arguments).output
    assert all(len(line) <= 80 for line in help_text.splitlines())
    options = _options(command)
    assert len(options) > 10
    assert [name for name in options if name not in help_text] == []


def _options(command: str) -> list[str]:
    params = app.commands[command].params
    return [
        name
        for param in params
        if not getattr(param, "hidden", False)
        for name in (*param.opts, *param.secondary_opts)
        if "-" in name
    ]


def _sections(help_text: str) -> dict[str, list[str]]:
    """The first name of each option, by the headings above them."""
    parts = re.split(r"^(\w+):$", help_text, flags=re.MULTILINE)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return {name: re.findall(r"^  (-[\w-]+)", part, re.MULTILINE) for name, part in pairs}


GROUPS = ["Model", "Server", "Access", "TLS", "Scheduling", "Cache"]


def test_options_of_serve_stand_in_groups():
    sections = _sections(_run("serve", "--help", "all").output)
    assert list(sections) == [*GROUPS, "Options", "Examples"]
    assert sections["Options"] == ["--config", "-h"]
    assert sections["Model"][0] == "--model"


def test_help_shows_what_people_use_and_names_the_groups():
    text = _run("serve", "--help").output
    shown = [name for names in _sections(text).values() for name in names]
    assert shown[0] == "--model"
    assert {"--port", "--api-key", "--kv-cache-memory", "--max-num-seqs"} < set(shown)
    assert 10 <= len(shown) <= 18
    everything = sum(map(len, _sections(_run("serve", "--help", "all").output).values()))
    end = re.search(r"All (\d+) options: --help all.*", text, re.DOTALL)
    assert len(shown) < int(end[1]) <= everything
    assert all(name.lower() in end[0] for name in GROUPS)


def test_help_of_a_group_shows_all_of_it():
    whole = _sections(_run("serve", "--help", "all").output)
    for name in GROUPS:
        of_group = _sections(_run("serve", "-h", name.lower()).output)
        assert of_group == {name: whole[name], "Options": whole["Options"], "Examples": []}


def test_help_of_no_group_is_wrong_usage():
    result = _run("serve", "--help", "caches")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --help takes all, model,")
    assert len(result.stderr.splitlines()) == 1


def test_help_is_as_wide_as_the_terminal_up_to_100():
    def width(columns: str) -> int:
        command = [sys.executable, "-m", "prefixcache", "serve", "--help"]
        env = os.environ | {"COLUMNS": columns}
        text = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
        return max(map(len, text.splitlines()))

    assert width("80") <= 80 < width("100") <= 100
    assert width("200") == width("100")


def test_summaries_of_commands_are_whole_and_statuses_are_said():
    for group in (["cache"], ["bench"], []):
        text = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*group, "--help"]).output
        summaries = re.findall(r"^  \w.*", text.split("Commands:")[1], re.MULTILINE)
        assert not any(line.endswith("...") for line in summaries), summaries
    assert "0 done, 1 failed, 2 wrong usage" in text
    assert _run().exit_code == 0
    assert _run().output == _run("--help").output


_EXAMPLES = [
    pytest.param(command, line, id=line)
    for group in [app, app.commands["bench"], app.commands["cache"]]
    for command in group.commands.values()
    for line in command.examples
]


@pytest.mark.parametrize(("command", "line"), _EXAMPLES)
def test_an_example_of_the_help_can_be_given(monkeypatch, command, line):
    seen: list[Given] = []
    monkeypatch.setattr(command, "_run", seen.append)
    words = [word for word in shlex.split(line) if "=" not in word]
    assert words[0] == "prefixcache"
    result = _run(*words[1:])
    assert result.exit_code == 0, result.stderr
    (given,) = seen
    options = {"replay": ReplayOptions, "serve": ServeOptions}
    if kind := options.get(command.name):
        given.make(kind)


def test_every_command_has_an_example():
    assert [name for name, command in app.commands.items() if not command.examples] == []


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from prefixcache.cli.main import app\n"
        "app(['serve', '--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'starlette', 'uvicorn', 'numpy', 'matplotlib', "
        "'pydantic', 'rich', 'yaml'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, b"")


def test_a_server_imports_nothing_that_it_may_never_need():
    code = (
        "import sys, prefixcache.cli.main, prefixcache.engine.build, prefixcache.server.app\n"
        "import prefixcache.server.serve\n"
        "rare = {'torch', 'transformers', 'gguf', 'huggingface_hub', 'llguidance', 'httpx',"
        " 'opentelemetry', 'rich', 'tqdm', 'yaml', 'zmq'}\n"
        "sys.exit(', '.join(rare & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, b"")


def of_checked(kind: type[Checked]) -> Iterator[type[Checked]]:
    for below in kind.__subclasses__():
        yield from (below, *of_checked(below))


@pytest.mark.parametrize("kind", sorted(set(of_checked(Checked)), key=str))
def test_a_default_passes_the_check_that_it_is_spared(kind):
    for field in fields(kind):
        if field.default is not MISSING:
            checker = adapter(hints(kind)[field.name])
            assert check(checker, field.name, field.default) == field.default


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--log-level", "loud"], "--log-level must be 'debug', 'info', 'warning' or"),
        (["serve", "--scheduling-policy", "random"], "--scheduling-policy must be 'fcfs', 'prio"),
        (["serve", "--max-queue-delay", "-1"], "--max-queue-delay must be greater than or equal"),
        (["serve", "--kv-cache-memory", "much"], "--kv-cache-memory must be bytes, a size as"),
        (["serve", "--kv-cache-memory", "2GiB", "--num-blocks", "9"], "give one, not both"),
        (["serve", "--port", "65536"], "--port must be less than or equal to 65535, got '65536'"),
        (["serve", "--port", "true"], "--port must be a valid integer"),
        (["serve", "--drain-seconds", "-1"], "--drain-seconds"),
        (["serve", "--max-step-ms", "nan"], "--max-step-ms must be a finite number"),
        (["serve", "--max-num-seqs", "9" * 5000], "--max-num-seqs"),
        (
            ["serve", "--max-num-seqs", "9", "--max-num-batched-tokens", "8"],
            "--max-num-batched-tokens must be at least --max-num-seqs (9), got 8",
        ),
        (["serve", "--attention", "best"], "--attention must be 'auto', 'torch'"),
        (["serve", "--api-key", ""], "API key"),
        (["serve", "--api-key", "a", "--admin-api-key", "a"], "--admin-api-key"),
        (["serve", "--allowed-hosts", "a:80"], "--allowed-hosts"),
        (["serve", "--allowed-model-dirs", "./nowhere"], "--allowed-model-dirs"),
        (["serve", "--port", "0", "--block-size", "24"], "--block-size must be a power of two"),
        (["serve", "--port", "0", "--dtype", "int4"], "--dtype must be 'auto'"),
        (["serve", "-tp", "2"], "-size asks for more than one device; only 1 is supported"),
        (["serve", "--enable-lora"], "--enable-lora asks for LoRA"),
        (["serve", "--max_model_len", "x"], "--max-model-len must be a number of tokens"),
        (["serve", "--max_nothing", "1"], "--max_nothing is not a flag of this command"),
        (["serve", "--cpu-offload-gb", "4"], "--cpu-offload-gb asks for weights in another place"),
        (["serve", "--no-enable-chunked-prefill"], "--no-enable-chunked-prefill asks for whole"),
        (
            ["serve", "--structured-outputs-config.backend", "outlines"],
            "engine of structured output; only auto, guidance are supported, got 'outlines'",
        ),
        (
            ["serve", "--structured-outputs-config", '{"backend": "xgrammar"}'],
            "--structured-outputs-config.backend asks for another engine",
        ),
        (["serve", "--structured_outputs_config.end", "1"], "has no key 'end'; did you mean back"),
        (["serve", "--structured-outputs-config", "[]"], "must be a JSON object, got []."),
        (
            ["serve", "--kv-events-config", "{}", "--kv-events-config.hwm=1"],
            "--kv-events-config is given whole and in parts",
        ),
        (
            ["serve", "--speculative-config", '{"method":"suffix"}', "-sc.method=ngram"],
            "--speculative-config is given whole and in parts",
        ),
        (["serve", "--kv-events-config.hwm"], "its hwm must be a valid integer, got ''"),
        (["serve", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype must be 'auto', 'bfloat16', 'f"),
        (["serve", "--quantization", "awq"], "--quantization must be 'auto', 'none' or 'gguf'"),
        (["serve", "--quantization", "fp8", "--model", "./x"], "--quantization must be 'auto'"),
        (["generate", "x", "--log-level", "loud"], "--log-level"),
        (["generate", "x", "--model", "./nowhere", "--top-p", "2"], "--top-p must be"),
        (["bench", "--repeats", "0"], "--repeats"),
        (["bench", "--trace", "./nowhere"], "--trace cannot read nowhere: there is no such file."),
        (["bench", "compare", "./nowhere", "b"], "A cannot read nowhere: there is no such file."),
        (["replay", "./nowhere"], "TRACE cannot read nowhere: there is no such file."),
        (["explain", "./nowhere"], "BODY cannot be read"),
        (["explain", "body.nowhere"], "BODY cannot be read"),
        (["cache", "ls", "./nowhere"], "FOLDER nowhere cannot be used: No such file"),
        (
            ["serve", "--kv-events-config", '{"enable_kv_cache_events": true, "hwm": 0}'],
            "--kv-events-config is wrong: its hwm must be greater than or equal to 1, got 0, got",
        ),
        (["convert"], "--quantize or --dequantize is needed"),
        (["serve", "--port", "abc"], "--port must be a valid integer, got 'abc'."),
        (
            ["serve", "-sc", '{"method": "eagle3", "model": "x"}'],
            "--speculative-config must be JSON with method ngram or suffix",
        ),
        (["serve", "--nothing"], "--nothing is not a flag of this command"),
        (["srve"], "No such command 'srve'. (Did you mean"),
        (["verify"], "Missing argument"),
        (["download", ""], "MODEL"),
    ],
)
def test_wrong_flags_are_one_line_and_status_2(arguments, message, monkeypatch):
    # `engine.build` imports the function of the hub, and would keep the replaced one.
    for starts in ("engine.build.build", "models.hub.resolve_model"):
        monkeypatch.setattr(f"prefixcache.{starts}", lambda *_: pytest.fail("it starts"))
    result = _run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_all_that_is_wrong_is_said_at_once(monkeypatch):
    monkeypatch.setenv("PREFIXCACHE_DTYPE", "int4")
    line = "m.gguf --quux 3 -tp 2 --max-num-seq=4 --port abc --enable-lora"
    result = _run("serve", *line.split())
    lines = [line.partition(" ")[2] for line in result.stderr.splitlines()]
    assert result.exit_code == 2
    assert lines[:2] == [
        "--quux is not a flag of this command.",
        "--max-num-seq is not a flag of this command; did you mean --max-num-seqs?",
    ]
    names = {"--enable-lora", "--tensor-parallel-size", "PREFIXCACHE_DTYPE", "--port"}
    assert {line.split()[0] for line in lines[2:]} == names
    monkeypatch.delenv("PREFIXCACHE_DTYPE")
    together = "--block-size 24 --num-blocks 9 --kv-cache-memory 1GiB --max-num-seqs 9"
    more = "--max-num-batched-tokens 8 --uds-permissions 9"
    result = _run("serve", *together.split(), *more.split())
    names = ["--block-size", "--kv-cache-memory", "--max-num-batched-tokens", "--uds-permissions"]
    assert [line.split()[1] for line in result.stderr.splitlines()] == names
    assert "No such option '--nothing'" in _run("verify", "--nothing", "http://a").stderr


def test_a_command_line_of_vllm_starts_here(served):
    line = (
        "m.gguf --tensor-parallel-size 1 -pp 1 --trust-remote-code --disable-log-requests "
        "--gpu-memory-utilization 0.85 --enforce-eager --max-model-len 4096 --quantization gguf "
        "--swap-space 4 --uvicorn-log-level warning --no-enable-log-requests --dtype auto "
        "--distributed-executor-backend mp --enable-prefix-caching --shutdown-timeout 3 "
        "--load-format gguf "
        "--served-model-name small other * --api-key secret"
    )
    speculation = ["-sc", '{"method": "ngram", "num_speculative_tokens": 3}']
    config, options = served(*line.split(), *speculation)
    assert (config.speculation.source, config.speculation.most) == ("prompt", 3)
    assert (config.model, config.enforce_eager) == ("m.gguf", True)
    assert config.cache.gpu_memory_utilization == 0.85
    assert options.served_model_name == ("small", "other", "*")
    assert (options.api_key, options.drain_seconds) == (("secret",), 3)


@pytest.mark.parametrize(
    ("vllm_form", "plain_form"),
    [
        ("--max_model_len 2048 --max_num_seqs=4", "--max-model-len 2048 --max-num-seqs 4"),
        ("--no_enforce_eager --served_model_name a b", "--served-model-name a b"),
        (
            "--kv_events_config.enable_kv_cache_events=true --kv-events-config.hwm 7",
            '--kv-events-config {"enable_kv_cache_events":true,"hwm":7}',
        ),
        (
            "--kv-events-config.enable_kv_cache_events=True",
            '-O3 --kv-events-config {"enable_kv_cache_events":true}',
        ),
        (
            "--speculative-config.method ngram --speculative-config.num_speculative_tokens 3",
            '-sc {"method":"ngram","num_speculative_tokens":3}',
        ),
        (
            "-sc.method ngram --speculative-config.num_speculative_tokens 3",
            '-sc {"method":"ngram","num_speculative_tokens":3}',
        ),
        ("-sc.method suffix", '--speculative-config {"method":"suffix"}'),
        (
            "--default-chat-template-kwargs.a.b 1 --default-chat-template-kwargs.a.c x=y",
            '--default-chat-template-kwargs {"a":{"b":1,"c":"x=y"}}',
        ),
        ("--limit-mm-per-prompt.image 2 -O.mode=3 -cc.mode 3 --no-enable-lora", "-O 3"),
        (
            "--structured-outputs-config.backend guidance --kv-offloading-backend native",
            '--structured-outputs-config {"backend":"auto","disable_any_whitespace":false}',
        ),
        ("-- ./a_model", "./a_model"),
    ],
)
def test_forms_of_vllms_command_lines(served, vllm_form, plain_form):
    assert served(*vllm_form.split()) == served(*plain_form.split())


def test_every_option_of_vllm_is_taken_or_refused_by_name():
    text = (Path(__file__).parents[2] / "data/vllm_options.txt").read_text()
    named = {name for line in text.splitlines() if line[0] != "#" for name in line.split()}
    options = [{*param.opts, *param.secondary_opts} for param in app.commands["serve"].params]
    assert named <= set().union(*options)
    assert sum(map(len, options)) == len(set().union(*options)), "an option stands twice"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--host", "256.0.0.1"], "--host takes an address of this machine."),
        (["explain", "--url", "http://127.0.0.1:9"], "Is it running? --url names another."),
        (["serve", "--port", "0", "--model", "./nowhere"], "nowhere"),
        (["generate", "x", "--model", "./nowhere"], "nowhere"),
        (["download", "./nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_started_is_one_line_and_status_1(arguments, message):
    result = _run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["--quantization", "--load-format"])
def test_weights_of_another_form_than_said_are_refused(tiny_checkpoint, name):
    result = _run("serve", "--port", "0", "--model", str(tiny_checkpoint()), name, "gguf")
    assert result.exit_code == 2
    assert f"error: {name} gguf: the model's weights are safetensors" in result.stderr


@pytest.mark.parametrize("name", ["--chat-template", "--chat-template-file"])
def test_a_chat_template_that_is_not_there_ends_the_start(name):
    result = _run("serve", "--port", "0", "--model", "./nowhere", name, "./none.jinja")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: --chat-template cannot read './none.jinja': No such file or directory.\n"
    )


def test_an_unknown_option_is_reported_with_the_one_that_was_meant():
    result = _run("serve", "--max-num-seq", "3")
    assert result.exit_code == 2
    assert "--max-num-seqs" in result.stderr


@pytest.mark.parametrize(
    "name", ["PREFIXCACHE_API_KEY", "PREFIXCACHE_ADMIN_API_KEY", "VLLM_API_KEY"]
)
@pytest.mark.parametrize("value", ["", "  \n"])
def test_an_empty_key_in_the_environment_starts_no_open_server(name, value):
    result = CliRunner(env={name: value}).invoke(app, ["serve", "./nowhere", "--port", "0"])
    assert result.exit_code == 2
    assert f"{name} is set but empty" in result.stderr


def test_a_flag_goes_before_its_variable_and_that_before_the_file(served, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("port: 1\nmax_num_seqs: 1\nblock-size: 8\nserved_model_name: [a, b c]\n")
    arguments = ["--config", str(file), "--port", "3"]
    env = {"PREFIXCACHE_PORT": "2", "PREFIXCACHE_MAX_NUM_SEQS": "2"}
    config, options = served(*arguments, env=env)
    assert (options.port, config.scheduler.max_num_seqs, config.cache.block_size) == (3, 2, 8)
    assert options.served_model_name == ("a", "b c")
    assert served(env={"PREFIXCACHE_CONFIG": str(file)})[1].port == 1
    assert served()[1] == ServeOptions()
    assert served()[0] == EngineConfig()


def test_every_source_takes_every_kind_of_value(served, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text(
        "model: a\napi_key: one\nallowed_model_dirs: [x, y]\nenforce_eager: true\n"
        "kv_cache_memory_bytes: 0.5\nmax_step_ms: 7\nbatch_invariant: false\nrevision: null\n"
        "scheduling_policy: priority\nseed: 3\n"
        "default_chat_template_kwargs: {enable_thinking: false}\n"
    )
    from_file = served("--config", str(file))
    given = {
        "model": "a",
        "api_key": "one",
        "allowed_model_dirs": "x y",
        "enforce_eager": "true",
        "kv_cache_memory": "0.5",
        "max_step_ms": "7",
        "batch_invariant": "off",
        "scheduling_policy": "priority",
        "seed": "3",
        "default_chat_template_kwargs": '{"enable_thinking": false}',
    }
    variables = {f"PREFIXCACHE_{name.upper()}": text for name, text in given.items()}
    flags = ["a", "--api-key=one", "--allowed-model-dirs=x", "--allowed-model-dirs=y"]
    more = ["--enforce-eager", "--kv-cache-memory=0.5", "--max-step-ms=7", "--no-batch-invariant"]
    last = ["--scheduling-policy=priority", "--seed=3", "--default-chat-template-kwargs"]
    last.append('{"enable_thinking": false}')
    assert from_file == served(env=variables) == served(*flags, *more, *last)
    config, options = from_file
    assert config == EngineConfig.from_flags(
        model="a",
        enforce_eager=True,
        kv_cache_memory=0.5,
        max_step_ms=7,
        batch_invariant=False,
        scheduling_policy="priority",
        seed=3,
    )
    assert options == ServeOptions(
        api_key=("one",),
        allowed_model_dirs=(Path("x"), Path("y")),
        default_chat_template_kwargs={"enable_thinking": False},
    )


def test_a_switch_in_the_file_can_be_switched_off_again(served, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("public_metrics: true\nenable_prefix_caching: false\n")
    flags = ["--no-public-metrics", "--enable-prefix-caching"]
    config, options = served("--config", str(file), *flags)
    assert (options.public_metrics, config.cache.enable_prefix_caching) == (False, True)


def test_a_flag_that_the_model_shows_to_be_wrong_is_named_as_it_was_said(monkeypatch):
    def serve(*_: object) -> None:
        raise FieldError("kv_cache_max_memory", "must be at most 5.")

    monkeypatch.setattr("prefixcache.server.serve.serve", serve)
    result = _run("serve")
    assert result.exit_code == 2
    assert result.stderr == "error: --kv-cache-max-memory must be at most 5.\n"
    env = {"PREFIXCACHE_KV_CACHE_MAX_MEMORY": "7"}
    result = CliRunner(env=env).invoke(app, ["serve"])
    assert result.stderr.startswith("error: PREFIXCACHE_KV_CACHE_MAX_MEMORY must")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "max_num_seq: 3",
            "'max_num_seq' in {} is not a flag of this command; did you mean max_num_seqs?\n",
        ),
        ("7: 3", "7 in {} is not a flag of this command."),
        ("max_num_seqs: many", "max_num_seqs in {} must be a valid integer"),
        ("max_num_seqs: true", "max_num_seqs in {} must be a valid integer"),
        ("max-num-seqs: 4.0", "max-num-seqs in {} must be a valid integer"),
        ("max_num_seqs: [1]", "max_num_seqs in {} must be a valid integer"),
        ("max_step_ms: .inf", "max_step_ms in {} must be a finite number"),
        ("model: 5", "model in {} must be a valid string"),
        ("model: {a: b}", "model in {} must be a valid string"),
        ("enforce_eager: 1", "enforce_eager in {} must be a valid boolean"),
        ("kv_cache_memory: 1.5", "kv_cache_memory in {} must be bytes, a size as"),
        ("- port", "--config takes flags and their values; {} holds none."),
        ("port: [", "--config takes a YAML file; {} is none (line 1)."),
        ("a: " + "[" * 5000, "--config takes a YAML file; {} is none."),
        ("\x00", "--config takes a YAML file; {} is none."),
    ],
)
def test_what_is_wrong_in_the_file_is_named(tmp_path, text, message):
    file = tmp_path / "server.yaml"
    file.write_text(text)
    result = _run("serve", "--config", str(file))
    assert result.exit_code == 2
    assert message.format(file) in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_file_that_is_not_there_is_named(tmp_path):
    result = _run("serve", "--config", str(tmp_path / "none.yaml"))
    assert result.exit_code == 2
    assert f"--config cannot read {tmp_path / 'none.yaml'}: No such file" in result.stderr


def test_a_wrong_variable_is_named():
    result = CliRunner(env={"PREFIXCACHE_PORT": "tcp://10.0.0.1:80"}).invoke(app, ["serve"])
    assert result.exit_code == 2
    assert "PREFIXCACHE_PORT must be a valid integer" in result.stderr


def test_keys_are_never_shown(served, tmp_path):
    file = tmp_path / "server.yaml"
    for text in ("api_key: [s3cret, 5]", "api_key: {s3cret: 1}", "api_key: [s3cret", "s3cret"):
        file.write_text(text)
        result = _run("serve", "--config", str(file))
        assert result.exit_code == 2
        assert "s3cret" not in result.output
    _, options = served("--api-key", "s3cret", env={"PREFIXCACHE_ADMIN_API_KEY": "s3cret2"})
    assert options.api_key == ("s3cret",)
    assert "s3cret" not in repr(options)
    with_variable = CliRunner(env={"PREFIXCACHE_API_KEY": "s3cret"})
    assert "s3cret" not in with_variable.invoke(app, ["serve", "--help"]).output


def test_a_variable_holds_several_values(served):
    _, options = served(env={"PREFIXCACHE_API_KEY": "one two"})
    assert options.api_key == ("one", "two")


@pytest.mark.parametrize(
    ("arguments", "variables", "keys"),
    [
        ([], {"VLLM_API_KEY": "sk-a b"}, ("sk-a b",)),
        (["--api-key", "x"], {"VLLM_API_KEY": "sk-a"}, ("x",)),
        (["--api-key", "x"], {"VLLM_API_KEY": ""}, ("x",)),
        ([], {"VLLM_API_KEY": "sk-a", "PREFIXCACHE_API_KEY": "y z"}, ("y", "z")),
        (["--admin-api-key", "x"], {"VLLM_API_KEY": "sk-a"}, ("sk-a",)),
    ],
)
def test_the_key_of_vllm_is_taken_where_no_other_is_given(served, arguments, variables, keys):
    _, options = served(*arguments, env=variables)
    assert options.api_key == keys
    assert options.admin_api_key == (("x",) if "--admin-api-key" in arguments else ())


def test_a_key_in_the_file_goes_before_that_of_vllm(served, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("api_key: x\n")
    _, options = served("--config", str(file), env={"VLLM_API_KEY": "sk-a"})
    assert options.api_key == ("x",)


def test_a_wrong_key_of_vllm_is_not_shown():
    env = {"VLLM_API_KEY": "sk-a", "PREFIXCACHE_ADMIN_API_KEY": "sk-a"}
    result = CliRunner(env=env).invoke(app, ["serve", "./nowhere", "--port", "0"])
    assert result.exit_code == 2
    assert "An --api-key is an --admin-api-key too" in result.stderr
    assert "sk-a" not in result.output


def test_other_names_of_a_flag_are_known(served):
    config, _ = served("--num-gpu-blocks-override", "7", "--model", "a")
    assert (config.cache.num_blocks, config.model) == (7, "a")
    assert served("b", "--model", "a")[0].model == "b"
    assert served("--kv-cache-memory-bytes", "1KiB")[0].cache == CacheConfig(kv_cache_memory=1024)


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


def test_generate_goes_on_with_the_text_unless_it_is_to_chat(generate):
    options: list[Any] = ["--temperature", "0"]
    texts = {generate(*options, *kind).output for kind in ([], ["--chat"], ["--system", "Hi"])}
    assert len(texts) == 3
    system = ["--system", "Hi"]
    assert generate(*options, *system, "--chat").output == generate(*options, *system).output


@pytest.mark.parametrize("option", [["--temperature", "-1"], ["--top-p", "2"], ["--stop", ""]])
def test_generate_names_a_wrong_option(generate, option):
    result = generate(*option)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {option[0]} ")


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
