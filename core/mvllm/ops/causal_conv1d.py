"""The operation `causal_conv1d`: a short convolution over the tokens of each sequence, one filter per channel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mvllm.ops.schema import OpSchema
from mvllm.ops.state_slots import advance_states

ACTIVATIONS = ("silu", "none")


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    query_start_loc: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    max_query_len: int,
    activation: str,
) -> torch.Tensor:
    """Weighted sum of each channel's last kernel_size inputs within its sequence.

        y[t, c] = activation(bias[c] + sum over k of weight[c, k] · x[t - kernel_size + 1 + k, c])

    Inputs before the tokens of the step come from the state, which holds a sequence's last kernel_size - 1 inputs.

    Args:
        x: [T, channels], compute dtype; the last dimension is contiguous.
        weight: [channels, kernel_size], compute dtype.
        bias: [channels] or None, compute dtype.
        state: [num_slots + 1, channels, kernel_size - 1], compute dtype, the oldest input first; updated in place.
        query_start_loc: [R + 1], int32: tokens query_start_loc[i] to query_start_loc[i + 1] belong to request i. Tokens
            past the last are padding; their results are unspecified, but finite for finite inputs.
        read_slots: [R], int32: the slot of each request's state before the step, or -1 for zeros.
        write_slots: [R], int32: the slot of its state after the step, or -1 for none. A request without tokens writes
            nothing. A slot that one request writes is not read by another one.
        max_query_len: The most tokens of a request. If it is 1 and R = T, token i belongs to request i, and the
            function does not wait for the device.
        activation: `silu` or `none`.

    Returns:
        [T, channels], compute dtype; computed in float32.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    filters = weight.to(wide)
    kernel_size = weight.shape[1]

    def finish(y: torch.Tensor) -> torch.Tensor:
        y = y if bias is None else y + bias.to(wide)
        return F.silu(y) if activation == "silu" else y

    def one_token(tail: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.cat((tail, token.unsqueeze(-1)), dim=-1)
        return finish((window.to(wide) * filters).sum(dim=-1)), window[..., 1:]

    def sequence(tail: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.cat((tail.t(), tokens))
        windows = inputs.to(wide).unfold(0, kernel_size, 1)  # [L, channels, kernel_size]
        return finish((windows * filters).sum(dim=-1)), inputs[len(tokens) :].t()

    step = query_start_loc, read_slots, write_slots, max_query_len
    return advance_states(one_token, sequence, (x,), x.new_zeros(x.shape), state, *step)


CAUSAL_CONV1D = OpSchema(
    causal_conv1d,
    facts={"channels": "channels on this rank", "kernel_size": "inputs that a result depends on"},
    updates=("state",),
)
