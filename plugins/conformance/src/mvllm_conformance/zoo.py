"""Tiny checkpoints with random weights, one per model family, and their expected outputs from transformers.

The oracle is transformers in float32 on the host, one prompt at a time. Prompts are chosen so that no greedy token is
near a tie: another order of summation cannot change a token, a wrong mask or rotary angle does.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mvllm.extension_api.testing import LLM, PromptType, TokensPrompt
from mvllm.plugin_api import Capabilities, SamplingParams
from mvllm_conformance.platform_under_test import PlatformUnderTest

VOCAB_SIZE = 320
NUM_TOKENS = 16
MAX_LEN = 640
"""Length of the models."""
ENGINE_LEN = 256
"""Default length of engines, enough for LENGTHS and NUM_TOKENS. With static shapes an engine compiles a program for
each combination of sizes within its limits, so a longer one takes more than twice as long to start."""
LONG: dict[str, Any] = {"max_model_len": MAX_LEN, "max_num_batched_tokens": MAX_LEN}
"""Settings of an engine for sequences of up to MAX_LEN tokens."""
CLEAR = 0.01
"""Minimum difference between the largest and the second largest logit at each generated position."""
TIE = {"float32": 0.0, "float16": 0.1, "bfloat16": 0.6}
"""Allowed difference between the largest logit and that of the generated token, by dtype, with the oracle's logits. It
is the effect of rounding the intermediate results of three layers, for logits with a spread of 3. Default: 1.0."""
LOGPROB_TOLERANCE = {"float32": 1e-3, "float16": 0.06, "bfloat16": 0.4}
"""Allowed difference of log-probabilities, by dtype."""

LENGTHS = (1, 7, 16, 33, 48, 90)
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_LLAMA = {**_SIZES, "intermediate_size": 192, "num_key_value_heads": 2}
_GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 256,
    "n_inner": 192,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": MAX_LEN,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _LLAMA),
    "qwen2": ("Qwen2Config", _LLAMA),
    "qwen3": ("Qwen3Config", {**_LLAMA, "head_dim": 64}),
    "mistral": ("MistralConfig", {**_LLAMA, "sliding_window": None}),
    "mistral-window": ("MistralConfig", {**_LLAMA, "sliding_window": 11}),
    "opt": ("OPTConfig", {**_SIZES, "ffn_dim": 192}),
    "gpt2": ("GPT2Config", _GPT2),
}
FAMILIES = tuple(_FAMILIES)
STATE_FAMILY = "bamba"
"""A family with attention and Mamba-2 layers, for platforms that claim `state`."""
_FURTHER_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    STATE_FAMILY: (
        "BambaConfig",
        {
            **_LLAMA,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_n_groups": 2,
            "mamba_d_state": 64,
            "mamba_chunk_size": 32,
        },
    ),
}


@dataclass(frozen=True)
class Oracle:
    """Prompts and their greedy continuations from transformers.

    Attributes:
        folder: The checkpoint.
        prompts: Token ids.
        tokens: [prompts][tokens]: greedy continuations.
    """

    folder: Path
    prompts: list[list[int]]
    tokens: list[list[int]]


class Zoo:
    """The checkpoints of one session, created on first use.

    Args:
        folder: Folder for the checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[str, Any] = {}
        self._oracles: dict[tuple[str, tuple[int, ...], int], Oracle] = {}

    def checkpoint(self, family: str) -> Path:
        """The folder of a family's checkpoint."""
        self._model(family)
        return self._folder / family

    def oracle(self, family: str, lengths: tuple[int, ...] = LENGTHS, num_tokens: int = NUM_TOKENS) -> Oracle:
        """Prompts of these lengths and their greedy continuations."""
        key = (family, lengths, num_tokens)
        if key not in self._oracles:
            rng = random.Random(family)
            found = [self._clear_prompt(family, length, num_tokens, rng) for length in lengths]
            prompts, tokens = [prompt for prompt, _ in found], [tokens for _, tokens in found]
            self._oracles[key] = Oracle(self.checkpoint(family), prompts, tokens)
        return self._oracles[key]

    @torch.inference_mode()
    def logits(self, family: str, token_ids: list[int]) -> torch.Tensor:
        """The oracle's logits after each token: float32 [tokens, vocabulary]."""
        found: torch.Tensor = self._model(family)(torch.tensor([token_ids])).logits[0].float()
        return found

    def _clear_prompt(
        self, family: str, length: int, num_tokens: int, rng: random.Random
    ) -> tuple[list[int], list[int]]:
        best: tuple[float, list[int], list[int]] | None = None
        for _ in range(12):
            prompt = [rng.randrange(2, VOCAB_SIZE) for _ in range(length)]
            tokens, lead = self._generate(family, prompt, num_tokens)
            if best is None or lead > best[0]:
                best = (lead, prompt, tokens)
            if lead >= CLEAR:
                break
        assert best is not None
        return best[1], best[2]

    @torch.inference_mode()
    def _generate(self, family: str, prompt: list[int], num_tokens: int) -> tuple[list[int], float]:
        """Greedy tokens, and the smallest difference between the two largest logits."""
        model, tokens, lead = self._model(family), [], math.inf
        ids, past = torch.tensor([prompt]), None
        caches = not model._is_stateful  # the names of caches with states differ between families
        for _ in range(num_tokens):
            output = model(ids, past_key_values=past, use_cache=True) if caches else model(ids)
            past = output.past_key_values if caches else None
            best = output.logits[0, -1].float().topk(2)
            tokens.append(int(best.indices[0]))
            lead = min(lead, float(best.values[0] - best.values[1]))
            ids = torch.tensor([tokens[-1:] if caches else prompt + tokens])
        return tokens, lead

    def _model(self, family: str) -> Any:
        if family not in self._models:
            import transformers

            name, settings = (_FAMILIES | _FURTHER_FAMILIES)[family]
            config = getattr(transformers, name)(**settings)
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            model = model.to(torch.float32).eval()
            draw_weights(model)
            model.save_pretrained(self._folder / family)
            self._models[family] = model
        return self._models[family]


