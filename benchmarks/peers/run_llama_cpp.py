# pyright: reportMissingImports=false
"""llama.cpp through its C interface, continuous batching as its server does it (rollout only).

Every step decodes one batch: a token for each live sequence and the whole prompt of each newly admitted one; a
sequence that reached its own length leaves and a waiting request takes its place. The weights are converted at
start-up, apart from the clock. `options`:
  weights     "f32" (default for a float32 job), "bf16" (for a bfloat16 job), "f16", "q8_0", "q4_1"
  kv          "f32" (default for a float32 job) or "f16"
  flash_attn  "off" (default for a float32 job: the other path rounds to f16 inside), "auto" or "on"
  repack      true: llama.cpp's rearranged weights (default false: README.md says what they did; f32 has none)
Quantised weights are multiplied with int8 activations: a speed to quote beside f32, not the same function.
"""

import collections
import ctypes
import os
import tempfile
from typing import Any

from benchmarks.peers import harness
from benchmarks.peers.job import JobError, RolloutJob

PACKAGES = ("llama-cpp-python", "gguf", "numpy")
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}


class Engine:
    """Owns one llama.cpp context and its batch buffer."""

    def __init__(self, job: RolloutJob, gguf_path: str, kv: str, flash_attn: str):
        import llama_cpp

        self.lib, self.job = llama_cpp, job
        self._silence = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = bool(job.options.get("repack", False))
        self.model = llama_cpp.llama_model_load_from_file(gguf_path.encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = job.batch_size
        params.n_ctx = job.kv_capacity * job.batch_size
        params.n_batch = max(512, job.batch_size * max(map(len, job.prompts)))
        params.n_threads = params.n_threads_batch = job.threads
        params.type_k = params.type_v = {"f32": llama_cpp.GGML_TYPE_F32, "f16": llama_cpp.GGML_TYPE_F16}[kv]
        params.flash_attn_type = FLASH_ATTN[flash_attn]
        params.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.model or not self.context:
            raise RuntimeError(f"llama.cpp could not load {gguf_path}")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def make_samplers(self, seed: int) -> list[Any]:
        """One chain per slot: greedy, or temperature and a draw from the whole law."""
        lib, chains = self.lib, []
        for slot in range(self.job.batch_size):
            chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
            if self.job.temperature > 0:
                lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(self.job.temperature))
                lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist((seed * 1009 + slot) & 0xFFFFFFFF))
            else:
                lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_greedy())
            chains.append(chain)
        return chains

    def decode(self, rows: dict[int, tuple[list[int], int]]) -> list[int]:
        """Runs `rows` (slot -> new tokens, first position) in one batch; gives the index of each row's last token."""
        batch, used, last = self.batch, 0, []
        for slot, (tokens, start) in rows.items():
            for offset, token in enumerate(tokens):
                batch.token[used], batch.pos[used] = token, start + offset
                batch.n_seq_id[used], batch.seq_id[used][0] = 1, slot
                batch.logits[used] = offset == len(tokens) - 1
                used += 1
            last.append(used - 1)
        batch.n_tokens = used
        status = self.lib.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for a batch of {used} tokens")
        return last

    def generate(self, seed: int) -> list[list[int]]:
        """Serves every request of the job; gives the generated ids in the requests' order."""
        job, lib, samplers = self.job, self.lib, self.make_samplers(seed)
        waiting = collections.deque(range(len(job.prompts)))
        outputs: list[list[int]] = [[] for _ in job.prompts]
        live: dict[int, int] = {}  # slot -> request
        rows: dict[int, tuple[list[int], int]] = {}
        while waiting or live:
            for slot in range(job.batch_size):
                if slot not in live and waiting:
                    live[slot] = waiting.popleft()
                    rows[slot] = (job.prompts[live[slot]], 0)
            last = self.decode(rows)
            next_rows = {}
            for (slot, (tokens, start)), index in zip(rows.items(), last, strict=True):
                request = live[slot]
                token = lib.llama_sampler_sample(samplers[slot], self.context, index)
                outputs[request].append(token)
                if len(outputs[request]) == job.max_new_tokens[request] or token in job.stop_token_ids:
                    lib.llama_memory_seq_rm(self.memory, slot, -1, -1)
                    del live[slot]
                else:
                    next_rows[slot] = ([token], start + len(tokens))
            rows = next_rows
        for chain in samplers:
            lib.llama_sampler_free(chain)
        return outputs


def run_rollout(job: RolloutJob) -> dict[str, Any]:
    from benchmarks.peers.hf_to_gguf import convert

    is_f32 = job.dtype == "float32"
    settings = {
        "weights": job.options.get("weights", "f32" if is_f32 else "bf16"),
        "kv": job.options.get("kv", "f32" if is_f32 else "f16"),
        "repack": bool(job.options.get("repack", False)),
        "flash_attn": job.options.get("flash_attn", "off" if is_f32 else "auto"),
    }
    for name, allowed in (("kv", ("f32", "f16")), ("flash_attn", tuple(FLASH_ATTN))):
        if settings[name] not in allowed:
            raise JobError(f"options.{name}: got {settings[name]!r}, expected one of {allowed}; name one of them")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.gguf")
        convert(job.model_dir, path, settings["weights"])
        engine = Engine(job, path, settings["kv"], settings["flash_attn"])

    def run_once(seed: int) -> harness.Generated:
        tokens = engine.generate(seed)
        lengths = [len(row) for row in tokens]
        return harness.Generated(lengths, sum(lengths), tokens)

    settings["serving"] = "continuous batching"
    return harness.measure_rollout(job, run_once) | {"versions": harness.versions(*PACKAGES), "settings": settings}


if __name__ == "__main__":
    harness.run_peer_main("llama_cpp", {"rollout": run_rollout})
