"""Nodes for ComfyUI that generate at a `diffusax serve`; see README.md."""

from .nodes import Connect, ControlNet, Edit, Generate, Inpaint, Lora

NODE_CLASS_MAPPINGS = {
    "DiffusaxConnect": Connect,
    "DiffusaxGenerate": Generate,
    "DiffusaxEdit": Edit,
    "DiffusaxInpaint": Inpaint,
    "DiffusaxLora": Lora,
    "DiffusaxControlNet": ControlNet,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "DiffusaxConnect": "Connect (diffusax)",
    "DiffusaxGenerate": "Generate (diffusax)",
    "DiffusaxEdit": "Edit (diffusax)",
    "DiffusaxInpaint": "Inpaint (diffusax)",
    "DiffusaxLora": "LoRA (diffusax)",
    "DiffusaxControlNet": "ControlNet (diffusax)",
}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
