"""Memory of loading and serving a model, without its weights and KV cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

LIMIT_BYTES = 300_000_000
"""Limit in bytes without weights and KV cache; includes the Python interpreter with torch."""

OVERHEAD_BYTES = 70_000_000
"""Limit in bytes without the interpreter and torch: tokenizer, kernels, intermediate tensors of a long step."""

SHAPE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}

PROGRAM = """
import json, re, sys
from pathlib import Path

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

import torch  # the worker's, in the same process
begun = peak()
import mvllm
from mvllm import LLM, SamplingParams
tokenizer = str(Path(mvllm.__file__).parent / "demo" / "model")
settings = {"platform": "cpu", "kv_cache_memory_bytes": 30_000_000, "use_tqdm_on_load": False}
with LLM(sys.argv[1], tokenizer=tokenizer, **settings) as llm:
    cache = llm.llm_engine.cache_summary.total_bytes
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 16000 for i in range(300)]} for j in range(16)]
    llm.generate([{"prompt_token_ids": [i % 16000 for i in range(2000)]}], greedy, use_tqdm=False)
    llm.generate(prompts, greedy, use_tqdm=False)
    llm.generate(["Once upon a time"], greedy, use_tqdm=False)
print(json.dumps({"begun": begun, "peak": peak(), "cache": cache}))
"""


def write_model(folder: Path, vocab: int, *, tied: bool) -> int:
    """Writes a Llama with random bfloat16 weights; returns their size in bytes."""
    size, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (vocab, size), "lm_head.weight": (vocab, size), "model.norm.weight": (size,)}
    for layer in range(SHAPE["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{p}_proj.weight": (size, size) for p in "qkvo"}
        shapes |= {f"{name}.mlp.{p}_proj.weight": (inner, size) for p in ("gate", "up")}
        shapes |= {f"{name}.mlp.down_proj.weight": (size, inner)}
        shapes |= {f"{name}.{p}_layernorm.weight": (size,) for p in ("input", "post_attention")}
    if tied:
        del shapes["lm_head.weight"]
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 8}
    config |= {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "dtype": "bfloat16", "eos_token_id": 0}
    config |= {"vocab_size": vocab, "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps({**config, **SHAPE}))
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize(("vocab", "tied"), [pytest.param(16000, False, marks=pytest.mark.exhaustive), (100000, True)])
def test_memory_other_than_weights_and_cache_is_within_the_limit(tmp_path, vocab, tied):
    """A tied head must be in memory once: a second copy would exceed OVERHEAD_BYTES."""
    weights = write_model(tmp_path, vocab, tied=tied)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    other = found["peak"] - weights - found["cache"]
    split = f"{other:,} bytes in addition to {weights:,} of weights and {found['cache']:,} of KV cache"
    assert other - found["begun"] <= OVERHEAD_BYTES, f"{split}; an interpreter with torch had taken {found['begun']:,}"
    if found["begun"] <= LIMIT_BYTES - OVERHEAD_BYTES:  # else torch is larger than when measured
        assert other <= LIMIT_BYTES, split


RELEASE_CODE = """
import re
from pathlib import Path
import torch
from mvllm_cpu import memory

def code():
    return int(re.search(r"RssFile:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

x = torch.arange(6.0).view(2, 3)
expected, before = (x @ x.T).tolist(), code()
memory.release_code_pages()
print(before, code(), (x @ x.T).tolist() == expected, memory.release_code_pages.cache_info().currsize)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="mappings are read from /proc")
def test_released_code_pages_are_loaded_again_when_used():
    done = subprocess.run([sys.executable, "-c", RELEASE_CODE], capture_output=True, text=True, check=True, timeout=120)
    before, after, same, calls = done.stdout.split()
    assert same == "True" and calls == "1", "of a process with several engines"
    assert int(after) < int(before) // 2
