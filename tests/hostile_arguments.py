"""Every method of the core with arguments of every kind: only documented exceptions come out.

Run as a program, because what it looks for ends the process: `python tests/hostile_arguments.py
FIRST CASES`. Methods and their parameters are read from the module, so that none is left out.
Arguments are sound, out of range, of the wrong type, or objects whose code calls the core again and
resizes its arrays while they are read. Addresses are those of a large buffer, or none, since for
them the caller vouches; and a size is small or one that no memory has.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from prefixcache import _core

DOCUMENTED = (TypeError, ValueError, RuntimeError, MemoryError, IndexError, OSError)
HUGE = [2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**70, 10**5000, -1, -(2**70)]
BLOCK = 4
PROGRAM = Path(__file__)
TRACE = PROGRAM.parents[1] / "benches/traces/taubench.ptt.gz"
WORDS = 1 << 14


class CallersError(Exception):
    """What the caller's own code raises comes through as it is."""


class Index:
    """A number whose value is found by code."""

    def __init__(self, value: int, run: Callable[[], object]) -> None:
        self._value, self._run = value, run

    def __index__(self) -> int:
        self._run()
        return self._value


class Items:
    """A list found by code, whose length is not what it says."""

    def __init__(self, items: list[Any], run: Callable[[], object], length: int) -> None:
        self._items, self._run, self._length = items, run, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._items[index]

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._run()
            yield item


