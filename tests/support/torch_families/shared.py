"""Components and arguments of calls that many pipelines have in common."""

from typing import Any

from support.tiny_tokenizers import t5_tokenizer

from .pictures import mask, picture
from .text import t5
from .weights import network, scheduler

# Arguments of small calls: from a picture, inside a mask, under control.
START: dict[str, Any] = {"image": picture, "strength": 0.6, "num_inference_steps": 4}
REPAINT = {**START, "mask_image": mask}
CONTROLLED = {"control_image": picture}

FLOW = scheduler("FlowMatchEulerDiscreteScheduler", shift=3.0)
SHIFTING = scheduler("FlowMatchEulerDiscreteScheduler", use_dynamic_shifting=True)
READ_T5 = {"text_encoder": t5, "tokenizer": t5_tokenizer}
PRIOR = network(
    "PriorTransformer", num_attention_heads=2, attention_head_dim=16, embedding_dim=32, num_layers=1
)
