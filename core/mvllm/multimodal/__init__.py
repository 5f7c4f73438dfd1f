"""Items of prompts beside text: fetches and decodes them, and runs the model's processor on them.

    front end                          processor's process
    ---------                          -------------------
    fetches URLs, reads files    ->    decodes bytes (Pillow, PyAV), runs the model's processor of transformers
    places items in the prompt   <-    features, and the text that replaces the placeholder of each item

Nothing of Pillow, PyAV, torch or transformers is imported outside of the processor's process.
"""
