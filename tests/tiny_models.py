"""Small random models of several kinds of attention, the same in every process."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Gemma3TextConfig, LlamaConfig, MambaConfig

_SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,  # else every token is about as likely as any other
}

_CONFIGS = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "gqa": lambda: LlamaConfig(**_SIZES, num_key_value_heads=2),
    "mla": lambda: DeepseekV3Config(
        **_SIZES,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=2,  # no experts
    ),
    "sliding": lambda: Gemma3TextConfig(
        **_SIZES,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "state space": lambda: MambaConfig(vocab_size=100, hidden_size=16, num_hidden_layers=1, state_size=4),
}

MODELS = ("llama", "gqa", "mla", "sliding")


@cache
def tiny_model(name: str) -> Any:
    """Return the model of that name, on the CPU."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(_CONFIGS[name](), dtype=torch.float32).eval()
