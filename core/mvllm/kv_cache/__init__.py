"""Which request's keys and values stand in which block of the paged KV cache: bookkeeping only, no tensors."""
