"""Sampling: from logits to token ids.

The order of operations, for each row on its own:

    masks, min_tokens, bad words -> logit_bias -> penalties -> temperature -> min_p, top_k, top_p -> draw

Log-probabilities are those of the model's own logits, before any of this.

Tensors are made on the device of the logits. One copy per step brings what is needed from the host.
"""
