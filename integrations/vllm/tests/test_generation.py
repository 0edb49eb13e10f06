"""vLLM answers on a CPU, with blocks from the disk after a kill. `make vllm-cpu` runs it.

`python test_generation.py FOLDER` answers once, prints how, and waits to be killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import transfer_config
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

BLOCK_TOKENS = 32
NUM_BLOCKS = 10
PROMPT = [number * 7 % 509 for number in range(NUM_BLOCKS * BLOCK_TOKENS + 5)]
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
"""One process, which a kill ends, and which reports nothing to anybody."""


class PlainMemorySpec(TieringOffloadingSpec):
    """vLLM's own, with a worker for devices whose memory is plain: its own is for GPUs alone."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker: Any = PlainMemoryWorker(kv_caches, region)
        return self._worker


class PlainMemoryWorker(OffloadingWorker):
    """Copies blocks at once."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._pairs = [
            (layer.tensor, region.create_next_worker_view(layer.page_size_bytes))
            for layer in kv_caches.tensors
        ]
        self._ended: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec
    ) -> bool:
        for device, host in self._pairs:
            host[dst_spec.chunk_ids] = device[src_spec.block_ids]
        return self._end(job_id)

    def submit_load(
        self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec
    ) -> bool:
        for device, host in self._pairs:
            device[dst_spec.block_ids] = host[src_spec.chunk_ids]
        return self._end(job_id)

    def _end(self, job_id: int) -> bool:
        self._ended.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        pass


def write_model(folder: Path) -> None:
    """Random weights, large enough for answers that differ.

    Bloom's attention sees how far away a key is. Most models' keys have their positions in them,
    so that blocks in another order would give the same answer.
    """
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(7)
    config = BloomConfig(
        hidden_size=128,
        n_layer=2,
        n_head=4,
        vocab_size=512,
        initializer_range=0.3,
    )
    BloomForCausalLM(config).save_pretrained(folder)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="this vLLM does not compute on CPUs")
def test_the_answer_after_a_kill_has_blocks_from_the_disk_and_the_same_tokens(
    tmp_path: Path,
) -> None:
    import tiers  # Its folder is on pytest's path alone, not on that of the process to be killed.

    write_model(tmp_path / "model")
    answers = []
    for _ in range(2):
        line = tiers.line_of_killed(Path(__file__), tmp_path, '{"cached"', **ENVIRONMENT)
        answers.append(json.loads(line))
    first, second = answers
    assert (first["cached"], second["cached"]) == (0, NUM_BLOCKS * BLOCK_TOKENS)
    assert second["tokens"] == first["tokens"]
    assert len(set(first["tokens"])) > 1


def main() -> None:
    from vllm import LLM, SamplingParams

    folder = Path(sys.argv[1])
    name = f"generation-{os.getpid()}"
    transfer = transfer_config(folder / "kv") | {"engine_id": name}
    extra = transfer["kv_connector_extra_config"]
    extra |= {"spec_name": "PlainMemorySpec", "spec_module_path": Path(__file__).stem}
    extra["cpu_bytes_to_use"] = 8 << 20
    llm = LLM(
        str(folder / "model"),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=8 << 20,
        max_num_seqs=2,
        enforce_eager=True,
        kv_transfer_config=transfer,
    )
    for memory in Path("/dev/shm").glob(f"vllm_offload_{name}*"):
        memory.unlink()  # It is mapped, and a killed vLLM leaves it.

    def generate(prompt: list[int], num_tokens: int) -> Any:
        options = SamplingParams(temperature=0, max_tokens=num_tokens, detokenize=False)
        return llm.generate({"prompt_token_ids": prompt}, options, use_tqdm=False)[0]

    request = generate(PROMPT, 24)
    values = folder / "kv" / "rank0"
    while sum("-" in file.name for file in values.iterdir()) < NUM_BLOCKS:
        generate([1, 2, 3], 1)  # What is stored moves on with steps.
        time.sleep(0.01)
    result = {"cached": request.num_cached_tokens, "tokens": request.outputs[0].token_ids}
    print(json.dumps(result), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
