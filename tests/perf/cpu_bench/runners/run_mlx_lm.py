"""Runner of mlx-lm on MLX's CPU backend: its batch generator, weights in bf16 or quantized by MLX in groups of 64.

mlx-lm has no prefix cache of its own. If prompts share a prefix, its cache is computed once and given to all requests,
as mlx-lm's documentation shows for repeated prompts.
"""

from __future__ import annotations

import argparse
import copy
import importlib
from importlib.metadata import version

from protocol import Generate, Unavailable, serve

BITS = {"bf16": None, "int8": 8, "int4": 4}
GROUP = 64


def load(args: argparse.Namespace) -> tuple[Generate, str, str]:
    import mlx.core as mx
    import mlx.nn as nn
    import mlx_lm
    from mlx_lm.models.cache import make_prompt_cache

    if args.precision not in BITS:
        raise Unavailable(f"no weights of {args.precision}")
    mx.set_default_device(mx.cpu)
    module = importlib.import_module("mlx_lm.generate")  # the package has a function of the same name
    model, _ = mlx_lm.load(str(args.model))
    if bits := BITS[args.precision]:
        nn.quantize(model, group_size=GROUP, bits=bits)
    mx.eval(model.parameters())

    def generate(prompts: list, output: int, shared: int) -> list:
        caches = None
        if shared:
            cache = make_prompt_cache(model)
            model(mx.array([prompts[0][:shared]]), cache=cache)
            mx.eval([each.state for each in cache])
            caches = [copy.deepcopy(cache) for _ in prompts]
        generator = module.BatchGenerator(model, max_tokens=output)  # without stop tokens: end of text is ignored
        order = generator.insert([prompt[shared:] for prompt in prompts], [output] * len(prompts), caches=caches)
        found: dict = {name: [] for name in order}
        while responses := generator.next_generated():
            for response in responses:
                found[response.uid].append(response.token)
        generator.close()
        return [found[name] for name in order]

    return generate, version("mlx-lm"), "CPU backend"


if __name__ == "__main__":
    serve(load)
