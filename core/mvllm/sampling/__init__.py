"""From logits to tokens.

The order of operations, for each row on its own:

    mask, min_tokens -> penalties -> temperature -> min_p, top_k, top_p -> draw

Nothing here names a device: tensors are made where the logits are. What a step needs from the host goes up in one copy.
"""
