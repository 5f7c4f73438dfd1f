"""Models that have no file of their own here: transformers' modules, with our attention and linear layers in them.

    transformers' class ──on the meta device──> skeleton ──dry run──> what its attention asks for, and what it does that
                                                   │                  a paged cache cannot serve: refused
                                                   └──assemble──> our Linear, VocabEmbedding, LMHead and Attention in
                                                                  place of its own; the rest as it is

The dry run knows nothing of families. It asks the model itself: the model runs once without data, and tells at each
attention which heads, scale, mask, cap and sinks it wants.
"""
