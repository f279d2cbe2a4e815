"""Krea 2's and Z-Image's transformers of diffusers with images to look at, of their own modules.

diffusers has no such call: tokens are put beside each other here, those of images to look at with
the modulation of a clean image, and a mask says which tokens see which. Source:
ai-toolkit, extensions_built_in/diffusion_models/krea2/src (pipeline.py and mmdit.py).
"""

from typing import Any

import torch
from torch.nn import functional

LAYOUTS = ("blind", "joint")


def _patches(x: torch.Tensor) -> torch.Tensor:
    """Tokens of Krea 2, b t 4c, of a map b c h w."""
    b, c, h, w = x.shape
    tokens = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return tokens.reshape(b, h // 2 * (w // 2), 4 * c)


def _grid(frame: int, h: int, w: int) -> torch.Tensor:
    """Positions t 3 of an image's tokens."""
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    return torch.stack([torch.full_like(rows, frame), rows, columns], -1).reshape(-1, 3)


def _seen(keys: torch.Tensor, clean: torch.Tensor, layout: str) -> torch.Tensor:
    """Which keys each query sees, b 1 t t.

    keys: b t, no padding. clean: t, which tokens are of images to look at.
    """
    seen = keys[:, None].expand(-1, len(clean), -1)
    if layout == "blind":
        seen = seen & (~clean[:, None] | clean[None])
    return seen[:, None]


def krea2(
    network: Any,
    noisy: torch.Tensor,
    times: torch.Tensor,
    text: torch.Tensor,
    mask: torch.Tensor,
    images: list[torch.Tensor],
    layout: str,
) -> torch.Tensor:
    """The prediction b c h w, for a text b s l d and a mask b s, and images b c h w each."""
    s, (b, c, h, w) = text.shape[1], noisy.shape
    maps = [_patches(x) for x in (noisy, *images)]
    count, total = maps[0].shape[1], sum(x.shape[1] for x in maps)
    temb = network.time_embed(times, dtype=noisy.dtype)
    still = network.time_embed(torch.zeros_like(times), dtype=noisy.dtype)
    rows = [network.time_mod_proj(functional.gelu(x, approximate="tanh")) for x in (temb, still)]
    clean = torch.arange(s + total) >= s + count
    modulation = torch.where(clean[None, :, None], rows[1], rows[0])
    own = network.text_fusion(text, attention_mask=mask[:, None, None])
    x = torch.cat([network.txt_in(own), network.img_in(torch.cat(maps, 1))], dim=1)
    ids = [torch.zeros(s, 3, dtype=torch.long)]
    sizes = [(m.shape[2] // 2, m.shape[3] // 2) for m in (noisy, *images)]
    ids += [_grid(i, *size) for i, size in enumerate(sizes)]
    rotation = network.rotary_emb(torch.cat(ids))
    seen = _seen(torch.cat([mask, mask.new_ones(b, total)], 1), clean, layout)
    for block in network.transformer_blocks:
        x = block(x, modulation, rotation, seen)
    y = network.final_layer(x[:, s : s + count], temb)
    return y.view(b, h // 2, w // 2, c, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(noisy.shape)


def z_image(
    network: Any,
    noisy: torch.Tensor,
    time: torch.Tensor,
    caption: torch.Tensor,
    images: list[torch.Tensor],
    layout: str,
) -> torch.Tensor:
    """The prediction c h w of one image, for a time, a caption s d, and images c h w each."""
    x_in, final = network.all_x_embedder["2-1"], network.all_final_layer["2-1"]
    rope = network.rope_embedder
    moving, still = (
        network.t_embedder(t.view(1) * network.t_scale) for t in (time, torch.tensor(1.0))
    )
    length = len(caption) + -len(caption) % 32
    tokens, ids, sizes = [], [], []
    for i, x in enumerate((noisy, *images)):
        own, size, (_, rows, columns) = network._patchify_image(x[:, None], 2, 1)
        fill = -len(own) % 32
        pad = network.x_pad_token.expand(fill, -1)
        tokens.append(torch.cat([x_in(own), pad]))
        ids.append(_grid(length + 1 + i, rows, columns))
        ids.append(torch.zeros(fill, 3, dtype=torch.long))
        sizes.append(size)
    count = len(tokens[0])
    x, rotation = torch.cat(tokens)[None], rope(torch.cat(ids))[None]
    clean = torch.arange(x.shape[1]) >= count

    def through(block: Any, x: torch.Tensor, rotation: torch.Tensor, clean: torch.Tensor) -> Any:
        seen = _seen(torch.ones(1, len(clean), dtype=torch.bool), clean, layout)
        return block(x, seen, rotation, None, (~clean)[None].long(), moving, still)

    for block in network.noise_refiner:
        x = through(block, x, rotation, clean)
    c = network.cap_embedder(caption)
    c = torch.cat([c, network.cap_pad_token.expand(length - len(c), -1)])[None]
    own = _grid(0, 1, 1).repeat(length, 1)
    own[:, 0] = 1 + torch.arange(length)
    own_rotation = rope(own)[None]
    for block in network.context_refiner:
        c = block(c, None, own_rotation)
    x, rotation = torch.cat([x, c], 1), torch.cat([rotation, own_rotation], 1)
    clean = torch.cat([clean, torch.zeros(length, dtype=torch.bool)])
    for block in network.layers:
        x = through(block, x, rotation, clean)
    y = final(x, c=moving)
    return network.unpatchify(list(y), [sizes[0]], 2, 1)[0][:, 0]
