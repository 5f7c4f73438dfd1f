"""Out-of-memory handling: while loading, in the profiling step, and while serving.

Each must be one message that says which setting helps; after the last one the engine must go on as before.

Where the device has memory of its own, models are made for more than it has, and another process takes what is left
while the engine serves. Where it is the host's, this process is given an address space that is as small.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gpu.result_log import FAILED, OK, ResultLog, Row
from tests.gpu.settings import ROOT, Item, Settings

HOST_ROOM = 1 << 30  # bytes that an engine on the host may take
SPARE = 256 << 20  # bytes that are left while memory is short in serving
SETTING = re.compile(
    r"--[a-z][a-z-]+|memory_utilization|kv_cache_memory_bytes|max_model_len|max_num_batched_tokens|max_num_seqs"
    r"|tensor_parallel_size|quantization"
)
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def items(settings: Settings) -> list[Item]:
    """Each in a process of its own, as far as they spoil it."""
    return [Item("load", 10, 180), Item("profile", 10, 180), Item("serve", 20, 240)]


def run(item: str, settings: Settings, result_log: ResultLog) -> None:
    """See the module."""
    {"load": _load, "profile": _profile, "serve": _serve}[item](settings, result_log)


def _load(settings: Settings, result_log: ResultLog) -> None:
    room, own = _room(settings)
    hidden, inner = (4096, 14336) if own else (512, 2048)
    layer_bytes = 2 * (3 * hidden * inner + int(2.5 * hidden**2))
    layers = 3 * room // (2 * layer_bytes)
    folder = _model(settings, "too-large", hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers)
    _expect_refusal("load", folder, {"max_model_len": 512}, settings, result_log)


def _profile(settings: Settings, result_log: ResultLog) -> None:
    room, own = _room(settings)
    tokens = 1 << 16 if own else 1 << 13
    # What the gate and the other half make of a step's tokens, in 16 bits, is twice what there is.
    inner = 2 * room // (2 * 2 * tokens) // 64 * 64
    folder = _model(settings, "wide", hidden_size=64, intermediate_size=inner, num_hidden_layers=1)
    sizes = {"max_model_len": 4096, "max_num_batched_tokens": tokens}
    _expect_refusal("profile", folder, sizes, settings, result_log)


def _serve(settings: Settings, result_log: ResultLog) -> None:
    from mvllm import LLM, SamplingParams
    from mvllm.messages.inputs import TokensPrompt

    _, own = _room(settings)
    # A step of 8,192 tokens takes 8 GiB (on the host 2 GiB): more than is kept back, or found in pieces.
    inner = (1 << 18) if own else (1 << 16)
    folder = _model(settings, "served", hidden_size=64, intermediate_size=inner, num_hidden_layers=1)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    short = TokensPrompt(prompt_token_ids=[5, 6, 7])
    long = TokensPrompt(prompt_token_ids=[9 + i % 400 for i in range(8000)])
    with LLM(
        **_arguments(folder, settings),
        max_model_len=8192,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
    ) as llm:

        def tokens() -> list[int]:
            return list(llm.generate([short], params, use_tqdm=False)[0].outputs[0].token_ids)

        before = tokens()
        message = ""
        with _scarcity(settings, own):
            try:
                output = llm.generate([long], params, use_tqdm=False)[0].outputs[0]
                message = str(output.error or "")
                if not message:
                    result_log.add(
                        Row("oom", "serve", "serve: error", FAILED, note="memory sufficed: nothing was tried")
                    )
            except Exception as e:
                traceback.print_exc()
                message = f"{type(e).__name__}: {e}"
        if message:
            _judge("serve: error", "serve", message, result_log)
        try:
            after = tokens()
        except Exception as e:
            note = f"the engine did not survive: {type(e).__name__}: {e}"
            result_log.add(Row("oom", "serve", "serve: afterwards", FAILED, note=note))
            return
    same = after == before
    note = "the next request is answered as before" if same else f"other tokens: {before}, then {after}"
    result_log.add(Row("oom", "serve", "serve: afterwards", OK if same else FAILED, note=note))


def _expect_refusal(name: str, folder: Path, sizes: dict[str, Any], settings: Settings, result_log: ResultLog) -> None:
    from mvllm import LLM
    from mvllm.errors import MvllmError

    with contextlib.nullcontext() if _room(settings)[1] else _address_space(HOST_ROOM):
        try:
            with LLM(**_arguments(folder, settings), **sizes):
                result_log.add(Row("oom", name, name, FAILED, note="it started: what was asked for fits after all"))
        except MvllmError as e:
            _judge(name, name, str(e), result_log)
        except Exception as e:
            traceback.print_exc()
            note = f"not in the user's terms: {type(e).__name__}: {e}"
            result_log.add(Row("oom", name, name, FAILED, note=note))


def _judge(name: str, item: str, message: str, result_log: ResultLog) -> None:
    """A message must speak of memory, and name a setting."""
    speaks = re.search(r"memory|fit|allocat", message) is not None
    found = SETTING.search(message)
    missing = "" if speaks and found else "no word of memory: " if not speaks else "no setting that helps: "
    result_log.add(Row("oom", item, name, FAILED if missing else OK, note=missing + message))


def _arguments(folder: Path, settings: Settings) -> dict[str, Any]:
    return {
        "model": str(folder),
        "platform": settings.platform,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "max_num_seqs": 8,
    }


def _model(settings: Settings, name: str, **values: int) -> Path:
    folder = settings.scratch / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**_LLAMA, **values}))
    return folder


def _room(settings: Settings) -> tuple[int, bool]:
    """Bytes that an engine finds, and whether the device has memory of its own."""
    from mvllm.platform.choose import choose_platform
    from mvllm.platform.discovery import discover

    [candidate] = discover(only=settings.platform)
    devices = candidate.probe.devices if candidate.probe else ()
    total = devices[0].memory_bytes if devices else None
    if total is None or choose_platform(settings.platform).platform.capabilities.unified_memory:
        return HOST_ROOM, False
    return total, True


@contextlib.contextmanager
def _address_space(more: int) -> Iterator[None]:
    """This process may map so many bytes beyond what it has mapped."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def _scarcity(settings: Settings, own: bool) -> Iterator[None]:
    """Memory is short for everyone."""
    if not own:
        with _address_space(SPARE):
            yield
        return
    command = [sys.executable, "-m", "tests.gpu.memory_holder", settings.platform, str(SPARE)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        said = holder.stdout.readline()
        try:
            assert said.startswith("holds"), f"The memory holder failed: {said!r}"
            yield
        finally:
            holder.stdin.close()
            holder.wait(60)
