"""The tables of the families that crosscut knows, registered in ``FAMILIES``."""

from crosscut.sharding.families.gpt import FALCON, GPT2, GPT_NEOX, OPT
from crosscut.sharding.families.llama import (
    COHERE,
    GEMMA,
    GEMMA2,
    GEMMA3,
    LLAMA,
    MISTRAL,
    OLMO2,
    PHI2,
    PHI3,
    QWEN2,
    QWEN3,
    STARCODER2,
)
from crosscut.sharding.families.moe import DEEPSEEK_V2, DEEPSEEK_V3, MIXTRAL, QWEN2_MOE, QWEN3_MOE
from crosscut.sharding.family import FAMILIES

FAMILIES.register(LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI3, OLMO2, COHERE, STARCODER2, PHI2)
FAMILIES.register(MIXTRAL, QWEN2_MOE, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3)
FAMILIES.register(GPT2, GPT_NEOX, OPT, FALCON)

__all__ = ["FAMILIES"]
