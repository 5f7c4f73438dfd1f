"""Outputs of a wanted form: from a schema, pattern or grammar to the tokens that may come next.

    InputProcessor      is the wish acceptable at all (check_available; StructuredOutputsParams checks itself)
    EngineCore ── submit ──> StructuredOutputManager ── thread ──> GrammarSandbox     a killable process tries it first
        │                                        └──────> llguidance       then it is compiled here, and kept
        └── collect ── SequenceGrammar ──> Scheduler      one per sequence: mask of the next token, accept(token)

                                    │
                                    └── MaskWorker        expensive masks: on another thread, within a budget

The engine's own thread never compiles. Nothing here knows tensors or rows.
"""
