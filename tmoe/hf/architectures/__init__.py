"""The table of Hugging Face's architectures: one file for each family, one line for each model_type.

next: hf/architectures/common.py, hf/architectures/olmoe.py
"""

from __future__ import annotations

from tmoe.hf.architectures import (
    afmoe,
    axk1,
    deepseek,
    dots,
    ernie,
    exaone,
    flex_olmo,
    flint,
    glm,
    glm45,
    gpt_oss,
    granite,
    hunyuan,
    llama,
    mellum,
    mimo,
    minimax,
    mistral4,
    mixtral,
    olmoe,
    qwen,
    qwen3_vl,
    solar,
)

# An export of a model without an original takes the first entry that computes it.
ARCHITECTURES = (
    llama.LLAMA,
    qwen.QWEN3,
    mixtral.MIXTRAL,
    qwen.QWEN2_MOE,
    qwen.QWEN3_MOE,
    deepseek.DEEPSEEK_V2,
    deepseek.DEEPSEEK_V3,
    olmoe.OLMOE,
    granite.GRANITEMOE,
    gpt_oss.GPT_OSS,
    granite.GRANITEMOESHARED,
    deepseek.KIMI_K2,
    deepseek.KIMI_K25,
    glm.GLM4_MOE_LITE,
    dots.DOTS1,
    solar.SOLAR_OPEN,
    hunyuan.HY_V3,
    glm45.GLM4_MOE,
    minimax.MINIMAX_M2,
    ernie.ERNIE4_5_MOE,
    exaone.EXAONE_MOE,
    mellum.MELLUM,
    flex_olmo.FLEX_OLMO,
    afmoe.AFMOE,
    hunyuan.HUNYUAN_V1_MOE,
    qwen3_vl.QWEN3_VL_MOE,
    glm45.GLM4V_MOE,
    granite.GRANITEMOE_SWA,
    flint.FLINT,
    mimo.MIMO_V2_FLASH,
    axk1.AXK1,
    mistral4.MISTRAL4,
)
