"""Checkpoints of EAGLE heads as they are published, and what they compute, in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.model_zoo import VOCAB_SIZE

SIZE, MLP_SIZE, HEADS, KV_HEADS = 64, 96, 4, 2
HEAD_SIZE = SIZE // HEADS
DRAFT_VOCAB = 200
EPS = 1e-5

CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": DRAFT_VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": MLP_SIZE,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 32,  # drafts go on behind it
    "rms_norm_eps": EPS,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def layer_tensors(
    name: str, input_size: int, generator: torch.Generator, kv_heads: int = KV_HEADS
) -> dict[str, torch.Tensor]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 2 / shape[-1] ** 0.5

    return {
        f"{name}.self_attn.q_proj.weight": draw(SIZE, input_size),
        f"{name}.self_attn.k_proj.weight": draw(kv_heads * HEAD_SIZE, input_size),
        f"{name}.self_attn.v_proj.weight": draw(kv_heads * HEAD_SIZE, input_size),
        f"{name}.self_attn.o_proj.weight": draw(SIZE, SIZE),
        f"{name}.mlp.gate_proj.weight": draw(MLP_SIZE, SIZE),
        f"{name}.mlp.up_proj.weight": draw(MLP_SIZE, SIZE),
        f"{name}.mlp.down_proj.weight": draw(SIZE, MLP_SIZE),
        f"{name}.post_attention_layernorm.weight": 1 + 0.2 * torch.randn(SIZE, generator=generator),
    }


def norm_tensors(*names: str, size: int = SIZE, seed: int = 9) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"{name}.weight": 1 + 0.2 * torch.randn(size, generator=generator) for name in names}


def eagle3_tensors(num_layers: int = 1, num_states: int = 3) -> dict[str, torch.Tensor]:
    """The tensors of an EAGLE-3 head with a draft vocabulary, and without an embedding of its own."""
    generator = torch.Generator().manual_seed(1)
    first = "midlayer" if num_layers == 1 else "layers.0"
    tensors = layer_tensors(first, 2 * SIZE, generator)
    for number in range(1, num_layers):
        tensors |= layer_tensors(f"layers.{number}", SIZE, generator) | norm_tensors(f"layers.{number}.input_layernorm")
    chosen = torch.randperm(VOCAB_SIZE, generator=generator)[:DRAFT_VOCAB].sort().values
    return {
        **tensors,
        **norm_tensors(f"{first}.input_layernorm", f"{first}.hidden_norm", "norm"),
        "fc.weight": torch.randn(SIZE, num_states * SIZE, generator=generator) / 8,
        "lm_head.weight": torch.randn(DRAFT_VOCAB, SIZE, generator=generator),
        "d2t": chosen - torch.arange(DRAFT_VOCAB),
        "t2d": torch.isin(torch.arange(VOCAB_SIZE), chosen),
    }


def write_head(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    values = {key: value for key, value in {**CONFIG, **config}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def head_settings(folder: Path, **settings: Any) -> dict[str, Any]:
    """`speculative_config` with a head."""
    return {"model": str(folder), "num_speculative_tokens": 3, "adaptive": False, **settings}


def write_eagle3(folder: Path, **config: Any) -> Path:
    """A head for a model of three layers: it reads the states before the layers 0, 1 and 2."""
    num_layers = config.get("num_hidden_layers", 1)
    layers = config.setdefault("eagle_aux_hidden_state_layer_ids", [0, 1, 2])
    tensors = eagle3_tensors(num_layers, len(layers))
    if config.get("norm_before_fc"):
        tensors |= norm_tensors("input_norm", size=3 * SIZE)
    if config.get("fc_norm"):
        tensors |= norm_tensors(*(f"fc_norm.{i}" for i in range(len(layers))), seed=4)
    if "ptd_token_id" in config:
        tensors["mask_hidden"] = torch.randn(1, 1, 3 * SIZE, generator=torch.Generator().manual_seed(8))
    if config.pop("own_embedding", False):
        tensors["embed_tokens.weight"] = torch.randn(VOCAB_SIZE, SIZE, generator=torch.Generator().manual_seed(7))
    return write_head(folder, tensors, **config)


def write_eagle(folder: Path, *, bias: bool = False) -> Path:
    generator = torch.Generator().manual_seed(3)
    tensors = layer_tensors("layers.0", SIZE, generator)
    tensors["fc.weight"] = torch.randn(SIZE, 2 * SIZE, generator=generator) / 8
    if bias:
        tensors["fc.bias"] = torch.randn(SIZE, generator=generator)
    return write_head(folder, tensors, architectures=["EagleLlamaForCausalLM"], draft_vocab_size=None)


def change_little(checkpoint: Path, folder: Path, noise: float = 0.0) -> Path:
    """A copy of a Llama whose layers add `noise` times what they did: with 0, the next token depends on the last one.

    Args:
        checkpoint: The Llama.
        folder: Where the copy is written.
    """
    tensors = load_file(checkpoint / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = noise * tensor
        elif "norm" in name:
            tensors[name] = torch.ones_like(tensor)
    folder.mkdir(parents=True)
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def agreeing_head(kind: str, folder: Path, *, embedding: torch.Tensor | None = None) -> Path:
    """A head that predicts the next token from the last one alone, with the output matrix of the model.

    In EAGLE-3 the attention does it: with long queries and keys each position attends to itself, and its value is the
    embedding. With parallel drafts the first draft token is that one.

    Args:
        kind: `eagle`, `eagle3` or `parallel`.
        folder: Where it is written.
        embedding: Of the head; without one, it uses that of the model.
    """
    identity, zeros = torch.eye(SIZE), torch.zeros(SIZE, SIZE)
    name = "layers.0" if kind == "eagle" else "midlayer"
    tensors = layer_tensors(name, 2 * SIZE, torch.Generator(), kv_heads=HEADS)
    tensors = {name: torch.ones(SIZE) if "norm" in name else torch.zeros_like(t) for name, t in tensors.items()}
    config: dict[str, Any] = {"draft_vocab_size": None, "num_key_value_heads": HEADS}
    if embedding is not None:
        tensors["embed_tokens.weight"] = embedding
    if kind == "eagle":
        tensors = {name: tensor[:, :SIZE] if "self_attn" in name else tensor for name, tensor in tensors.items()}
        tensors["fc.weight"] = torch.cat((identity, zeros), dim=1)
        return write_head(folder, tensors, architectures=["EagleLlamaForCausalLM"], **config)
    for which, scale in (("q", 30.0), ("k", 30.0), ("v", 1.0)):
        tensors[f"midlayer.self_attn.{which}_proj.weight"] = torch.cat((scale * identity, zeros), dim=1)
    tensors["midlayer.self_attn.o_proj.weight"] = identity
    tensors["fc.weight"] = torch.zeros(SIZE, 3 * SIZE)
    tensors |= {f"{name}.weight": torch.ones(SIZE) for name in ("midlayer.input_layernorm", "norm")}
    tensors["midlayer.hidden_norm.weight"] = torch.zeros(SIZE)
    if kind == "parallel":
        config["ptd_token_id"] = 317
        tensors["mask_hidden"] = torch.zeros(1, 1, 3 * SIZE)
    return write_head(folder, tensors, eagle_aux_hidden_state_layer_ids=[0, 1, 2], norm_before_residual=True, **config)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotate(x: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    """Rotary embedding of [heads, T, head_size] at the positions 0 to T - 1."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(x: torch.Tensor, tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Causal self-attention of [T, input_size] at the positions 0 to T - 1."""

    def heads(which: str) -> torch.Tensor:
        return (x @ tensors[f"{name}.self_attn.{which}_proj.weight"].T).unflatten(-1, (-1, HEAD_SIZE)).transpose(0, 1)

    q, k, v = rotate(heads("q")), rotate(heads("k")), heads("v")
    k, v = (each.repeat_interleave(HEADS // len(each), dim=0) for each in (k, v))
    scores = q @ k.transpose(1, 2) / HEAD_SIZE**0.5
    scores = scores.masked_fill(~torch.ones(len(x), len(x)).tril().bool(), float("-inf"))
    found = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    return found @ tensors[f"{name}.self_attn.o_proj.weight"].T


def mlp(x: torch.Tensor, tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    gate, up, down = (tensors[f"{name}.mlp.{each}_proj.weight"] for each in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def layer(x: torch.Tensor, tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A Llama layer; one without a first norm if the tensors have none."""
    norm = tensors.get(f"{name}.input_layernorm.weight")
    x = x + attention(x if norm is None else rms_norm(x, norm), tensors, name)
    return x + mlp(rms_norm(x, tensors[f"{name}.post_attention_layernorm.weight"]), tensors, name)


class ReferenceHead:
    """A head as its paper describes it, over whole sequences.

    Args:
        folder: The head's checkpoint.
        target: Tensors of the served model.
    """

    def __init__(self, folder: Path, target: dict[str, torch.Tensor]) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(folder / "model.safetensors")
        self.embedding = self.tensors.get("embed_tokens.weight", target["model.embed_tokens.weight"])
        self.head = self.tensors.get("lm_head.weight", target.get("lm_head.weight", self.embedding))
        self.is_eagle3 = "norm.weight" in self.tensors
        self.first = "midlayer" if "midlayer.mlp.up_proj.weight" in self.tensors else "layers.0"

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """[T, states * size] to [T, size]."""
        if "input_norm.weight" in self.tensors:
            states = rms_norm(states, self.tensors["input_norm.weight"])
        if "fc_norm.0.weight" in self.tensors:
            parts = states.split(SIZE, dim=-1)
            states = torch.cat([rms_norm(p, self.tensors[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)], dim=-1)
        return states @ self.tensors["fc.weight"].T

    def run(self, token_ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """What the next pass reads, [T, size]: of tokens behind each position and the states there."""
        embeddings, tensors, first = self.embedding[token_ids], self.tensors, self.first
        if not self.is_eagle3:
            fused = torch.cat((embeddings, states), dim=-1) @ tensors["fc.weight"].T
            return layer(fused + tensors.get("fc.bias", 0), tensors, first)
        normalised = rms_norm(states, tensors[f"{first}.hidden_norm.weight"])
        residual = normalised if self.config.get("norm_before_residual") else states
        both = torch.cat((rms_norm(embeddings, tensors[f"{first}.input_layernorm.weight"]), normalised), dim=-1)
        x = residual + attention(both, tensors, first)
        x = x + mlp(rms_norm(x, tensors[f"{first}.post_attention_layernorm.weight"]), tensors, first)
        for number in range(1, self.config["num_hidden_layers"]):
            x = layer(x, tensors, f"layers.{number}")
        return rms_norm(x, tensors["norm.weight"]) if self.config.get("norm_output") else x

    def token(self, state: torch.Tensor) -> int:
        """The most likely token, of the served model's vocabulary."""
        if self.is_eagle3 and not self.config.get("norm_output"):
            state = rms_norm(state, self.tensors["norm.weight"])
        found = int((self.head @ state).argmax())
        return found + int(self.tensors["d2t"][found]) if "d2t" in self.tensors else found

    def drafts(self, token_ids: list[int], states: torch.Tensor, count: int) -> list[int]:
        """Greedy draft tokens behind `token_ids`, T + 1 known tokens, with the states [T, size] of all but the last."""
        tokens, found = token_ids[1:], list[int]()
        for _ in range(count):
            results = self.run(torch.tensor(tokens), states)
            found.append(self.token(results[-1]))
            tokens, states = [*tokens, found[-1]], torch.cat((states, results[-1:]))
        return found

    def parallel_drafts(self, token_ids: list[int], states: torch.Tensor, count: int) -> list[int]:
        """Likewise, of one pass: positions behind the last known token read the mask token and the mask state."""
        mask = self.fuse(self.tensors["mask_hidden"].view(1, -1)).expand(count - 1, -1)
        tokens = [*token_ids[1:], *[self.config["ptd_token_id"]] * (count - 1)]
        results = self.run(torch.tensor(tokens), torch.cat((states, mask)))
        return [self.token(result) for result in results[len(states) - 1 :]]