class World:
    """Objects of every class, which the calls of a case share."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        threads: Any = choose.choice(["single_writer", "shared"])
        groups: Any = choose.choice([["full"], ["full", ("sliding_window", 6)]])
        self.cache = _core.PrefixCache(
            17, BLOCK, groups=groups, threads=threads, max_blocks=33, model="m"
        )
        self.other_cache = _core.PrefixCache(9, BLOCK, model="m")
        self.pool = _core.BlockPool(9, threads=threads, max_blocks=17)
        self.hashes = self.cache.compute_block_hashes(range(24))
        self.sequences = [self.cache.new_sequence(range(size)) for size in (0, 7, 24)]
        self.sequences.append(self.other_cache.new_sequence(range(9)))
        self.cache.commit_prefix_plan(self.sequences[1], 0, 7)
        self.cpu = _core.Cpu(2)
        self.events = self.kept_events()
        self.buffer = np.zeros(WORDS, np.float32)
        self.layer = _core.PackedLinear(self.cpu, 4, 4, "float32", bias=True)
        self.rows = _core.RowOps(self.cpu, "float32")
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the case
        self.file.write(bytes(256))
        self.file.flush()
        self.laid_out = _core.LaidOutFile(self.file.fileno())
        self.sampler = _core.Sampler(self.cpu)
        self.sampler_row = _core.SamplerRow(1.0, 0, 0, bad_words=[3], logprobs=2, top_p=0.5)
        self.logits = np.ones((2, 7), np.float32)
        self.attention = _core.PagedAttention(self.cpu, "float32", 2, 1, 16, 1.0)
        self.decoder_layer = self.make_decoder_layer()
        self.stack = _core.DecoderStack(self.cpu, "float32", 4, 1e-5, [self.decoder_layer])
        self.stops = _core.StopStrings(["stop", "text"])
        self.stop_stream = self.stops.stream()
        self.reader = _core.TraceReader(TRACE)
        self.replay = _core.TraceReplay(TRACE, threads=2)
        self.replay.add(4)
        self.pseudonyms = _core.BlockPseudonyms(bytes(32), BLOCK)
        self.index = _core.ReplicaIndex(8)
        self.index.add_replica()
        self.chooser = _core.ReplicaChooser(
            overlap_weight=1, request_tokens=1, window_tokens=9, balance=1, affinity=1
        )
        self.drafts = _core.DraftIndex(128)
        self.draft_streams = [self.drafts.stream(b"", shares) for shares in (True, True, False)]
        self.arrays = [np.zeros(size, kind) for size in (2, 6, 24) for kind in ("i4", "i8")]

    def kept_events(self) -> Any:
        cache = _core.PrefixCache(9, BLOCK, model="m")
        cache.keep_events()
        return cache.snapshot_events()

    def make_decoder_layer(self) -> _core.DecoderLayer:
        at, sizes = self.buffer.ctypes.data, {"qkv": (4, 64), "out": (32, 4)}
        sizes |= {"gate_up": (4, 12), "down": (6, 4)}
        linears = {k: _core.PackedLinear(self.cpu, *v, "float32") for k, v in sizes.items()}
        gate: Any = self.choose.choice(["silu", "gelu_tanh"])
        norms = {"input_norm": at, "mlp_norm": at, "mlp_out_norm": self.choose.choice([None, at])}
        gated = self.choose.choice([False, False, True])
        attention = _core.AttentionMixer(
            qkv=linears["qkv"], gated=gated, out=linears["out"], rope=0
        )
        square = _core.PackedLinear(self.cpu, 4, 4, "float32")
        conv = _core.ShortConvMixer(in_proj=linears["gate_up"], taps=3, weight=at, out=square)
        skip = self.choose.choice([None, at])
        delta = _core.DeltaMixer(
            in_proj=_core.PackedLinear(self.cpu, 4, 65 + (skip is None), "float32"),
            key_heads=1, value_heads=1, key_dim=16, value_dim=16, taps=2,
            conv=at, decay=at, time_bias=at, norm=at, skip=skip, eps=1e-6,
            out=_core.PackedLinear(self.cpu, 16, 4, "float32"),
        )  # fmt: skip
        mixer: Any = self.choose.choice([attention, conv, delta])
        dense = _core.DenseFeedForward(gate_up=linears["gate_up"], gate=gate, down=linears["down"])
        self.mixer, self.feed_forward = mixer, dense
        self.experts = _core.ExpertsFeedForward(
            router=_core.PackedLinear(self.cpu, 4, 2, "float32"),
            scores=self.choose.choice(["softmax", "sigmoid"]),
            selection_bias=self.choose.choice([None, at]),
            top_k=self.choose.choice([1, 2]),
            gate_up=_core.PackedLinear(self.cpu, 4, 24, "float32", parts=[6] * 4),
            gate=gate,
            down=_core.PackedLinear(self.cpu, 6, 8, "float32", parts=[4, 4]),
            shared=dense,
            shared_weight=self.choose.choice([None, _core.PackedLinear(self.cpu, 4, 1, "float32")]),
        )
        dense = self.choose.choice([dense, self.experts, None])
        self.own_input = _core.OwnInput(gate=square, activation=gate, out=square, norm=at)
        return _core.DecoderLayer(
            mixer=mixer,
            feed_forward=dense,
            **norms,
            norm_offset=1.0,
            own_input=self.choose.choice([None, self.own_input]),
            stream_scale=self.choose.choice([None, at]),
        )

    def instances(self) -> list[Any]:
        """What methods are called on."""
        return [
            self.cache,
            self.other_cache,
            self.pool,
            self.hashes,
            *self.sequences,
            self.cpu,
            self.layer,
            self.rows,
            self.sampler,
            self.sampler_row,
            self.attention,
            self.mixer,
            self.feed_forward,
            self.experts,
            self.decoder_layer,
            self.stack,
            self.stops,
            self.stop_stream,
            self.events,
            self.reader,
            self.replay,
            self.pseudonyms,
            self.index,
            self.chooser,
            self.drafts,
            *self.draft_streams,
        ]

    def interfere(self) -> None:
        """What the caller's code does while an argument is read."""
        choose = self.choose
        array = choose.choice(self.arrays)
        acts: list[Callable[[], object]] = [
            lambda: array.resize(choose.choice([0, 1, 6, 4096]), refcheck=False),
            lambda: self.sequences[2].extend([1] * choose.randrange(9)),
            lambda: self.cache.release([self.sequences[1]]),
            lambda: self.cache.commit_prefix_plan(self.sequences[1], 0, 7),
            lambda: self.cache.resize(choose.choice([5, 17, 33])),
            self.cache.clear_cache_index,
            choose.choice(self.draft_streams).close,
            lambda: self.draft_streams[0].append([1] * choose.randrange(90)),
            self.fail,
        ]
        act = choose.choice(acts)
        if act == self.fail:
            self.fail()
        with contextlib.suppress(*DOCUMENTED):
            act()

    def fail(self) -> None:
        raise CallersError

    def number(self) -> Any:
        value = self.choose.choice([0, 1, 2, 4, 7, 8, 16])
        found = Index(value, self.interfere)
        return self.choose.choice([value, value, value, found, np.int64(value)])

    def array(self) -> Any:
        array = self.choose.choice(self.arrays)
        if array.size:
            array[:] = [self.choose.choice([0, 1, 2, -1, 7]) for _ in range(array.size)]
        odd = [
            array[::2],
            np.frombuffer(b"-" + array.tobytes(), array.dtype, offset=1),
            array.astype(array.dtype.newbyteorder()),
            array.astype(np.float32),
            array.reshape(-1, 1),
            array.astype(object),
        ]
        return self.choose.choice([array] * 12 + odd)

    def some_list(self, item: Callable[[], Any]) -> Any:
        items = [item() for _ in range(self.choose.choice([0, 1, 1, 2, 3]))]
        length = self.choose.choice([0, len(items), 2**40, sys.maxsize])
        hostile = Items(items, self.interfere, length)
        return self.choose.choice([items, items, items, tuple(items), iter(items), hostile])

    def group(self) -> Any:
        return self.choose.choice(["full", ("sliding_window", self.number()), ("full", 2), 3])

    def nonsense(self, name: str) -> Any:
        wrong = [None, "text", "\ud800", b"bytes", 1.5, float("nan"), 10**400, {}, [[]], -1, 2**64]
        hostile = [Index(2**70, self.interfere), Items([], self.fail, sys.maxsize), self]
        numbers = [] if name in ADDRESSES else HUGE
        return self.choose.choice([*wrong, *hostile, *numbers, *self.instances()])

    def sound(self, name: str) -> Any:
        """A value that the parameter might take."""
        choose = self.choose
        if name == "out" and choose.random() < 0.3:
            return self.layer  # which a layer of a decoder names so
        if name in ADDRESSES:
            return choose.choice([self.buffer.ctypes.data, self.buffer.ctypes.data, 0, 2])
        if name in ARRAYS:
            return self.array()
        makers: dict[str, Callable[[], Any]] = {
            "sequence": lambda: choose.choice(self.sequences),
            "sequences": lambda: self.some_list(lambda: choose.choice(self.sequences)),
            "tokens": lambda: choose.choice([self.array(), self.some_list(self.number)]),
            "hashes": lambda: choose.choice(
                [self.hashes, self.some_list(lambda: b"h" * 32), np.arange(3, dtype="u8")]
            ),
            "hit_tokens": lambda: choose.choice([np.arange(2, dtype="u4"), self.number()]),
            "loads": lambda: np.array(choose.choice([[0, np.inf], [-1, 1], [0, np.nan]])),
            "name": lambda: "replica",
            "key": lambda: choose.choice([None, "key", bytes(32)]),
            "block_hash": lambda: b"h" * choose.choice([32, 32, 31]),
            "extras": lambda: self.some_list(lambda: choose.choice([b"", bytearray(b"x")])),
            "blocks": lambda: self.some_list(self.number),
            **dict.fromkeys(("counts", "guesses", "accepted"), lambda: self.some_list(self.number)),
            "starts": lambda: self.some_list(self.number),
            "upto": lambda: self.some_list(self.number),
            "groups": lambda: self.some_list(self.group),
            "interval": lambda: choose.choice([None, 0, 5]),
            "pin": lambda: choose.choice([False, True]),
            "pin_prefix": lambda: choose.choice([False, True]),
            "num_groups": lambda: choose.choice([None, None, 1, 2]),
            "chunk": lambda: choose.choice([None, 1, 4]),
            "max_tokens": lambda: choose.choice([None, 5, 24]),
            "caches": lambda: self.some_list(lambda: self.sound("address")),
            "states": lambda: self.some_list(lambda: (0, 0, self.sound("address"), 304)),
            "rotations": lambda: self.some_list(lambda: (self.sound("address"),) * 2),
            "attentions": lambda: self.some_list(lambda: self.attention),
            "layer_groups": lambda: self.some_list(self.number),
            "rotated": lambda: self.some_list(lambda: choose.choice([4, 8, 16])),
            "makes": lambda: choose.choice(["all", "queries_and_keys", "queries"]),
            "own_input": lambda: choose.choice([None, self.own_input]),
            "parts": lambda: self.some_list(self.number),
            "activations": lambda: choose.choice(["exact", "int8"]),
            "format": lambda: choose.choice(["Q4_0", "Q6_K"]),
            "layers": lambda: self.some_list(lambda: self.decoder_layer),
            "descriptor": self.file.fileno,
            "file": lambda: self.laid_out,
            "offset": lambda: choose.choice([0, 64, 128]),
            "num_bytes": lambda: choose.choice([0, 64, 128, 1 << 10]),
            **dict.fromkeys(LINEARS, lambda: self.layer),
            "mixer": lambda: self.mixer,
            "feed_forward": lambda: choose.choice([self.feed_forward, self.experts]),
            "router": lambda: self.layer,
            "scores": lambda: choose.choice(["softmax", "sigmoid"]),
            "renormalise": lambda: choose.choice([None, 0.0]),
            **dict.fromkeys(("whole_norms", "tiled"), lambda: choose.choice([False, True])),
            "cpu": lambda: self.cpu,
            "attention": lambda: self.attention,
            "dtype": lambda: choose.choice(["float32", "bfloat16"]),
            "gate": lambda: choose.choice(["silu", "gelu_tanh", self.layer]),
            "activation": lambda: choose.choice(["silu", "gelu_tanh"]),
            "threads": lambda: choose.choice(["single_writer", "shared", 1, 2]),
            "free_order": lambda: choose.choice(["append", "unhashed_first"]),
            "instructions": lambda: choose.choice([None, "portable"]),
            "cache_salt": lambda: choose.choice([None, "salt"]),
            "bias": lambda: choose.choice([False, True]),
            "wide_out": lambda: choose.choice([False, True]),
            "stops": lambda: self.some_list(lambda: choose.choice(["stop", "st", ""])),
            "text": lambda: choose.choice(["a stop", b'{"a": [1, "b", 1e5]}', b"[", "te"]),
            "scope": lambda: choose.choice([b"", b"scope"]),
            "shares": lambda: choose.choice([False, True]),
            "path": lambda: choose.choice([TRACE, str(TRACE), PROGRAM]),
            "sizes": lambda: self.some_list(self.number),
            "hints": lambda: self.some_list(lambda: choose.choice([(0, None, 80, None), (4, 2)])),
            "eviction_policy": lambda: choose.choice(["lru", "reuse-queue"]),
            "logits": lambda: choose.choice([self.logits, self.logits[:, :1], self.logits[:1]]),
            "temperature": lambda: choose.choice([0.0, 1.0, 1e-5]),
            "top_p": lambda: choose.choice([1.0, 0.5]),
            "min_p": lambda: choose.choice([0.0, 0.5]),
            **dict.fromkeys(TOKEN_LISTS, lambda: self.some_list(self.number)),
            "eps": lambda: 1e-5,
            "scale": lambda: choose.choice([1.0, float("inf")]),
            "head_dim": lambda: choose.choice([16, 24]),
        }
        return makers.get(name, self.number)()

    def argument(self, name: str) -> Any:
        return self.nonsense(name) if self.choose.random() < 0.08 else self.sound(name)

    def sound_calls(self) -> list[tuple[Any, str, list[Any]]]:
        """Calls whose arguments fit each other."""
        at, sequence = self.buffer.ctypes.data, self.sequences[1]
        tables = [np.zeros(64, kind) for kind in ("i4", "i4", "i4", "i8")]
        plan = [[0, 2], [0, 1], [3], [2], [0]]
        step = [np.array(table, np.int32) for table in plan]
        self.arrays[6:] = [*tables, *step]  # which the caller's code resizes
        *step, first_pages = step
        return [
            (self.cache, "commit_prefix_plan", [sequence, 0, 7]),
            (self.cache, "append_slots", [[sequence], [2]]),
            (self.cache, "append_tokens", [[sequence], [3]]),
            (self.cache, "mark_blocks_filled", [[sequence], [4]]),
            (self.cache, "fill_block_tables", [[sequence], [0], [7], 0, *tables]),
            (self.cache, "replace_block", [sequence, 0, 0]),
            (self.cache, "release", [[sequence]]),
            (self.pool, "register", [[1, 2], [b"a" * 32, b"b" * 32], self.pool.epoch]),
            (self.pool, "commit", [[b"a" * 32, b"c" * 32], 1]),
            (self.attention, "plan", [4, 16, *step, np.array([48, 49]), first_pages]),
            (self.attention, "run", [at, at, 32, at, 16, at, 16, at]),
            (self.stack, "forward", [[self.attention], [0], [at], [(at, at)], at, 2]),
            (self.sampler, "sample", [self.logits, [self.sampler_row] * 2]),
            (self.sampler, "logprobs", [self.logits, np.array([0, 6], np.int32), 3]),
            (self.layer, "copy_rows", [0, at, 4]),
            (self.layer, "copy_blocks", [0, at, 4, "Q4_0"]),
            (self.layer, "read_rows", [at, 3, at]),
            (self.layer, "forward", [at, 3, 4, at, at]),
            (self.rows, "rms_norm", [at, 3, 8, 8, at, 4, 2, 1e-5, at]),
            (self.index, "stored", [0, np.arange(3, dtype="u8")]),
            (self.index, "hits", [np.arange(3, dtype="u8")]),
            (self.chooser, "choose", [np.zeros(2, "u4"), 9, np.zeros(2)]),
            (self.rows, "rotate", [at, at, 2, at, 3, 8, 8, at]),
        ]

    def spoil(self, name: str, value: Any) -> Any:
        """The argument, or one like it that runs code, or another one."""
        chance = self.choose.random()
        if chance < 0.05:
            return self.argument(name)
        if chance < 0.3 and isinstance(value, list):
            return Items(value, self.interfere, self.choose.choice([0, 2**40, sys.maxsize]))
        if chance < 0.2 and isinstance(value, int):
            return Index(value, self.interfere)
        return value

    def call_with_fitting_arguments(self) -> None:
        target, name, values = self.choose.choice(self.sound_calls())
        names = [parameter.name for parameter in METHODS[type(target)][name]]
        spoiled = [self.spoil(*pair) for pair in zip(names, values, strict=False)]
        with contextlib.suppress(*DOCUMENTED, CallersError):
            getattr(target, name)(*spoiled)

    def call(self, target: Any, name: str, parameters: list[inspect.Parameter]) -> None:
        positional, named = [], {}
        for parameter in parameters:
            if parameter.default is not inspect.Parameter.empty and self.choose.random() < 0.5:
                if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                    break
                continue
            value = self.argument(parameter.name)
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                named[parameter.name] = value
            else:
                positional.append(value)
        with contextlib.suppress(*DOCUMENTED, CallersError):
            getattr(target, name)(*positional, **named)

    def call_one_method(self) -> None:
        target = self.choose.choice([*self.instances(), Module])
        methods = FUNCTIONS if target is Module else METHODS[type(target)]
        if methods:
            name = self.choose.choice(sorted(methods))
            self.call(target, name, methods[name])

    def check(self) -> None:
        """The caches and the pool are sound, and what is collected comes back."""
        for cache in (self.cache, self.other_cache):
            cache.adopt_writer()
            cache.validate()
        self.pool.adopt_writer()
        self.pool.validate()
        self.sequences.clear()
        # A shrink that was begun keeps blocks back until it is undone.
        self.cache.abort_moves()
        self.cache.resize(self.cache.num_blocks)
        assert self.cache.num_free_blocks == self.cache.num_blocks - 1