@torch.no_grad()
def draw_weights(model: Any, seed: int = 0) -> None:
    """Fills a model with random weights; see `draw_weight`."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.copy_(draw_weight(name, parameter.shape, generator))


def draw_weight(
    name: str, shape: torch.Size, generator: torch.Generator, *, embedding_scale: float = 0.2
) -> torch.Tensor:
    """A random weight under which attention is peaked and logits are spread; float32.

    Args:
        name: Name of the parameter in transformers' model; it decides the scale.
        embedding_scale: Standard deviation of token embeddings.
    """
    noise = torch.randn(shape, generator=generator)
    if "norm" in name or ".ln_" in name:
        return 1 + 0.2 * noise if name.endswith("weight") else 0.05 * noise
    if name.endswith("dt_bias"):
        return 0.3 * noise - 2  # small time steps: a state keeps a token for some dozens of steps
    if len(shape) == 1:
        return 0.3 * noise
    if any(part in name for part in ("embed_positions", "wpe")):
        return 0.8 * noise
    if any(part in name for part in ("embed_tokens", "wte", "word_embeddings")):
        return embedding_scale * noise
    is_transposed = any(part in name for part in ("c_attn", "c_proj", "c_fc"))
    return noise * (1.4 / math.sqrt(shape[0 if is_transposed else 1]))


# -------------------------------------------------------------------------------------------- engines with the platform


def main_dtype(capabilities: Capabilities) -> str:
    """float32 if it is claimed, since tokens are exact then; else the platform's first dtype."""
    return "float32" if "float32" in capabilities.dtypes else capabilities.dtypes[0]


def tie_of(capabilities: Capabilities, dtype: str) -> float:
    """Allowed difference between the largest logit and a token's, for a compute dtype and its KV cache dtype."""
    stored = dtype if dtype in capabilities.kv_dtypes else (*capabilities.kv_dtypes, dtype)[0]
    return max(TIE.get(dtype, 1.0), TIE.get(stored, 1.0))


def make_llm(platform_under_test: PlatformUnderTest, folder: Path, **settings: Any) -> LLM:
    """An engine on the platform under test; a context manager that closes it.

    Args:
        settings: Arguments of `LLM`; `LONG` is for sequences of up to MAX_LEN tokens.
    """
    defaults: dict[str, Any] = {
        "platform": platform_under_test.name,
        "dtype": main_dtype(platform_under_test.capabilities),
        "skip_tokenizer_init": True,
        "max_model_len": ENGINE_LEN,
        "max_num_seqs": 8,
        "max_num_batched_tokens": ENGINE_LEN,
        "kv_cache_memory_bytes": 2**26,
        "seed": 0,
        "use_tqdm_on_load": False,
        "start_timeout": platform_under_test.start_timeout,
    }
    return LLM(str(folder), **(defaults | settings))


def generate(llm: LLM, prompts: list[list[int]], **settings: Any) -> list[Any]:
    """Greedy continuations of NUM_TOKENS tokens."""
    params = SamplingParams(
        **{"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False, **settings}
    )
    given: list[PromptType] = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    return llm.generate(given, params, use_tqdm=False)


def assert_tokens(zoo: Zoo, family: str, expected: Oracle, outputs: list[Any], tie: float) -> None:
    """Fails unless the outputs equal the oracle's, or, if `tie` is not 0, equal them up to ties.

    Up to ties means that the oracle's logit of each token, after the generated tokens before it, is within `tie` of the
    largest logit.
    """
    assert len(outputs) == len(expected.prompts)
    for prompt, wanted, output in zip(expected.prompts, expected.tokens, outputs, strict=True):
        found, where = list(output.outputs[0].token_ids), f"{family}, prompt of {len(prompt)} tokens"
        assert len(found) == len(wanted), where
        if tie == 0:
            assert found == wanted, where
            continue
        logits = zoo.logits(family, prompt + found)[len(prompt) - 1 : -1]
        short = logits.max(dim=1).values - logits.gather(1, torch.tensor(found).view(-1, 1)).flatten()
        assert float(short.max()) <= tie, f"{where}: a token lies {float(short.max()):.2f} below the best"
