"""What the process that gloo ranks are forked from imports, and a graph that most of them ask for.

Nothing here may start a thread: a fork has none of them.
"""

from __future__ import annotations

import torch.distributed.device_mesh
import torch.distributed.tensor  # noqa: F401
from transformers.models.bert import modeling_bert  # noqa: F401
from transformers.models.gpt2 import modeling_gpt2  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

import placement.verify.processes  # noqa: F401
from tests.cases import toys

toys._captured()