ADDRESSES = {"address", "cache", "cos", "keys", "out", "queries", "residual", "sin", "values"}
ADDRESSES |= {"ids", "weight", "x", "conv", "decay", "time_bias", "norm"}
ADDRESSES |= {
    "input_norm",
    "qk_norm",
    "mixer_out_norm",
    "mlp_norm",
    "mlp_out_norm",
    "sinks",
    "selection_bias",
    "value_norm",
    "norm",
    "stream_scale",
    "own_inputs",
}
LINEARS = {"in_proj", "qkv", "gate_up", "down"}
ARRAYS = {"first_pages", "indptr", "indices", "last_page_len", "slot_mapping"}
ARRAYS |= {"qo_indptr", "kv_indptr", "kv_indices", "prompt", "answer", "mask", "token_ids"}
TOKEN_LISTS = {"bias_tokens", "bias", "banned", "allowed", "bad_words"}
# `close` ends a cache for all calls after it.
LEFT_OUT = {"close"}


def parameters_of(function: Any) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter for parameter in parameters if parameter.name != "self"]


def methods_of(cls: type) -> dict[str, list[inspect.Parameter]]:
    names = [name for name in vars(cls) if not name.startswith("_") and name not in LEFT_OUT]
    return {
        name: parameters_of(getattr(cls, name)) for name in names if callable(getattr(cls, name))
    }


EXPORTS = {name: getattr(_core, name) for name in _core.__all__}
CLASSES = {name: export for name, export in EXPORTS.items() if isinstance(export, type)}
METHODS = {cls: methods_of(cls) for cls in CLASSES.values()}
MADE_BY_METHODS = {"BlockHashes", "DraftStream", "EventSnapshot", "Sequence", "StopStream"}


class Module:
    """The constructors and functions, as methods of one object."""


FUNCTIONS = {
    name: parameters_of(export) for name, export in EXPORTS.items() if name not in MADE_BY_METHODS
}
for function in FUNCTIONS:
    setattr(Module, function, staticmethod(EXPORTS[function]))


def run_case(case: int) -> None:
    world = World(random.Random(case))
    for _ in range(25):
        world.call_one_method()
        world.call_with_fitting_arguments()
    world.check()


def main(first: int, cases: int) -> None:
    for case in range(first, first + cases):
        # A crash leaves this line as the last: the same program with this case alone repeats it.
        print(case, flush=True)
        run_case(case)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
