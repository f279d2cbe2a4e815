"""LoRA files of random numbers in every format, for networks of PyTorch."""

import json

import torch
from safetensors.torch import save_file

KOHYA = {"unet": "lora_unet_", "text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}


def layers_of(network, *ends):
    """The linear layers and convolutions whose names end so, with their weights."""
    kinds = (torch.nn.Linear, torch.nn.Conv2d)
    found = {
        name.removesuffix(".base_layer"): layer.weight
        for name, layer in network.named_modules()
        if isinstance(layer, kinds) and ".lora_" not in name
    }
    return {name: weight for name, weight in found.items() if name.endswith(ends or ("",))}


def numbers(shape, generator, scale=0.5):
    fan_in = torch.Size(shape).numel() / shape[0]
    return torch.randn(shape, generator=generator) * scale * fan_in**-0.5


def pair(weight, rank, generator):
    """A and B of a layer in PyTorch's layout."""
    ones = (1,) * (weight.ndim - 2)
    up = (weight.shape[0], rank, *ones)
    return numbers((rank, *weight.shape[1:]), generator, 0.7), numbers(up, generator, 0.7)


def write_peft(path, networks, ends, ranks=(4, 6), alphas=(3.0, 8.0), *, metadata=True):
    """diffusers' format, with ranks and alphas that differ between layers."""
    generator = torch.Generator().manual_seed(len(ends))
    tensors, header = {}, {}
    for component, network in networks.items():
        found = layers_of(network, *ends[component])
        for i, (name, weight) in enumerate(found.items()):
            down, up = pair(weight, ranks[i % 2], generator)
            tensors[f"{component}.{name}.lora_A.weight"] = down
            tensors[f"{component}.{name}.lora_B.weight"] = up
        odd = list(found)[1::2]
        options = {
            "r": ranks[0],
            "lora_alpha": alphas[0],
            "rank_pattern": dict.fromkeys(odd, ranks[1]),
            "alpha_pattern": dict.fromkeys(odd, alphas[1]),
            "target_modules": list(found),
        }
        header |= {f"{component}.{key}": value for key, value in options.items()}
    text = {"lora_adapter_metadata": json.dumps(header)} if metadata else {}
    save_file(tensors, path, metadata={"format": "pt", **text})
    return path


def write_older(path, networks):
    """The keys of diffusers before it used PEFT."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for component, network in networks.items():
        ends = ["to_q", "to_k", "to_v", "to_out.0", "q_proj", "k_proj", "v_proj", "out_proj", "fc1"]
        for name, weight in layers_of(network, *ends).items():
            layer, _, end = name.removesuffix(".0").rpartition(".")
            if component == "unet":
                key = f"unet.{layer}.processor.{end}_lora"
            else:
                text = f"{component}.text_model.{layer.removeprefix('text_model.')}"
                old = f"to_{end.removesuffix('_proj')}_lora"
                key = f"{text}.fc1.lora_linear_layer" if end == "fc1" else f"{text}.{old}"
            down, up = pair(weight, 4, generator)
            tensors |= {f"{key}.down.weight": down, f"{key}.up.weight": up}
    save_file(tensors, path)
    return path


def write_kohya(path, networks, ends, rename=None, rank=4):
    """kohya's format with alphas; rename: the layers' names in the original layout, if any."""
    generator = torch.Generator().manual_seed(17)
    tensors = {}
    for component, network in networks.items():
        for name, weight in layers_of(network, *ends[component]).items():
            down, up = pair(weight, rank, generator)
            if component == "unet" and rename is not None:
                name = rename[name]
            if component != "unet" and not name.startswith(("text_model", "text_projection")):
                name = f"text_model.{name}"
            key = KOHYA[component] + name.replace(".", "_")
            if len(networks) == 2:
                key = key.replace("lora_te1_", "lora_te_")
            tensors |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}
            # diffusers finds no alpha of attention but the most frequent one.
            tensors[f"{key}.alpha"] = torch.tensor(
                3.0 if name.endswith(("conv2", "layers.3")) else 2.0
            )
    save_file(tensors, path)
    return path


def kohya(layers, alpha=2.0, prefix="lora_unet_", dot="_"):
    """The tensors of layers (A, B) with down, up and alpha, by kohya's names unless told others."""
    found = {}
    for name, (down, up) in layers.items():
        key = f"{prefix}{name.replace('.', dot)}"
        found |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}
        found[f"{key}.alpha"] = torch.tensor(float(alpha))
    return found
