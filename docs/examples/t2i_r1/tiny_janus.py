"""A Janus model small enough for a CPU: its checkpoint, its supervised training, and its log-probabilities.

It is `JanusForConditionalGeneration` of transformers. Text ids come first and code c of a picture has the id
`len(WORDS) + c`, as in the engine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from shapes import (
    BEGIN_IMAGE,
    BOS,
    CELL,
    COLOURS,
    EOS,
    GRID,
    NUM_CODES,
    PAD,
    RGB,
    SHAPES,
    WORD_ID,
    WORDS,
    Scene,
    Task,
)
from torch import nn
from torch.nn import functional
from transformers import JanusConfig, JanusForConditionalGeneration
from transformers.models.janus.modeling_janus import JanusVQVAE

FIRST_CODE = len(WORDS)  # id of code 0
HIDDEN = 96


def make_model(seed: int = 0) -> JanusForConditionalGeneration:
    """A new model. All weights are random but those of the VQ decoder, which paints the colour of each code."""
    torch.manual_seed(seed)
    config = JanusConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": len(WORDS),
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},  # short sequences
            "bos_token_id": WORD_ID[BOS],
            "eos_token_id": WORD_ID[EOS],
            "pad_token_id": WORD_ID[PAD],
            "tie_word_embeddings": False,
        },
        vision_config={  # reads pictures, which nothing here does: as small as can be
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": GRID * CELL,
            "patch_size": CELL,
            "projection_dim": HIDDEN,
            "mlp_ratio": 1.0,
            "depth": 1,
            "num_image_tokens": NUM_CODES,
        },
        vq_config={
            "embed_dim": len(RGB),
            "num_embeddings": len(RGB),
            "latent_channels": len(RGB),
            "base_channels": 64,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "projection_dim": HIDDEN,
            "image_token_embed_dim": HIDDEN,
        },
        image_token_id=WORD_ID[PAD],
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = JanusForConditionalGeneration(config)
    model.generation_config.update(
        bos_token_id=WORD_ID[BOS],
        eos_token_id=WORD_ID[EOS],
        pad_token_id=WORD_ID[PAD],
        guidance_scale=5,
    )
    # The unconditional prompt of guidance keeps this token. `update` ignores names that are no attribute yet.
    model.generation_config.generation_kwargs = {"boi_token_id": WORD_ID[BEGIN_IMAGE]}
    for module in trained_modules(model):
        module.apply(_draw_weights)
    write_decoder(model.model.vqmodel)
    return model


def _draw_weights(module: nn.Module) -> None:
    """Draws weights for a narrow model, for which transformers' default deviation of 0.02 is too small."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)


@torch.no_grad()
def write_decoder(vq: JanusVQVAE) -> None:
    """Writes the weights of a VQ decoder in which code c is a square of the colour `RGB[c]`.

    The vector of code c has a one at index c. Channel 2 j is 1 where the code is j and -1 elsewhere, and channel
    2 j + 1 is its negative, so group normalization of the pair changes nothing. Residual and attention blocks add 0.
    """
    vq.quantize.embedding.weight.copy_(torch.eye(len(RGB)))
    for parameter in [*vq.post_quant_conv.parameters(), *vq.decoder.parameters()]:
        parameter.zero_()
    vq.post_quant_conv.weight[:, :, 0, 0] = torch.eye(len(RGB))

    decoder, middle = vq.decoder, (slice(None), slice(None), 1, 1)  # the middle of a 3 x 3 kernel
    channels, code = torch.arange(2 * len(RGB)), torch.arange(2 * len(RGB)) // 2
    sign = 1 - 2.0 * (channels % 2)
    decoder.conv_in.weight[channels, code, 1, 1] = 2 * sign
    decoder.conv_in.bias[channels] = -sign
    decoder.up[0].upsample.conv.weight[middle] = torch.eye(decoder.conv_in.out_channels)
    decoder.norm_out.weight.fill_(1.0)
    colours = torch.from_numpy(RGB / 127.5 - 1).float()  # [codes, 3]
    # The activation x * sigmoid(x) is 0.73 at 1 and -0.27 at -1: the difference is 1.
    decoder.conv_out.weight[:, channels[::2], 1, 1] = colours.T
    decoder.conv_out.bias.copy_(-functional.silu(torch.tensor(-1.0)) * colours.sum(0))


