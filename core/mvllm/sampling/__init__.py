"""From logits to tokens.

The order of operations, for each row on its own:

    masks, min_tokens, bad words -> logit_bias -> penalties -> temperature -> min_p, top_k, top_p -> draw

Log-probabilities are those of the model's own logits, before any of this.

Nothing here names a device: tensors are made where the logits are. What a step needs from the host goes up in one copy.
"""
