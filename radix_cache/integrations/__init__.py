"""Other people's engines on this cache: one module each, importing what it alone needs.

`transformers`: Hugging Face causal language models, with their KV in our blocks. Extra ``demo``.
"""