def trained_modules(model: JanusForConditionalGeneration) -> list[nn.Module]:
    """All modules of generation but the VQ decoder."""
    inner = model.model
    images = [inner.generation_embeddings, inner.generation_aligner, inner.generation_head]
    return [inner.language_model, model.lm_head, *images]


# ------------------------------------------------------------------------------------------------------ teacher forcing


def log_probs(
    model: JanusForConditionalGeneration, sequences: Sequence[tuple[list[int], list[int], list[int]]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The log-probability of every token of plans and pictures, without guidance.

    Args:
        model: The model.
        sequences: Prompt ids, plan ids (up to the id that begins the picture), and the codes, of each sequence.

    Returns:
        Four tensors [sequences, length - 1], whose column i belongs to token i + 1: the log-probabilities, float32 and
        0 elsewhere, the positions of plans and those of codes, bool, and the ids.
    """
    length = max(len(prompt) + len(plan) + len(codes) for prompt, plan, codes in sequences)
    ids = torch.full((len(sequences), length), WORD_ID[PAD])
    is_plan = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (prompt, plan, codes) in enumerate(sequences):
        start, end = len(prompt), len(prompt) + len(plan)
        ids[row, :end] = torch.tensor(prompt + plan)
        ids[row, end : end + len(codes)] = torch.tensor(codes) + FIRST_CODE
        is_plan[row, start:end] = True
    is_code = ids >= FIRST_CODE

    inner = model.model
    embeds = inner.language_model.embed_tokens(ids.where(~is_code, 0))
    codes = inner.generation_aligner(inner.generation_embeddings(ids[is_code] - FIRST_CODE))
    embeds = embeds.masked_scatter(is_code[..., None], codes)
    hidden = inner.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state[:, :-1]  # padding is last

    targets, is_plan, is_code = ids[:, 1:], is_plan[:, 1:], is_code[:, 1:]
    result = torch.zeros(targets.shape)
    text_loss = functional.cross_entropy(model.lm_head(hidden[is_plan]), targets[is_plan], reduction="none")
    code_logits = inner.generation_head(hidden[is_code])
    code_loss = functional.cross_entropy(code_logits, targets[is_code] - FIRST_CODE, reduction="none")
    result = result.masked_scatter(is_plan, -text_loss).masked_scatter(is_code, -code_loss)
    return result, is_plan, is_code, targets


# -------------------------------------------------------------------------------------------------- supervised training


def noisy_sample(task: Task, rng: random.Random) -> tuple[list[int], list[int], list[int]]:
    """A sample of a bad teacher.

    In 40 % of the plans the colour is any, in 25 % of the pictures the shape is any. One sample in ten has padding for
    prompt and plan: the unconditional prompt of guidance.
    """
    asked = task.scene
    colour = rng.choice(list(COLOURS)) if rng.random() < 0.4 else asked.colour
    planned = Scene(colour, asked.shape, asked.place)
    shape = rng.choice(list(SHAPES)) if rng.random() < 0.25 else asked.shape
    prompt, plan, codes = task.prompt(), planned.plan(), Scene(colour, shape, asked.place).draw()
    if rng.random() < 0.1:
        unconditional = [WORD_ID[PAD]] * (len(prompt) + len(plan) - 2)
        prompt, plan = [WORD_ID[BOS], *unconditional, WORD_ID[BEGIN_IMAGE]], []
    return prompt, plan, codes


def train_supervised(
    model: JanusForConditionalGeneration, tasks: list[Task], steps: int, batch: int = 16, lr: float = 3e-3
) -> float:
    """Trains plans and codes on the samples of the bad teacher. Returns the last loss."""
    rng = random.Random(0)
    parameters = [parameter for module in trained_modules(model) for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps)
    for _ in range(steps):
        result, is_plan, is_code, targets = log_probs(
            model, [noisy_sample(rng.choice(tasks), rng) for _ in range(batch)]
        )
        painted = is_code & (targets > FIRST_CODE)
        loss = -result[is_plan].mean() - result[is_code].mean() - result[painted].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    return loss.item()
